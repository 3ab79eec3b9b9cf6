"""Streams: data that can only be read sequentially, divided as exactly as map-style data.

Every process reads the stream, keeps its own part of each batch and drops the rest. Processes may therefore join and
leave, at the cost that each of them reads everything. A stream with ``state_dict`` and ``load_state_dict`` is not read
from its start again after a move.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from freetrain_parsl.errors import UsageError
from freetrain_parsl.training.data.random_streams import seed_cpu

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

_MARK_EVERY = 4096  # samples; a repeated batch is read again from the last mark


@dataclass(frozen=True)
class _Mark:
    """A position in the stream, and the source's state there."""

    epoch: int
    next: int
    source: Any


class Stream:
    """A stream whose samples are accessed by their positions in an epoch; created by ``session.stream``.

    The source yields the samples of an epoch each time it is iterated over.
    """

    def __init__(self, source: Iterable[Any], samples: int) -> None:
        self._source: Any = source
        self._samples = samples
        self._has_state = hasattr(source, "state_dict") and hasattr(source, "load_state_dict")
        self._front: Any = None
        self._iterator: Iterator[Any] | None = None
        self._epoch = 0
        self._next = 0
        self._marks: list[_Mark] = []  # two at most, of this epoch or an earlier one

    def __len__(self) -> int:
        return self._samples

    def fetch(self, seed: int, epoch: int, positions: Sequence[int]) -> list[Any]:
        """Return the samples of an epoch at these positions, which must be ascending.

        Raises
        ------
        UsageError
            The stream has ended before the last position.
        """
        if self._iterator is None or (self._epoch, self._next) > (epoch, positions[0]) or self._epoch != epoch:
            self._go_back(seed, epoch, positions[0])
        elif self._has_state and self._next - max((m.next for m in self._marks), default=0) >= _MARK_EVERY:
            self._marks = [*self._marks[-1:], self._here()]
        return [self._read(seed, position) for position in positions]

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the stream; its start, if the source has no state."""
        mark = self._here() if self._iterator is not None and self._has_state else None
        if mark is None:
            mark = self._marks[-1] if self._marks else _Mark(0, 0, None)
        return {"epoch": mark.epoch, "next": mark.next, "source": copy.deepcopy(mark.source)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state."""
        self._iterator = None
        self._marks = []
        if self._has_state and state["source"] is not None:
            self._marks = [_Mark(state["epoch"], state["next"], copy.deepcopy(state["source"]))]

    def _here(self) -> _Mark:
        return _Mark(self._epoch, self._next, copy.deepcopy(self._source.state_dict()))

    def _go_back(self, seed: int, epoch: int, position: int) -> None:
        """Open the source at the last mark before a position, or at its start."""
        if self._has_state and self._front is None:
            self._front = copy.deepcopy(self._source.state_dict())
        self._marks = [mark for mark in self._marks if mark.epoch == epoch and mark.next <= position]
        self._epoch, self._next = epoch, self._marks[-1].next if self._marks else 0
        seed_cpu(seed, epoch)
        if self._marks:
            self._tell_epoch(epoch)  # first: set_epoch resets some sources
            self._source.load_state_dict(copy.deepcopy(self._marks[-1].source))
        else:
            if self._has_state:  # some continue from their position even in a new iteration
                self._source.load_state_dict(copy.deepcopy(self._front))
            self._tell_epoch(epoch)
        self._iterator = iter(self._source)

    def _tell_epoch(self, epoch: int) -> None:
        if hasattr(self._source, "set_epoch"):
            self._source.set_epoch(epoch)

    def _read(self, seed: int, position: int) -> Any:
        """Read up to a position; the source draws the same random numbers for a sample in every process."""
        assert self._iterator is not None, "opened by fetch"
        while True:
            seed_cpu(seed, self._epoch, self._next)
            try:
                sample = next(self._iterator)
            except StopIteration:
                raise UsageError(
                    f"session.stream: {type(self._source).__name__} ended after {self._next} samples, "
                    f"but samples={self._samples} was given"
                ) from None
            self._next += 1
            if self._next > position:
                return sample
