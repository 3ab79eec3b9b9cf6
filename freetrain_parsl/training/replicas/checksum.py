"""Checksums of the bits of tensors, and which part of them is compared at which step.

A checksum is a sum of 64-bit words, read later on a GPU. All tensors are compared within 16 steps, and no step pays for
all. A comparison has a cost of its own, whatever it compares: its code is no longer in the processor's caches. So the
tensors of a small model are compared together, at every fourth step.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_SMALL = 4096
"""Bytes; smaller tensors are joined, and each of their words has its own weight."""
_ROWS = 16
"""Parts of a larger tensor, each with its own sum: a permutation of its elements has other sums."""
_FACTORS = (0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9)


class Checksum:
    """A checksum of some tensors, for each device; equal bits give equal checksums.

    The sums are queued on the tensors' devices at once. Reading them waits for the device.

    Parameters
    ----------
    tensors
        Strided tensors of any shape and dtype.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        with torch.no_grad():
            for tensor in tensors:
                by_device.setdefault(tensor.device, []).extend(_words(tensor))
            sums = [_weighted_sum(parts) for parts in by_device.values()]
        self._events: list[torch.cuda.Event] = []
        self._sums = [self._to_host(each) if each.is_cuda else each for each in sums]

    @property
    def is_pending(self) -> bool:
        """Whether reading it may wait for a GPU."""
        return bool(self._events)

    def read(self) -> tuple[int, ...]:
        """Return the checksum, one number for each device."""
        for event in self._events:
            event.synchronize()
        return tuple(int(each) for each in self._sums)

    def _to_host(self, on_gpu: torch.Tensor) -> torch.Tensor:
        host = torch.empty((), dtype=torch.int64, pin_memory=True).copy_(on_gpu, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's own
        event.record(torch.cuda.current_stream(on_gpu.device))
        self._events.append(event)
        return host


def _words(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return a tensor's bits as int32 tensors of few elements: its own bits if it is small, sums otherwise."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    flat = tensor.reshape(-1).contiguous()
    size = flat.element_size()
    if flat.numel() * size <= _SMALL:
        return [_ints(flat)]
    if flat.storage_offset() * size % 8:  # a member of an array, or a part of another tensor
        flat = flat.clone()
    in_row = flat.numel() * size // (8 * _ROWS)
    summed = in_row * _ROWS * 8 // size
    sums = flat[:summed].view(torch.int64).view(_ROWS, in_row).sum(1)
    parts = [sums.view(torch.int32)]
    return parts if summed == flat.numel() else [*parts, _ints(flat[summed:])]


def _ints(flat: torch.Tensor) -> torch.Tensor:
    match flat.element_size():
        case 1:
            return flat.view(torch.uint8).to(torch.int32)
        case 2:
            return flat.view(torch.int16).to(torch.int32)
    return flat.view(torch.int32)


def _weighted_sum(parts: list[torch.Tensor]) -> torch.Tensor:
    joined = parts[0] if len(parts) == 1 else torch.cat(parts)
    length = max(joined.numel(), 1)
    return (joined * _weights(1 << (length - 1).bit_length(), joined.device)[: joined.numel()]).sum()


@lru_cache(maxsize=8)
def _weights(length: int, device: torch.device) -> torch.Tensor:
    """Return odd int64 numbers that look random; the shorter sequences are beginnings of the longer ones."""
    numbers = torch.arange(1, length + 1, device=device) * _FACTORS[0]
    return (numbers ^ (numbers >> 29)) * _FACTORS[1] | 1


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
