"""Frozen tensors that are the same in all members of an array: kept once, each member with a copy-on-write clone.

Whoever writes to such a tensor gets memory of its own at that moment. So no member can change the numbers of another,
and the array notices that the tensor is no longer where it was, and stacks it from then on.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, NamedTuple

import torch

from freetrain_parsl.errors import CannotFuse
from freetrain_parsl.training.checkpoints.copy_on_write import (
    address_of,
    are_same,
    can_clone,
    clone_of,
    is_clone,
    is_clone_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import nn

__all__ = ["FROZEN", "ChangesShared", "FrozenTensors", "SharedTensor", "is_shared", "overlapping", "shared_bytes"]

_SAMPLES = 16  # elements that tell most tensors of one shape apart


class SharedTensor(NamedTuple):
    """A tensor that is the same for all members, in the place of a stack."""

    tensor: torch.Tensor


class ChangesShared(CannotFuse):
    """The model writes to a buffer or a frozen parameter that was the same for all members: it must be stacked."""


class _Known(NamedTuple):
    """A frozen tensor.

    Parameters
    ----------
    tensor
        A clone of it.
    users
        The members' parameters and buffers that are clones of it, or were.
    """

    tensor: torch.Tensor
    users: list[weakref.ref[torch.Tensor]]

    def is_used(self) -> bool:
        return any(
            user is not None and is_clone_of(user, self.tensor) for user in (reference() for reference in self.users)
        )


class FrozenTensors:
    """The frozen tensors of the models of members, each once."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], list[_Known]] = {}

    def share(self, models: Iterable[nn.Module]) -> int:
        """Make frozen parameters, and buffers beside them, clones of the tensors that are bitwise the same.

        Parameters
        ----------
        models
            Of one member. A model of which all parameters are trained is left as it is.

        Returns
        -------
        freed
            Bytes that the models had for themselves before.
        """
        if not can_clone():
            return 0
        self.purge()
        freed = 0
        with torch.no_grad():
            for model in models:
                parameters = list(model.parameters())
                if all(parameter.requires_grad for parameter in parameters):
                    continue
                seen_twice = overlapping([*parameters, *model.buffers()])
                for tensor in [*parameters, *model.buffers()]:
                    if not tensor.requires_grad and id(tensor) not in seen_twice and _is_plain(tensor):
                        freed += self._share(tensor)
        return freed

    def purge(self) -> None:
        """Forget what no member has any longer."""
        for kind, known in list(self._known.items()):
            known[:] = [each for each in known if each.is_used()]
            if not known:
                del self._known[kind]

    def _share(self, tensor: torch.Tensor) -> int:
        step = max(1, tensor.numel() // _SAMPLES)
        sample = tensor.detach().flatten()[::step].clone() if tensor.is_contiguous() else tensor.new_empty(0)
        kind = (tensor.shape, tensor.stride(), tensor.dtype, tensor.device, repr(sample.tolist()))
        known = self._known.setdefault(kind, [])
        for each in known:
            if are_same(tensor, each.tensor):
                each.users.append(weakref.ref(tensor))
                if is_clone_of(tensor, each.tensor):
                    return 0
                tensor.data = clone_of(each.tensor)
                return tensor.nbytes
        clone = clone_of(tensor)
        if not is_clone_of(tensor, clone):  # it was copied
            tensor.data = clone_of(clone)
        known.append(_Known(clone, [weakref.ref(tensor)]))
        return 0


FROZEN = FrozenTensors()
"""Those of this process, whatever the number of arrays."""


def is_shared(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether a tensor of all members is one frozen tensor."""
    first = tensors[0]
    return all(not tensor.requires_grad and is_clone_of(tensor, first) for tensor in tensors)


def shared_bytes(members: Iterable[Iterable[nn.Module]]) -> int:
    """Return the size of the frozen tensors that are in memory once for all members, given the models of each."""
    places = [
        {
            address_of(tensor): tensor.nbytes
            for model in models
            for tensor in (*model.parameters(), *model.buffers())
            if not tensor.requires_grad and is_clone(tensor)
        }
        for models in members
    ]
    common = set(places[0]).intersection(*places[1:]) if places else set()
    return sum(places[0][place] for place in common)


def overlapping(tensors: Iterable[torch.Tensor]) -> set[int]:
    """Return the identities of tensors whose memory is also another one's, as with views: a write changes both."""
    spans = []
    for tensor in {id(each): each for each in tensors if _is_plain(each)}.values():
        first = int(tensor.storage_offset())
        last = first + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        width = tensor.element_size()
        spans.append((tensor.untyped_storage()._cdata, first * width, (last + 1) * width, id(tensor)))
    found: set[int] = set()
    widest: tuple[int, int, int] = (0, 0, 0)  # memory, end, tensor
    for memory, begin, end, tensor_id in sorted(spans):
        if memory == widest[0] and begin < widest[1]:
            found |= {tensor_id, widest[2]}
        if memory != widest[0] or end > widest[1]:
            widest = memory, end, tensor_id
    return found


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has ordinary memory, unlike sparse and quantised ones, and those of other classes."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
        return False
    return not (tensor.is_quantized or tensor.is_inference() or tensor.device.type == "meta") and tensor.numel() > 0
