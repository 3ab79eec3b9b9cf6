"""Which part of the tensors is compared at which step: all of them within 16 steps, and no step pays for all.

A comparison has a cost of its own, whatever it compares: its code is no longer in the processor's caches. So the
tensors of a small model are compared together, at every fourth step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

STEPS = 16
"""In so many steps all tensors are compared."""
_FEWEST = 4
"""Comparisons in these steps."""
_OF_A_TENSOR = 30_000
"""Numbers that could be summed in the time which each tensor takes in addition."""
_ENOUGH = 400_000
"""Numbers in a part that take longer than what each comparison costs."""
_UNIT = 1024
"""Tensors are cut at multiples of this number of elements."""


class Slice(NamedTuple):
    """A tensor, or a part of one.

    Parameters
    ----------
    number
        Of the tensor.
    begin, end
        Its elements; ``None``: to the end.
    """

    number: int
    begin: int
    end: int | None

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this part of its tensor."""
        whole = self.end is None and not self.begin
        return tensor if whole else tensor.detach().reshape(-1)[self.begin : self.end]


class Rotation:
    """The division of tensors into parts, and their turns.

    Parameters
    ----------
    tensors
        The tensors; only their sizes count, which are the same on all members.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        times = [_OF_A_TENSOR + tensor.numel() * tensor.element_size() // 4 for tensor in tensors]
        total = sum(times)
        count = next((count for count in (1, 2, 4, 8) if total <= count * _ENOUGH), STEPS)
        most = max(1, -(-total // count))
        self.parts: list[list[Slice]] = [[] for _ in range(count)]
        """At most 16, which take about equal times; whole tensors if possible."""
        self._stride = STEPS // max(count, _FEWEST)
        before = 0
        for number, (tensor, time) in enumerate(zip(tensors, times, strict=True)):
            for piece, its_time in _cut(number, tensor.numel(), time, most):
                self.parts[min((before + its_time // 2) // most, count - 1)].append(piece)
                before += its_time

    def part_at(self, step: int) -> int | None:
        """Return the number of the part that is compared after a step; ``None``: none is."""
        turn, rest = divmod(step, self._stride)
        return None if rest else turn % len(self.parts)


def _cut(number: int, length: int, time: int, most: int) -> list[tuple[Slice, int]]:
    """Cut a tensor that takes more than a part may take."""
    pieces = -(-time // most)
    if pieces == 1 or length < pieces * _UNIT:
        return [(Slice(number, 0, None), time)]
    size = -(-length // pieces // _UNIT) * _UNIT
    ends: list[int | None] = [*range(size, length, size), None]
    return [
        (Slice(number, begin, end), time // pieces) for begin, end in zip(range(0, length, size), ends, strict=True)
    ]
