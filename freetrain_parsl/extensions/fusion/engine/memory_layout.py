"""The layout of a parameter in memory: its dimensions can be there in another order, as with channels last."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

__all__ = ["MemoryLayout"]


class MemoryLayout:
    """Converts between a tensor of some shape and its elements as they are in memory.

    Parameters
    ----------
    tensor
        It has the shape and the layout. If it has gaps or overlaps in memory, elements are in the order of its indices.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        strides = tensor.stride()
        plain = list(range(tensor.dim()))
        order = sorted(plain, key=lambda place: -strides[place])
        self.order = order if tensor.permute(order).is_contiguous() else plain
        """The dimensions from the outermost to the innermost."""
        self.is_plain = self.order == plain
        """Whether that is their own order."""
        self._shape = tensor.shape
        self._in_memory = [tensor.shape[place] for place in self.order]
        self._places = sorted(plain, key=self.order.__getitem__)

    def flat(self, values: torch.Tensor) -> torch.Tensor:
        """Return values of the shape, perhaps behind further dimensions, with one dimension in its place."""
        lead = values.shape[: values.dim() - len(self._shape)]
        if not self.is_plain:
            values = values.permute(_behind(len(lead), self.order))
        return values.reshape(*lead, -1)

    def shaped(self, elements: torch.Tensor) -> torch.Tensor:
        """Return the opposite of `flat`, a view."""
        lead = elements.shape[:-1]
        if self.is_plain:
            return elements.view(lead + self._shape)
        return elements.view([*lead, *self._in_memory]).permute(_behind(len(lead), self._places))


def _behind(lead: int, order: Sequence[int]) -> list[int]:
    """Return an order of dimensions behind others that stay."""
    return [*range(lead), *(lead + place for place in order)]
