"""Copy-on-write clones of tensors: one memory, of which whoever writes to a clone gets a copy of its own.

A write in place, through ``.data``, a view or numpy moves the writer's tensor elsewhere; all other clones keep the
numbers. So who keeps a clone of a tensor can read it later without a copy, and sees from its address whether the tensor
is still the same. Version counters cannot tell: writes through ``.data`` do not count.

torch has this in private functions, which only this module uses. ``data_ptr()`` and ``numpy()`` count as writes, and
``torch.save`` calls the former: use `address_of` and `plain`.
"""

from __future__ import annotations

import contextlib
import ctypes
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["address_of", "are_same", "can_clone", "clone_of", "is_clone", "is_clone_of", "places_of", "plain"]

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # bytes of a number -> type with as many
_PLAIN = (torch.Tensor, nn.Parameter)  # other classes may have no memory of their own, as DTensors
_lazy_clone: Any = getattr(torch, "_lazy_clone", None)
_address: Any = getattr(torch._C, "_data_address", None)  # noqa: SLF001
_is_cow: Any = getattr(torch._C, "_is_cow_tensor", None)  # noqa: SLF001


def can_clone() -> bool:
    """Return whether this torch has copy-on-write clones."""
    return _lazy_clone is not None and _address is not None and _is_cow is not None


def is_clone(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a copy-on-write clone, or has such."""
    if type(tensor) not in _PLAIN or tensor.layout is not torch.strided:
        return False
    return can_clone() and bool(_is_cow(tensor))


def clone_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy-on-write clone of a tensor; of a copy of it, if its memory was not allocated by torch's allocator.

    Such is that of mapped files, of arrays of numpy, of tensors in shared memory, and what ``torch.load`` returns.
    """
    tensor = tensor.detach()
    if tensor.untyped_storage().resizable():  # else a write to a clone, for which there is no allocator, would crash
        with contextlib.suppress(RuntimeError):  # memory of another kind that torch cannot share so
            return cast("torch.Tensor", _lazy_clone(tensor))
    return cast("torch.Tensor", _lazy_clone(tensor.clone()))


def address_of(tensor: torch.Tensor) -> int:
    """Return where a tensor's first number is in memory; unlike ``data_ptr()``, this leaves clones what they are."""
    if not is_clone(tensor):
        return tensor.data_ptr()
    return int(_address(tensor) + tensor.storage_offset() * tensor.element_size())


def places_of(tensors: Iterable[torch.Tensor]) -> list[tuple[int, int]]:
    """Return where tensors are: while a clone is kept, nothing but its clones can be in its place."""
    return [(_address(tensor), int(tensor.storage_offset())) for tensor in tensors]


def is_clone_of(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors are the same numbers in one memory, which neither can change for the other."""
    return (
        is_clone(one)
        and is_clone(other)
        and address_of(one) == address_of(other)
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.dtype == other.dtype
    )


def are_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two plain tensors are bitwise the same; memory that they share is not read."""
    if is_clone_of(one, other):
        return True
    if (one.shape, one.stride(), one.dtype, one.device) != (other.shape, other.stride(), other.dtype, other.device):
        return False
    one, other = one.detach(), other.detach()
    integers = _INTEGERS.get(one.element_size())
    if integers is not None and one.is_floating_point() and one.dim():  # NaN equals itself, and zeros have signs
        one, other = one.view(integers), other.view(integers)
    return torch.equal(one, other)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor on the CPU of a clone's numbers, to be read while the clone exists.

    It is no copy of a contiguous clone on the CPU.
    """
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or not is_clone(tensor) or not tensor.numel():
        return tensor.detach().to("cpu", copy=True).contiguous()
    memory: Any = (ctypes.c_char * tensor.nbytes).from_address(address_of(tensor))
    return torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)
