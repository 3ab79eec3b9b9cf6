"""How many training jobs an array should have: found by timing real steps, never assumed.

First two training jobs are timed one by one and fused, in turns, so that both are affected by what else the machine
does. Then their number doubles while each member-step becomes faster by a tenth; one size at which it does not may have
been timed while something else ran, so that the next one is tried, too. If fusing is not faster than one by one by a
tenth, the training jobs go on one by one. Near this limit both ways are timed again, with as many training jobs as are
fused.

One by one means apart, each in a process of its own, unless most of what a training job keeps in memory is a frozen
base that is in memory once for all of them: then they stay in the process, and step in turns.
"""

from __future__ import annotations

import math

__all__ = ["ArraySizing"]

_SKIPPED, _TIMED = 3, 15  # steps of each size: without the first, which allocate memory; the fastest of the others
_TURNS = 3  # of the first size, and of a size whose gain is near the limit
_GAIN = 1.1
_NEAR = 1.2  # factor between a gain and the limit
_TRIES = 2  # sizes in a row without such a gain
_MEMORY_SHARE = 0.8
_LEAST_BASE = 32e6  # bytes: a tenth of what a process needs by itself, for torch
_BASE_SHARE = 0.5  # of what a member keeps in memory


class ArraySizing:
    """Decides on the size of an array from the times of its steps.

    Parameters
    ----------
    limit
        Maximum number of members.
    size
        Number of members that is known to be best when fused; ``None``: it is to be found.
    memory
        Memory of the device in bytes, if it is limited.
    turns
        Why it is known that `size` members are to step in turns; empty: it is not.
    """

    def __init__(self, limit: int, size: int | None = None, *, memory: float = math.inf, turns: str = "") -> None:
        self.size = min(2 if size is None else size, limit)
        """Number of members to train together now."""
        self.fused = size is not None and not turns
        """Whether to fuse as many."""
        self.turns = turns
        """Why as many are not fused, but step in turns with one base; empty: they do not."""
        self.decided = size is not None or limit < 2
        """Whether size and mode stay."""
        self._limit = limit
        self._memory = memory
        self._turns = 0
        self._final = False  # whether the size stays, and both ways are timed again
        self._steps = 0
        self._shortest = math.inf
        self._alone = math.inf
        self._times: dict[int, float] = {}  # size -> seconds for each member-step, fused
        self._used: dict[int, tuple[float, float]] = {}  # size -> bytes that all share, other bytes

    @property
    def gain(self) -> float:
        """Speed at the best size measured, relative to one by one; 1.0 before fused steps were timed."""
        return self._alone / min(self._times.values()) if self._times else 1.0

    @property
    def verdict(self) -> str:
        """Why members are not fused, if that does not pay."""
        return f"fused they are {self.gain:.2f} times as fast as one by one"

    @property
    def gain_size(self) -> int:
        """The size with this gain."""
        return min(self._times, key=lambda size: self._times[size], default=1)

    @property
    def completes_size(self) -> bool:
        """Whether the next step is the last of those that time a size, after which its memory is asked for."""
        return self._steps == _SKIPPED + _TIMED - 1

    def takes_turns(self, members: int, base: float, own: float) -> bool:
        """Let members that are not fused step in turns, if memory is a reason for it; return whether they do.

        Parameters
        ----------
        members
            Number of those that train now: all of them stay.
        base
            Bytes that each needs, and that are in memory once for all.
        own
            Bytes that each keeps from step to step beside these, on average.
        """
        if not self.fused and members > 1 and base >= max(_LEAST_BASE, _BASE_SHARE * (base + own)):
            self.size, self.turns = members, self.verdict
        return bool(self.turns)

    def fuses(self, members: int) -> bool:
        """Return whether to fuse this number of members; while fewer than `size` are there, nothing is timed."""
        if self.decided or members == self.size:
            return self.fused
        return self.gain >= _GAIN

    def count(self, seconds: float, memory: float = 0.0, shared: float = 0.0) -> bool:
        """Count a step of `size` members.

        Parameters
        ----------
        seconds
            Its time.
        memory
            Bytes of the device in use.
        shared
            Bytes of these that do not depend on the number of members: of the frozen parameters that all have.

        Returns
        -------
        decided
            Whether size and mode stay from here on.
        """
        if self.decided:
            return True
        self._steps += 1
        if self._steps > _SKIPPED:
            self._shortest = min(self._shortest, seconds / self.size)
        if self._steps == _SKIPPED + _TIMED:
            self._next(self._shortest, memory, shared)
            self._steps, self._shortest = 0, math.inf
        return self.decided

    def _next(self, seconds: float, memory: float, shared: float) -> None:
        if not self.fused:
            self._alone, self.fused = min(seconds, self._alone), True
            return
        self._times[self.size] = min(seconds, self._times.get(self.size, math.inf))
        self._used[self.size] = shared, memory - shared
        self._turns += 1
        if self._turns < _TURNS:
            self.fused = False
        elif self._final:
            self._decide()
        elif self._may_grow():
            self.size = min(2 * self.size, self._limit)
        elif self.gain_size == self.size > 2 and _GAIN / _NEAR < self.gain < _GAIN * _NEAR:
            self._final, self.fused, self._turns = True, False, 1  # the turn before counts
        else:
            self._decide()

    def _may_grow(self) -> bool:
        """Return whether a larger array may be faster, and has room."""
        larger = min(2 * self.size, self._limit)
        if larger == self.size or self._extrapolated(larger) > _MEMORY_SHARE * self._memory:
            return False
        before = sorted(self._times)[:-_TRIES]
        return not before or self._gain_over(before) >= _GAIN

    def _gain_over(self, sizes: list[int]) -> float:
        """Return the speed at the best size measured, relative to the best of these."""
        return min(self._times[size] for size in sizes) / min(self._times.values())

    def _extrapolated(self, size: int) -> float:
        """Return the bytes that a larger array would need."""
        shared, own = self._used[self.size]
        return shared + own / self.size * size

    def _decide(self) -> None:
        self.decided = True
        self.fused = self.gain >= _GAIN
        self.size = self.gain_size
