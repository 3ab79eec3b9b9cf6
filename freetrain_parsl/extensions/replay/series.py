"""Sums over equal bins of time: the data of charts, independent of the number of events."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["Bins"]


class Bins:
    """Named sums over bins of time, in seconds."""

    def __init__(self, start: float, end: float, number: int = 600) -> None:
        self.start = start
        self.number = number
        self.seconds = (end - start) / number
        self._sums: dict[str, npt.NDArray[np.float64]] = {}

    def add_rate(self, name: str, start: float, end: float, rate: float) -> None:
        """Add `rate` times the seconds from `start` to `end`, distributed over the bins."""
        if end <= start or rate == 0:
            return
        sums = self._of(name)
        first, last = self._bin(start), self._bin(end)
        if first == last:
            sums[first] += rate * (end - start)
            return
        sums[first] += rate * (self.start + (first + 1) * self.seconds - start)
        sums[first + 1 : last] += rate * self.seconds
        sums[last] += rate * (end - self.start - last * self.seconds)

    def add(self, name: str, time: float, amount: float) -> None:
        """Add an amount to the bin that contains `time`."""
        self._of(name)[self._bin(time)] += amount

    def include(self, other: Bins, factor: float) -> None:
        """Add `factor` times the sums of `other`, which must cover the same time with the same number of bins."""
        for name, sums in other._sums.items():
            self._of(name)[:] += factor * sums

    def sums(self, name: str) -> npt.NDArray[np.float64]:
        """Return the sum in each bin, shape (number,)."""
        return self._sums.get(name, np.zeros(self.number))

    def _of(self, name: str) -> npt.NDArray[np.float64]:
        return self._sums.setdefault(name, np.zeros(self.number))

    def _bin(self, time: float) -> int:
        return min(self.number - 1, max(0, int((time - self.start) / self.seconds)))
