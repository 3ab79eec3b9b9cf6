"""Remembering values, to put them back: the same objects with the content that they had."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

__all__ = ["PLAIN", "Remembered", "copied", "has_state", "remember", "tensors_of"]

PLAIN = frozenset((bool, int, float, str, type(None)))
"""Types of values that never change."""

_LARGE = 1 << 20  # bytes of tensors, from which on they are not copied
_MANY = 100  # tensors, likewise


class Remembered(NamedTuple):
    """A value at a moment."""

    put_back: Callable[[], Any]
    """Puts its content back, and returns it."""
    counted: tuple[torch.Tensor, ...]
    """Large tensors in it, of which there is no copy; their changes are counted."""
    version: int
    """The count."""

    @property
    def can_be_put_back(self) -> bool:
        """Whether no tensor has changed of which there is no copy."""
        return not self.counted or _version(self.counted) == self.version


def remember(value: Any, *, whole: bool = False, tensors: tuple[torch.Tensor, ...] | None = None) -> Remembered:
    """Remember a value.

    Parameters
    ----------
    value
        Numbers, strings, ``None``, tensors, lists, tuples, dictionaries, deques, or an object with a state.
    whole
        Whether to also copy large tensors.
    tensors
        The tensors of a module, if they are known.
    """
    if type(value) in PLAIN:
        return Remembered(lambda: value, (), 0)
    if whole:
        return Remembered(_undo(value, copies=True), (), 0)
    if isinstance(value, nn.Module):
        found = tuple(tensors_of(value)) if tensors is None else tensors
    elif has_state(value):
        found = ()  # its state may be made anew at each call
    else:
        found = tuple(_tensors_in(value))
    is_large = len(found) > _MANY or sum(tensor.numel() * tensor.element_size() for tensor in found) > _LARGE
    if not is_large:
        return Remembered(_undo(value, copies=True), (), 0)
    return Remembered(_undo(value, copies=False), found, _version(found))


def copied(content: Any) -> Any:
    """Return a copy of tensors and plain values in lists, tuples and dictionaries."""
    if isinstance(content, torch.Tensor):
        return content.detach().clone()
    if isinstance(content, dict):
        result = content.copy()  # keeps the versions that torch attaches to the state of a module
        if not _is_flat(content.values()):
            for key, value in content.items():
                result[key] = copied(value)
        return result
    if type(content) in (list, tuple):
        return type(content)(content if _is_flat(content) else map(copied, content))
    return content


def has_state(value: object) -> bool:
    """Return whether an object has a state to save and load."""
    return not isinstance(value, type) and hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def tensors_of(module: nn.Module) -> list[torch.Tensor]:
    """Return the parameters and buffers of a module."""
    return [*module.parameters(), *module.buffers()]


def _undo(value: Any, *, copies: bool) -> Callable[[], Any]:
    """Return a function that restores the content of a value, and returns the value."""
    kind = type(value)
    if kind in PLAIN:
        return lambda: value
    if isinstance(value, torch.Tensor):
        return _undo_tensor(value) if copies else lambda: value
    if isinstance(value, dict) or kind in (list, deque, tuple):
        return _undo_container(value, copies=copies)
    return _undo_object(value) if copies else lambda: value


def _undos(values: Collection[Any], *, copies: bool) -> list[Callable[[], Any]]:
    """Return functions that restore the values that can change."""
    kinds = set(map(type, values)) - PLAIN
    if not kinds or (not copies and all(issubclass(kind, torch.Tensor) for kind in kinds)):
        return []
    return [_undo(each, copies=copies) for each in values]


def _undo_tensor(tensor: torch.Tensor) -> Callable[[], Any]:
    before = tensor.detach().clone()

    def put_back() -> Any:
        if not tensor.is_inference():
            with torch.no_grad():
                tensor.copy_(before)
        return tensor

    return put_back


def _undo_container(value: Any, *, copies: bool) -> Callable[[], Any]:
    before = dict(value) if isinstance(value, dict) else tuple(value)
    undos = _undos(before.values() if isinstance(before, dict) else before, copies=copies)

    def put_back() -> Any:
        for undo in undos:
            undo()
        if type(value) is not tuple:
            value.clear()
            (value.update if isinstance(value, dict) else value.extend)(before)
        return value

    return put_back


def _undo_object(value: Any) -> Callable[[], Any]:
    before = copied(value.state_dict())

    def put_back() -> Any:
        value.load_state_dict(copied(before))
        return value

    return put_back


def _is_flat(values: Any) -> bool:
    """Return whether all values are plain."""
    return set(map(type, values)) <= PLAIN


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple, deque)):
        values = value.values() if isinstance(value, dict) else value
        if not _is_flat(values):
            for each in values:
                yield from _tensors_in(each)


def _version(tensors: tuple[torch.Tensor, ...]) -> int:
    return sum(0 if tensor.is_inference() else tensor._version for tensor in tensors)  # noqa: SLF001 - torch has no public counter of changes in place
