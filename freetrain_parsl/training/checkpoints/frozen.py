"""Tensors of a state that do not change, as those of a frozen base that several training jobs have: saved once.

What is a copy-on-write clone is meant to be one memory for several; see `copy_on_write`. Such tensors are not copied,
and are in a file of their own that all checkpoints with the same ones have in common.
"""

from __future__ import annotations

import copy
import hashlib
import threading
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakValueDictionary

import torch

from freetrain_parsl.training.checkpoints.copy_on_write import address_of, can_clone, clone_of, is_clone, plain

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["Content", "FrozenPart", "as_saved", "digest_of_all", "fill", "take_out"]

Place = tuple[Any, ...]  # keys of dictionaries and positions in lists, from the outside


class Content:
    """The content of a frozen tensor.

    Parameters
    ----------
    tensor
        A copy-on-write clone, which keeps the numbers whatever others write.
    digest
        SHA-256 of type, shape and numbers.
    """

    def __init__(self, tensor: torch.Tensor, digest: str) -> None:
        self.tensor = tensor
        self.digest = digest


class FrozenPart(NamedTuple):
    """What was taken out of a state.

    Parameters
    ----------
    state
        The rest, with ``None`` in the places of these tensors, and in ``frozen`` a list of the places and digests.
    contents
        Digest -> content.
    """

    state: dict[str, Any]
    contents: dict[str, Content]


_lock = threading.Lock()
# Those that a job of this process has saved or loaded last: where they are in memory, or digest -> content.
_by_place: WeakValueDictionary[tuple[Any, ...], Content] = WeakValueDictionary()
_by_digest: WeakValueDictionary[str, Content] = WeakValueDictionary()


def take_out(state: Mapping[str, Any]) -> FrozenPart:
    """Take the copy-on-write clones out of a state."""
    found: list[tuple[Place, Content]] = []
    rest = _without(state, (), found)
    if found:
        rest["frozen"] = [[list(place), content.digest] for place, content in found]
    return FrozenPart(rest, {content.digest: content for _, content in found})


def digest_of_all(contents: Mapping[str, Content]) -> str:
    """Return what identifies a file with these contents."""
    return hashlib.sha256("".join(sorted(contents)).encode()).hexdigest()


def as_saved(contents: Mapping[str, Content]) -> dict[str, torch.Tensor]:
    """Return contents by digest, as plain tensors on the CPU that can be read while `contents` exists."""
    return {digest: plain(contents[digest].tensor) for digest in sorted(contents)}


def fill(state: dict[str, Any], load: Callable[[], Mapping[str, torch.Tensor]]) -> Sequence[Content]:
    """Put tensors that were taken out of a state into their places, as clones of those in memory if there are such.

    Parameters
    ----------
    state
        As it was saved; changed in place.
    load
        Reads the file of contents; called only if some are not in memory.

    Returns
    -------
    sequence of Content
        While they exist, the contents are not read again in this process.

    Raises
    ------
    KeyError, TypeError, ValueError
        The state, or the file, is damaged.
    """
    places = state.pop("frozen", [])
    with _lock:
        known = {digest: _by_digest.get(digest) for _, digest in places}
        if None in known.values():
            for digest, tensor in load().items():
                if known.get(digest, tensor) is None:
                    known[digest] = _by_digest[digest] = Content(clone_of(tensor) if can_clone() else tensor, digest)
        contents = {digest: content for digest, content in known.items() if content is not None}
        for place, digest in places:
            content = contents[digest]
            inner: Any = state
            for key in place[:-1]:
                inner = inner[key]
            inner[place[-1]] = clone_of(content.tensor) if can_clone() else content.tensor
    return tuple(contents.values())


def _without(value: Any, place: Place, found: list[tuple[Place, Content]]) -> Any:
    """Return a copy of a state without its clones, and add these to `found`."""
    if isinstance(value, torch.Tensor):
        if not is_clone(value):
            return value
        found.append((place, _content_of(value)))
        return None
    if isinstance(value, dict):
        result = copy.copy(value)  # keeps the module versions that torch attaches to a model's state
        for key, item in value.items():
            result[key] = _without(item, (*place, key), found)
        return result
    if type(value) is list:
        return [_without(item, (*place, position), found) for position, item in enumerate(value)]
    return value  # in tuples, nothing can be put into its place again


def _content_of(tensor: torch.Tensor) -> Content:
    tensor = tensor.detach()
    where = (tensor.device, address_of(tensor), tensor.dtype, tensor.shape, tensor.stride())
    with _lock:  # others wait for the digest, instead of computing it, too
        content = _by_place.get(where)
        if content is None:
            clone = clone_of(tensor)
            digest = hashlib.sha256(repr((clone.dtype, tuple(clone.shape))).encode())
            digest.update(plain(clone).reshape(-1).view(torch.uint8).numpy().data)
            content = Content(clone, digest.hexdigest())
            _by_place[where] = _by_digest[content.digest] = content
    return content
