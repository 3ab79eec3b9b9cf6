"""How many training jobs an array should have: found by timing real steps, never assumed.

First two training jobs are timed one by one and fused, in turns, so that both are affected by what else the machine
does. Then their number doubles while each member-step becomes faster by a tenth; one size at which it does not may have
been timed while something else ran, so that the next one is tried, too. If fusing is not faster than one by one by a
tenth, the training jobs go on one by one. Near this limit both ways are timed again, with as many training jobs as are
fused. Where steps are long, fewer are timed: they average over what disturbs short ones.

One by one means apart, each in a process of its own, unless most of what a training job keeps in memory is a frozen
base that is in memory once for all of them: then they stay in the process, and step in turns.
"""

from __future__ import annotations

import math
import time
from contextlib import suppress
from pathlib import Path

import torch

__all__ = ["ArraySizing", "StepTimer"]

_THREADS = Path("/proc/self/task")
_SKIPPED, _TIMED = 3, 15  # steps of each size: without the first, which allocate memory; the fastest of the others
_LONG, _LEAST = 0.2, 3  # seconds after which no more are skipped, and no more than these are timed
_TURNS = 3  # of the first size, and of a size whose gain is near the limit
_LONG_TURNS = 5.0  # seconds of timed steps after which there are no more turns
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
        self.too_large = ""
        """How many members need more memory than there is when they are fused; empty: that has not happened."""
        self._limit = limit
        self._memory = memory
        self._turns = 0
        self._final = False  # whether the size stays, and both ways are timed again
        self._skipped: list[float] = []  # seconds of the steps of this size that do not count
        self._timed: list[float] = []  # and of those that do
        self._spent = 0.0  # seconds of all that do, since the last turn began to count
        self._alone = math.inf
        self._times: dict[int, float] = {}  # size -> seconds for each member-step, fused
        self._used: dict[int, tuple[float, float]] = {}  # size -> bytes that all share, other bytes

    @property
    def gain(self) -> float:
        """Speed at the best size measured, relative to one by one; 1.0 before fused steps were timed."""
        return self._alone / min(self._times.values()) if self._times else 1.0

    @property
    def verdict(self) -> str:
        """Why members are not fused, if that does not pay, or needs too much memory."""
        if self.too_large and not self._times:
            return self.too_large
        return f"fused they are {self.gain:.2f} times as fast as one by one"

    @property
    def gain_size(self) -> int:
        """The size with this gain."""
        return min(self._times, key=lambda size: self._times[size], default=1)

    def completes_size(self, seconds: float) -> bool:
        """Return whether a step is the last of those that time a size, after which its memory is asked for."""
        timed = len(self._timed) + 1
        return self._skips_no_more and (timed == _TIMED or (timed >= _LEAST and sum(self._timed) + seconds >= _LONG))

    @property
    def _skips_no_more(self) -> bool:
        return len(self._skipped) == _SKIPPED or sum(self._skipped) >= _LONG

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
        if self.too_large and members > self.size:
            return False
        if self.decided or members == self.size:
            return self.fused
        return self.gain >= _GAIN

    def halve(self, members: int) -> None:
        """Decide, as there is no memory to fuse this number of members: on the best smaller size, or on half of it."""
        self.too_large = f"{members} fused training jobs need more memory than there is"
        self._times = {size: seconds for size, seconds in self._times.items() if size < members}
        self.decided, self.fused, self.size = True, members > 3, members // 2
        if self._times:
            self._decide()

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
        completes = self.completes_size(seconds)
        (self._timed if self._skips_no_more else self._skipped).append(seconds)
        if completes:
            self._spent += sum(self._timed)
            self._next(min(self._timed) / self.size, memory, shared)
            self._skipped, self._timed = [], []
        return self.decided

    def _next(self, seconds: float, memory: float, shared: float) -> None:
        if not self.fused:
            self._alone, self.fused = min(seconds, self._alone), True
            return
        self._times[self.size] = min(seconds, self._times.get(self.size, math.inf))
        self._used[self.size] = shared, memory - shared
        self._turns += 1
        if self._turns < _TURNS and self._spent < _LONG_TURNS:
            self.fused = False
        elif self._final:
            self._decide()
        elif self._may_grow():
            self.size = min(2 * self.size, self._limit)
        elif self.gain_size == self.size > 2 and _GAIN / _NEAR < self.gain < _GAIN * _NEAR:
            self._final, self.fused, self._turns, self._spent = True, False, 1, 0.0  # the turn before counts
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


class StepTimer:
    """Times a step of this process, from its creation.

    On a CPU with one thread, what counts is the time for which the step computes or waits for something, such as data,
    and not that for which others have the processors. Else it is the time on the wall.
    """

    def __init__(self) -> None:
        self._alone = torch.get_num_threads() == 1 and not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        self._queued = _queued() if self._alone else 0.0
        self._processor, self._wall = time.process_time(), time.perf_counter()

    def seconds(self) -> float:
        """Return the time since this was made."""
        wall, processor = time.perf_counter() - self._wall, time.process_time() - self._processor
        if not self._alone:
            return wall
        # Threads may wait for a processor at the same time.
        return max(processor, wall - (_queued() - self._queued))


def _queued() -> float:
    """Return the seconds for which threads of this process could have run, but others had the processors."""
    return sum(map(_queued_of, _THREADS.iterdir())) / 1e9


def _queued_of(thread: Path) -> int:
    with suppress(OSError, IndexError, ValueError):  # it has ended, or a kernel without these statistics
        return int((thread / "schedstat").read_bytes().split()[1])
    return 0
