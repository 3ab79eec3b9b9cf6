"""The session's data: accepted datasets, worker processes, and batches in the loop."""

from __future__ import annotations

import multiprocessing
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import IterableDataset
from training_crew import SAMPLES, Data, net

from freetrain_parsl.errors import UsageError
from freetrain_parsl.protocol.options import SessionOptions
from freetrain_parsl.training.data.audit import Audit
from freetrain_parsl.training.data.loader import check_dataset, to_device
from freetrain_parsl.training.fragment import ControlMailbox, Membership, Paused, run_fragment, run_local

if TYPE_CHECKING:
    from pathlib import Path


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


@pytest.mark.parametrize(
    ("dataset", "batch_size", "message"),
    [
        (Stream(), 4, "for a stream: session.loader"),
        ({1, 2}, 4, "got set"),
        ([], 4, "is empty"),
        ([1, 2], 3, "drop_last leaves no batch of 3 in 2 samples"),
    ],
)
def test_data_that_cannot_be_shared_out_is_refused_in_one_line(dataset: Any, batch_size: int, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        check_dataset(dataset, batch_size, shuffle=True, drop_last=True)
    assert "\n" not in str(caught.value)


class Point(NamedTuple):
    x: torch.Tensor
    name: str


def test_tensors_move_whatever_they_are_nested_in() -> None:
    data = {"a": [torch.zeros(2), "text"], "b": (Point(torch.zeros(1), "n"), 3)}
    moved = to_device(data, torch.device("meta"))
    assert moved["a"][0].is_meta
    assert moved["b"][0].x.is_meta
    assert (moved["a"][1], moved["b"][0].name, moved["b"][1]) == ("text", "n", 3)


def test_worker_processes_fetch_the_same_batches_in_every_epoch(tmp_path: Path) -> None:
    """The workers are persistent; they must receive the positions of the next epoch."""

    def batches(session: Any, workers: int) -> Any:
        model, _ = session.prepare(net(), torch.optim.SGD, lr=0.1)
        data = session.loader(Data(), 20, num_workers=workers)
        seen = []
        for _ in session.epochs(2):
            for x, y in data:
                session.step(cross_entropy(model(x), y))
                seen.append(x)
        assert (session.audit.samples_seen, session.audit.samples_lost) == (2 * SAMPLES, 0)
        return torch.cat(seen)

    here = run_local(batches, 0, directory=tmp_path / "here")
    there = run_local(batches, 1, directory=tmp_path / "there")
    assert torch.equal(here, there)


def test_a_pause_leaves_no_worker_process_behind(tmp_path: Path) -> None:
    mailbox = ControlMailbox()
    others = multiprocessing.active_children()

    def train(session: Any) -> None:
        model, _ = session.prepare(net(), torch.optim.SGD, lr=0.1)
        data = session.loader(Data(), 20, num_workers=1)
        for _ in session.epochs(2):
            for x, y in data:
                session.step(cross_entropy(model(x), y))
                assert len(multiprocessing.active_children()) > len(others)
                mailbox.pause_requested.set()

    end = run_fragment(
        train,
        options=SessionOptions("net", tmp_path),
        membership=Membership("net"),
        meet=lambda membership: None,
        mailbox=mailbox,
        report=lambda _progress: None,
    )
    assert isinstance(end, Paused)
    assert len(multiprocessing.active_children()) == len(others)


def test_batches_are_made_by_the_users_own_function(tmp_path: Path) -> None:
    def train(session: Any) -> int:
        session.prepare(net(), torch.optim.SGD, lr=0.1)
        data = session.loader(Data(), 20, collate_fn=len)
        for _ in session.epochs(1):
            size = next(iter(data))
        return size

    assert run_local(train, directory=tmp_path) == 20


@pytest.mark.parametrize("way", ["next", "fresh iterators", "break"])
def test_batches_can_be_taken_one_by_one(way: str) -> None:
    """Each batch is trained on once, also if its iterator was left for another one."""

    def train(session: Any) -> Any:
        model, _ = session.prepare(net(), torch.optim.SGD, lr=0.1)
        data = session.loader(Data(), 8)
        for _ in session.epochs(2):
            batches = iter(data)
            for _ in range(7):
                if way == "break":
                    for batch in data:
                        x, y = batch
                        break
                else:
                    x, y = next(batches if way == "next" else iter(data))
                assert session.step(cross_entropy(model(x), y))
            assert not list(data if way != "next" else batches)
        return session.metrics["steps"], session.audit

    assert run_local(train) == (14, Audit(samples_seen=2 * SAMPLES))
