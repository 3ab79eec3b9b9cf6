"""Streams by position: the samples are those of the source, whichever process reads them, and from where."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import IterableDataset

from freetrain_parsl.training.data import stream as streams
from freetrain_parsl.training.data.stream import Stream

if TYPE_CHECKING:
    from collections.abc import Iterator

SAMPLES = 40


class Numbers(IterableDataset[int]):
    """Numbers from 0; an instance counts its reads."""

    def __init__(self) -> None:
        self.read = 0
        self.next = 0

    def __iter__(self) -> Iterator[int]:
        self.next = 0
        yield from self._go_on()

    def _go_on(self) -> Iterator[int]:
        while self.next < SAMPLES:
            self.read += 1
            self.next += 1
            yield self.next - 1


class Stateful(Numbers):
    """Continues from its position even in a new iteration."""

    def __iter__(self) -> Iterator[int]:
        return self._go_on()

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


class Epochs(Numbers):
    """Its samples depend on the epoch passed to `set_epoch`."""

    def __init__(self) -> None:
        super().__init__()
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def _go_on(self) -> Iterator[int]:
        return (1000 * self.epoch + number for number in super()._go_on())


class Shuffled(Numbers):
    """Shuffles in a buffer with Python's global generator."""

    def _go_on(self) -> Iterator[int]:
        waiting: list[int] = []
        for number in super()._go_on():
            waiting.append(number)
            if len(waiting) > 5:
                yield waiting.pop(random.randrange(len(waiting)))
        yield from waiting


PLACES = st.lists(
    st.tuples(st.integers(0, 2), st.sets(st.integers(0, SAMPLES - 1), min_size=1, max_size=4)), max_size=8
)


@pytest.mark.parametrize("source", [pytest.param(Numbers, marks=pytest.mark.slow), Stateful])
@pytest.mark.parametrize("every", [1, 7, 4096])
@given(places=PLACES)
def test_a_position_has_the_same_sample_in_whatever_order_they_are_asked_for(
    source: Any, every: int, places: list[tuple[int, set[int]]]
) -> None:
    """Forward and backward in an epoch, and between epochs, with and without marks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams, "_MARK_EVERY", every)
        stream = Stream(source(), SAMPLES)
        for epoch, positions in places:
            assert stream.fetch(0, epoch, sorted(positions)) == sorted(positions)


def test_what_a_source_draws_does_not_depend_on_who_reads_which_samples() -> None:
    """A shuffle buffer has the same order for one reader of everything and for two readers of every other sample."""
    whole = Stream(Shuffled(), SAMPLES).fetch(1, 0, range(SAMPLES))
    assert sorted(whole) == list(range(SAMPLES))
    parts = [Stream(Shuffled(), SAMPLES) for _ in range(2)]
    shared = [parts[position % 2].fetch(1, 0, [position])[0] for position in range(SAMPLES)]
    assert shared == whole
    assert Stream(Shuffled(), SAMPLES).fetch(1, 1, range(SAMPLES)) != whole


def test_a_source_is_told_of_each_epoch() -> None:
    stream = Stream(Epochs(), SAMPLES)
    assert [stream.fetch(0, epoch, [0, 3]) for epoch in (0, 1, 1)] == [[0, 3], [1000, 1003], [1000, 1003]]


def test_a_restored_stream_with_a_state_is_not_read_from_its_front() -> None:
    before = Stream(Stateful(), SAMPLES)
    before.fetch(0, 1, [28, 29])
    source = Stateful()
    after = Stream(source, SAMPLES)
    after.load_state_dict(before.state_dict())
    assert after.state_dict() == before.state_dict()
    assert after.fetch(0, 1, [30, 31]) == [30, 31]
    assert source.read == 2


def test_a_restored_stream_without_a_state_is_read_from_its_front() -> None:
    before = Stream(Numbers(), SAMPLES)
    before.fetch(0, 0, [29])
    source = Numbers()
    after = Stream(source, SAMPLES)
    after.load_state_dict(before.state_dict())
    assert after.fetch(0, 0, [30]) == [30]
    assert source.read == 31


def test_a_batch_that_is_done_again_is_read_from_the_last_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "_MARK_EVERY", 5)
    source = Stateful()
    stream = Stream(source, SAMPLES)
    for position in range(21):
        stream.fetch(0, 0, [position])
    read = source.read
    assert stream.fetch(0, 0, [18]) == [18]
    assert source.read - read <= 5


@pytest.mark.filterwarnings("ignore:.set_vital. is deprecated")  # torchdata 0.11 calls it
@pytest.mark.parametrize("workers", [0, 1])
def test_torchdatas_loader_is_a_source(workers: int) -> None:
    """Its state, too, avoids reading processed samples again."""
    data = pytest.importorskip("torchdata.stateful_dataloader", reason="needs torchdata")

    def loader() -> Any:
        return data.StatefulDataLoader(Stateful(), batch_size=None, num_workers=workers)

    before = Stream(loader(), SAMPLES)
    assert before.fetch(0, 0, [0, 5]) == [0, 5]
    after = Stream(loader(), SAMPLES)
    after.load_state_dict(before.state_dict())
    assert after.fetch(0, 0, [6, 7]) == [6, 7]
    assert after.fetch(0, 1, [0, 7]) == [0, 7]
