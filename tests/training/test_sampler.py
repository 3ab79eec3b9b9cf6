"""A user's sampler or DataLoader is divided over the processes exactly."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import sampled
import torch
import training_crew
from torch.nn.functional import cross_entropy
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
)
from training_crew import SAMPLES, net, run_member

from freetrain_parsl.errors import UsageError
from freetrain_parsl.training.data.audit import Audit
from freetrain_parsl.training.data.lazy_positions import counts, seeded_by_chunk
from freetrain_parsl.training.data.sampler import check_sampler, draw
from freetrain_parsl.training.fragment import Finished, Membership, Paused, run_local

if TYPE_CHECKING:
    from pathlib import Path

    from crew import Crew


def test_a_weighted_sampler_is_trained_on_as_often_as_it_yields() -> None:
    result = run_local(sampled.train)
    assert [len(epoch) for epoch in result["seen"]] == [40, 40]
    assert result["seen"][0] != result["seen"][1], "each epoch is drawn anew"
    assert len(set(result["seen"][0])) < 40, "with repetitions"
    assert result["audit"] == Audit(80, 0, 0)


def test_the_positions_of_an_epoch_are_the_same_in_every_process_and_leave_torchs_generator_alone() -> None:
    before = torch.get_rng_state()
    first = draw(sampled.weighted(), SAMPLES, 7, 1)
    torch.rand(3)
    torch.set_rng_state(before)
    assert torch.equal(first, draw(sampled.weighted(), SAMPLES, 7, 1))
    assert not torch.equal(first, draw(sampled.weighted(), SAMPLES, 7, 2))
    assert torch.equal(before, torch.get_rng_state())


def test_a_generator_of_the_samplers_own_is_seeded_too() -> None:
    own = [RandomSampler(range(50), generator=torch.Generator().manual_seed(seed)) for seed in (1, 2)]
    assert torch.equal(draw(own[0], 50, 7, 0), draw(own[1], 50, 7, 0))


class Shuffled:
    """A sampler that draws from the global generators of numpy and Python."""

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Any:
        positions = np.random.permutation(SAMPLES).tolist()  # noqa: NPY002 - as user code does
        random.shuffle(positions)
        return iter(positions)


def test_the_generators_of_numpy_and_python_are_seeded_and_restored_too() -> None:
    first = draw(Shuffled(), SAMPLES, 7, 1)
    before = random.getstate(), repr(np.random.get_state())  # noqa: NPY002 - as user code does
    assert torch.equal(first, draw(Shuffled(), SAMPLES, 7, 1))
    assert not torch.equal(first, draw(Shuffled(), SAMPLES, 7, 2))
    assert before == (random.getstate(), repr(np.random.get_state()))  # noqa: NPY002 - as user code does


@pytest.mark.slow
def test_two_processes_train_on_the_same_samples_as_one(crew: Crew, tmp_path: Path) -> None:
    alone = run_local(sampled.train)
    outcomes = crew.run(2, tmp_path, sampled.train)
    values = [outcome.end.value for outcome in outcomes if outcome and isinstance(outcome.end, Finished)]
    assert len(values) == 2
    for epoch in range(2):
        together = sorted(values[0]["seen"][epoch] + values[1]["seen"][epoch])
        assert together == sorted(alone["seen"][epoch])
    assert values[0]["audit"] == Audit(80, 0, 0)
    for name, value in alone["state"].items():
        torch.testing.assert_close(values[0]["state"][name], value)


def positions_of(loader: Any, **options: Any) -> list[int]:
    """Train one epoch on a DataLoader, and return the positions in order."""

    def train(session: Any) -> list[int]:
        model = net()
        session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        seen: list[int] = []
        data = session.loader(loader, **options)
        for _ in session.epochs(1):
            for x, y, positions in data:
                session.step(cross_entropy(model(x), y))
                seen += positions.tolist()
        return seen

    return run_local(train)


def test_a_data_loader_is_used_with_its_own_options() -> None:
    data = sampled.Recorded()
    assert positions_of(DataLoader(data, batch_size=8)) == list(range(SAMPLES))
    shuffled = positions_of(DataLoader(data, batch_size=8, shuffle=True))
    assert shuffled != sorted(shuffled) == list(range(SAMPLES))
    assert len(positions_of(DataLoader(data, batch_size=16, drop_last=True))) == SAMPLES // 16 * 16
    assert len(positions_of(sampled.by_own_loader())) == 40
    subset = positions_of(DataLoader(data, batch_size=4, sampler=SubsetRandomSampler([3, 5, 7, 9, 11])), batch_size=2)
    assert sorted(subset) == [3, 5, 7, 9, 11]
    batches = BatchSampler(SequentialSampler(data), 8, drop_last=True)  # type: ignore[arg-type]  # it has a length
    assert positions_of(DataLoader(data, batch_sampler=batches)) == list(range(SAMPLES // 8 * 8))


def by_thirds(epoch: int) -> list[int]:
    """Return an order that depends on the epoch and the global generator."""
    return [(position * 3 + epoch) % SAMPLES for position in torch.randperm(30).tolist()]


def test_an_order_of_the_users_own_is_drawn_for_each_epoch_from_seeded_generators() -> None:
    def train(session: Any) -> tuple[list[list[int]], Any]:
        model = net()
        session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        data = session.loader(sampled.Recorded(), 8, order=by_thirds)
        seen: list[list[int]] = []
        for _ in session.epochs(2):
            seen.append([])
            for x, y, positions in data:
                session.step(cross_entropy(model(x), y))
                seen[-1] += positions.tolist()
        return seen, session.audit

    seen, audit = run_local(train)
    assert audit == Audit(60, 0, 0)
    assert run_local(train)[0] == seen
    assert [sorted(epoch) for epoch in seen] == [
        sorted((3 * n + epoch) % SAMPLES for n in range(30)) for epoch in (0, 1)
    ]


def test_samples_of_similar_length_share_a_batch() -> None:
    lengths = [(7 * position) % 10 for position in range(SAMPLES)]
    order = sorted(range(SAMPLES), key=lengths.__getitem__)
    assert positions_of(DataLoader(sampled.Recorded(), batch_size=8, shuffle=True), order=lambda _epoch: order) == order


def test_workers_of_a_data_loader_are_started_as_it_says() -> None:
    """The function that starts a worker changes the samples there."""
    loader = DataLoader(sampled.Recorded(), batch_size=8, num_workers=1, worker_init_fn=_shift, prefetch_factor=4)
    assert positions_of(loader) == [position + 1000 for position in range(SAMPLES)]


def _shift(_worker: int) -> None:
    original = sampled.Recorded.__getitem__

    def shifted(self: Any, position: int) -> Any:
        return *original(self, position)[:2], position + 1000

    sampled.Recorded.__getitem__ = shifted  # type: ignore[method-assign]  # in the worker's process only


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


class Liar:
    """A sampler whose length is wrong."""

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Any:
        return iter([1, 2])


class OwnBatches(BatchSampler):
    """Batches in an order that only this class knows."""


class Endless:
    """A sampler that never stops."""

    def __len__(self) -> int:
        return 9

    def __iter__(self) -> Any:
        return itertools.cycle(range(9))


@pytest.mark.parametrize(
    ("loader", "options", "message"),
    [
        (DataLoader(Stream(), batch_size=2), {}, "session.stream"),
        (
            DataLoader(range(9), batch_sampler=OwnBatches(SequentialSampler(range(9)), 2, drop_last=False)),
            {},
            r"has a batch_sampler of its own \(a OwnBatches\)",
        ),
        (range(9), {"batch_size": 2, "sampler": DistributedSampler(range(9), 2, 0)}, "divides the data itself"),
        (
            range(9),
            {"batch_size": 2, "sampler": BatchSampler(SequentialSampler(range(9)), 2, drop_last=False)},
            "a sampler of single positions",
        ),
        (range(9), {"batch_size": 2, "sampler": iter(range(9))}, "needs len"),
        (range(9), {"batch_size": 2, "sampler": []}, "the sampler is empty"),
        (range(9), {"batch_size": 2, "sampler": [1, 99]}, "outside the dataset of 9"),
        (range(9), {"batch_size": 2, "sampler": [1, 0.5]}, "something other than positions: 'float'"),
        (range(9), {"batch_size": 0}, "batch_size must be at least 1, got 0"),
        (range(9), {"batch_size": 2.0}, "batch_size must be a whole number, got 2.0"),
        (range(9), {"batch_size": 2, "num_workers": -1}, "num_workers must be at least 0, got -1"),
        (range(9), {"batch_size": 2, "sampler": Liar()}, "has length 5 but yields 2"),
        (range(9), {"batch_size": 2, "sampler": Endless()}, "has length 9 but yields more"),
        (range(9), {"batch_size": 8, "sampler": [1, 2], "drop_last": True}, "no batch of 8 in 2"),
        (range(9), {}, "give batch_size="),
        (range(9), {"batch_size": 2, "order": 3}, "order is 'torch' or a function: epoch -> positions; got int"),
        (
            range(9),
            {"batch_size": 2, "order": lambda epoch: iter([epoch])},
            "a sequence of positions, got list_iterator",
        ),
        (range(9), {"batch_size": 2, "order": lambda epoch: [0, 9]}, "outside the dataset of 9"),
        (range(9), {"batch_size": 2, "order": lambda epoch: []}, "the sampler is empty"),
        (range(9), {"batch_size": 2, "order": lambda epoch: [1], "sampler": [2]}, "pass one"),
        (DataLoader(range(9), 2), {"order": "torch", "sampler": [2]}, "keeps the DataLoader's sampler"),
        (range(9), {"batch_size": 2, "worker_options": {"timeout": 3}}, "timeout need workers"),
        (range(9), {"batch_size": 2, "num_workers": 1, "worker_options": {"shuffle": 3}}, "got shuffle"),
    ],
)
def test_what_cannot_be_divided_is_rejected_in_one_line(loader: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        positions_of(loader, **options)
    assert "\n" not in str(caught.value)


def endless(session: Any, *, replacement: bool, order: str | None = None, pause_at: int | None = None) -> Any:
    """Draw a practically endless epoch, as minGPT does; leave it after 50 steps."""
    data = TensorDataset(torch.arange(SAMPLES), torch.randn(SAMPLES, 6))
    model = net()
    session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    state = session.state(seen=[])
    sampler = RandomSampler(data, replacement=replacement, num_samples=10**10)
    batches = session.loader(DataLoader(data, 16, sampler=sampler), order=order)
    for _ in session.epochs(1):
        for positions, x in batches:
            session.step(model(x).square().mean())
            state.seen.append(positions.tolist())
            if session.metrics["steps"] == pause_at:
                training_crew.NOTICE.pause_requested.set()
            if session.metrics["steps"] >= 50:
                return list(state.seen)
    raise AssertionError


@pytest.mark.parametrize("replacement", [True, False])
@pytest.mark.parametrize("order", [None, "torch"])
def test_a_sampler_may_be_practically_endless(tmp_path: Path, replacement: bool, order: str | None) -> None:
    """Its positions are drawn when they are needed; a training job that resumes has the same ones."""
    settings = {"replacement": replacement, "order": order}
    expected = run_local(endless, **settings)
    for pause in (7, 30):
        end = run_member(endless, {**settings, "pause_at": pause}, root=tmp_path, membership=Membership("net")).end
        assert isinstance(end, Paused)
    assert run_member(endless, settings, root=tmp_path, membership=Membership("net")).end.value == expected
    flat = [position for batch in expected for position in batch]
    assert set(flat) == set(range(SAMPLES))
    if not replacement:
        assert all(len(set(flat[begin : begin + SAMPLES])) == SAMPLES for begin in range(0, 800 - SAMPLES, SAMPLES))


@pytest.mark.parametrize("replacement", [True, False])
def test_an_endless_sampler_has_torchs_order_if_asked_for(replacement: bool) -> None:
    torch.manual_seed(0)
    torch.randn(SAMPLES, 6)
    net()
    data = torch.arange(SAMPLES)
    sampler = RandomSampler(data, replacement=replacement, num_samples=10**10)  # type: ignore[arg-type]
    plain = [batch.tolist() for batch in itertools.islice(DataLoader(data, 16, sampler=sampler), 50)]  # type: ignore[arg-type]
    assert run_local(endless, replacement=replacement, order="torch") == plain


@pytest.mark.parametrize("part", [slice(0, 10), slice(4090, 4103), slice(3, 9000), slice(9990, 10050), slice(5, 5)])
def test_a_part_of_a_lazy_sequence_is_that_of_the_whole(part: slice) -> None:
    sequence = seeded_by_chunk(RandomSampler(range(53), replacement=True, num_samples=10_000), 7, 1)
    whole = torch.cat(list(sequence.chunks()))
    assert len(whole) == len(sequence) == 10_000
    assert torch.equal(sequence[part], whole[part])
    assert torch.equal(sequence.first(20)[10:30], whole[10:20])
    assert torch.equal(counts(sequence, 53), torch.bincount(whole, minlength=53))


def test_an_endless_sampler_of_other_data_is_refused() -> None:
    with pytest.raises(UsageError, match="positions outside the dataset of 53 samples"):
        check_sampler(RandomSampler(range(54), replacement=True, num_samples=10**10), 53)
