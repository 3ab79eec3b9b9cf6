"""Which part of the tensors is compared at which step: one after another, so that no step pays for all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

MOST_PARTS = 16
_OF_A_TENSOR = 30_000
"""Numbers that could be summed in the time which each tensor takes in addition."""
_LEAST = 160_000
"""Numbers in a part, below which dividing further saves no time."""
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


def divide(tensors: Sequence[torch.Tensor]) -> list[list[Slice]]:
    """Divide tensors into at most 16 parts that take about equal times; whole tensors if possible.

    Parameters
    ----------
    tensors
        The tensors; the division depends on their sizes only.

    Returns
    -------
    parts
        At least one.
    """
    times = [_OF_A_TENSOR + tensor.numel() * tensor.element_size() // 4 for tensor in tensors]
    total = sum(times)
    count = max(1, min(MOST_PARTS, total // _LEAST))
    most = -(-total // count)
    parts: list[list[Slice]] = [[] for _ in range(count)]
    before = 0
    for number, (tensor, time) in enumerate(zip(tensors, times, strict=True)):
        for piece, its_time in _cut(number, tensor.numel(), time, most):
            parts[min((before + its_time // 2) // most, count - 1)].append(piece)
            before += its_time
    return parts


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
