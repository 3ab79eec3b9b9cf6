"""With ``order="torch"`` a training job is that of the plain script with the same seed."""

from __future__ import annotations

import random
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import plain_loops
import pytest
import torch
from habits import HELD
from plain_loops import KINDS, SAMPLES, in_session, plain
from test_loop_state import assert_close, value_of
from torch.utils.data import DataLoader, RandomSampler, TensorDataset
from training_crew import equal, run_member

from freetrain_parsl.errors import CheckpointMismatch, UsageError
from freetrain_parsl.training.fragment import Membership, Paused, run_local

if TYPE_CHECKING:
    from pathlib import Path

    from crew import Crew


def alone(root: Path, **kwargs: Any) -> Any:
    return run_member(in_session, kwargs, root=root, membership=Membership("net"), seed=3)


def test_a_session_is_bit_by_bit_a_plain_script_of_another_process(tmp_path: Path) -> None:
    """The weights, the order over several epochs, and the losses."""
    file = tmp_path / "plain.pt"
    subprocess.run([sys.executable, plain_loops.__file__, str(file)], check=True)
    assert equal(value_of(alone(tmp_path)), torch.load(file, weights_only=True))


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_loader_has_its_order(tmp_path: Path, kind: str) -> None:
    assert equal(value_of(alone(tmp_path, kind=kind)), plain(kind))


@pytest.mark.parametrize("kind", ["shuffle", "generator, drop_last", "drawn", "workers that persist"])
@pytest.mark.parametrize("pauses", [[5], [7, 17]])
def test_a_training_that_resumes_has_the_order_of_the_plain_script(
    tmp_path: Path, kind: str, pauses: list[int]
) -> None:
    """In the middle of an epoch and at its end."""
    expected = plain(kind)
    for step in pauses:
        assert isinstance(alone(tmp_path, kind=kind, pause_at=step).end, Paused)
    resumed = value_of(alone(tmp_path, kind=kind))
    assert resumed["seen"] == expected["seen"][pauses[-1] :]
    assert equal({**resumed, "seen": None}, {**expected, "seen": None})


@pytest.mark.smoke
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["shuffle", "weighted, generator"])
def test_several_processes_divide_the_batches_of_the_plain_script(crew: Crew, tmp_path: Path, kind: str) -> None:
    """Also one that joins in the second epoch; the results differ by the rounding of sums."""
    expected = plain(kind)
    run = crew.start(2, tmp_path, in_session, kind=kind, hold_at=10, session_options={"seed": 3})
    run.until(lambda: (tmp_path / "net" / "files" / HELD).exists() or run.ended)
    run.regroup(3)
    results = [value_of(outcome) for outcome in run.outcomes()]
    for result in results:
        assert_close({**result, "seen": None}, {**expected, "seen": None})
    seen = [results[rank]["seen"] for rank in range(3)]
    parts = zip(seen[0][10:], seen[1][10:], seen[2], strict=True)
    assert [[*one, *two, *three] for one, two, three in parts] == expected["seen"][10:]


def test_the_function_starts_with_the_generators_of_a_plain_script() -> None:
    def draw(_session: Any) -> list[float]:
        return [torch.rand(()).item(), np.random.uniform(), random.random()]  # noqa: NPY002 - as user code does

    torch.manual_seed(7)
    np.random.seed(7)  # noqa: NPY002 - as user code does
    random.seed(7)
    expected = draw(None)
    assert run_local(draw, seed=7) == expected


@pytest.mark.parametrize("given", ["dataset", "dataset and sampler", "loader"])
def test_the_order_can_be_given_with_a_dataset_or_a_loader(given: str) -> None:
    def train(session: Any) -> list[int]:
        session.prepare(*plain_loops.make_model())
        data = TensorDataset(torch.arange(SAMPLES))
        match given:
            case "dataset":
                loader = session.loader(data, 8, order="torch")
            case "loader":
                loader = session.loader(DataLoader(data, 8, shuffle=True), order="torch")
            case _:
                loader = session.loader(data, 8, order="torch", sampler=RandomSampler(data))
        for _ in session.epochs(1):
            return next(iter(loader))[0].tolist()
        raise AssertionError

    torch.manual_seed(0)
    plain_loops.make_model()
    expected = next(iter(DataLoader(TensorDataset(torch.arange(SAMPLES)), 8, shuffle=True)))[0].tolist()
    assert run_local(train) == expected


def test_another_order_is_another_training(tmp_path: Path) -> None:
    def train(session: Any, order: str | None) -> None:
        session.prepare(*plain_loops.make_model())
        data = session.loader(TensorDataset(torch.zeros(9, 6).double()), 3, order=order)
        for _ in session.epochs(1):
            for (x,) in data:
                session.step(x.sum() * session._runtime.state.objects["model"][0].weight.sum())

    run_local(train, "torch", directory=tmp_path)
    with pytest.raises(CheckpointMismatch, match="it was trained with drawn 9, now it is None"):
        run_local(train, None, directory=tmp_path)


def test_an_unknown_order_is_refused() -> None:
    def train(session: Any) -> None:
        session.loader(TensorDataset(torch.zeros(9)), 3, order="pytorch")

    with pytest.raises(UsageError, match="order is 'torch' or a function: epoch -> positions; got 'pytorch'"):
        run_local(train)
