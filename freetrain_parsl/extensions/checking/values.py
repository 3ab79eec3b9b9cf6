"""Digests of values: of the states that the session keeps, and of what the user's frames hold."""

from __future__ import annotations

import hashlib
import math
import operator
import random
import types
import weakref
from collections import deque
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from freetrain_parsl.extensions.checking.records import Leaf
from freetrain_parsl.extensions.checking.sources import is_users_file, is_users_type
from freetrain_parsl.training.checkpoints.format import is_spread

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

__all__ = ["Flattener", "digest", "flat", "globals_of", "hide", "is_ours", "leaf_of_plain", "leaf_of_tensor", "whole"]

_ITEMS = 40  # of a list or dictionary that the user's code holds
_DEPTH = 5
_PROJECTIONS = 8
_ROW = 1024
_HASHED = 1 << 20  # bytes; the words of larger tensors are summed instead, at a twentieth of the cost
_LARGE = 1 << 16  # elements; the digests of larger tensors are kept until these change
_LONGEST = 40
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


@lru_cache
def _signs(count: int, key: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * count + key)
    return torch.randint(0, 2, (count, _PROJECTIONS), generator=generator).double() * 2 - 1


def _sketch(flat: torch.Tensor) -> tuple[float, ...]:
    """Project on random signs, each the product of one for the row and one for the column: one matrix product."""
    if flat.numel() <= _PROJECTIONS:
        return tuple((flat * math.sqrt(flat.numel())).tolist())
    rows = -(-flat.numel() // _ROW)
    table = nn.functional.pad(flat, (0, rows * _ROW - flat.numel())).view(rows, _ROW)
    return tuple(((table @ _signs(_ROW, 0)) * _signs(rows, 1)).sum(0).tolist())


def _hash(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=8).digest()


@lru_cache(maxsize=4)
def _odd(count: int) -> torch.Tensor:
    """Return factors that tell the places of words: odd, so that none loses bits."""
    return torch.arange(1, 2 * count, 2)


def digest(tensor: torch.Tensor) -> bytes:
    """Return a digest of the bits, the shape and the type of a contiguous CPU tensor."""
    data = tensor.reshape(-1).view(torch.uint8)
    mark = str((tuple(tensor.shape), tensor.dtype)).encode()
    if data.numel() <= _HASHED:
        return _hash(data.numpy().tobytes() + mark)
    words, rest = torch.split(data, [len(data) // 8 * 8, len(data) % 8])
    whole = (words.clone() if words.storage_offset() % 8 else words).view(torch.int64)  # such a view must be aligned
    sums = int(whole.sum()), int((whole * _odd(len(whole))).sum()), int(rest.sum())
    return _hash(str(sums).encode() + mark)


@torch.no_grad()
def leaf_of_tensor(tensor: torch.Tensor, of: str = "", *, sketched: bool = False) -> Leaf:
    """Return the digest of a tensor.

    If it is `sketched`, it can be compared with a tolerance.

    Raises
    ------
    RuntimeError, NotImplementedError, TypeError
        Its elements cannot be read.
    """
    tensor = tensor.detach().cpu()
    tensor = (tensor.to_dense() if tensor.layout != torch.strided else tensor).resolve_conj().contiguous()
    text = f"{tensor.item():.6g}" if tensor.numel() == 1 else f"a tensor of shape {tuple(tensor.shape)}"
    if not sketched:
        return Leaf(digest(tensor), text, of=of)
    elements = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1).double()
    return Leaf(digest(tensor), text, float(elements.norm()), _sketch(elements), of)


_hidden: list[str] = []


def hide(place: str) -> None:
    """Leave the name of a directory, which differs between groups of processes, out of all texts of this process."""
    _hidden.append(place)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the parts of all processes, if it is sharded over them: all call this together."""
    return tensor.full_tensor() if is_spread(tensor) else tensor  # type: ignore[attr-defined]  # it is a DTensor


def leaf_of_plain(value: object, of: str = "") -> Leaf:
    """Return the digest of a number or string."""
    shown = repr(value)
    for place in _hidden:
        shown = shown.replace(place, "…")
    bits = _hash(f"{type(value).__name__} {shown}".encode(errors="surrogatepass"))
    text = f"{value:.6g}" if isinstance(value, float) else shown
    text = text if len(text) < _LONGEST else f"{text[: _LONGEST - 3]}..."
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return Leaf(bits, text, of=of)
    try:
        return Leaf(bits, text, abs(float(value)), (float(value),), of)
    except OverflowError:
        return Leaf(bits, text, of=of)


class _KeptDigests:
    """The digests of large tensors, until these are changed in place."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[weakref.ref[torch.Tensor], int, Leaf]] = {}

    def of(self, tensor: torch.Tensor, of: str) -> Leaf:
        if tensor.numel() < _LARGE or tensor.is_inference():
            return leaf_of_tensor(tensor, of)
        known = self._kept.get(id(tensor))
        version = tensor._version  # noqa: SLF001 - torch's documented counter of changes in place
        if known is not None and known[0]() is tensor and known[1] == version:
            return known[2]
        leaf = leaf_of_tensor(tensor, of)
        self._kept[id(tensor)] = weakref.ref(tensor), version, leaf
        return leaf


_kept = _KeptDigests()


class Flattener:
    """Collects the digests of what a value contains, by path: ``meter.sum``, ``avg[0.weight]``, ``helper:count``.

    Parameters
    ----------
    known
        Ids of objects whose state the session keeps: of modules only attributes outside their ``state_dict`` count, of
        others nothing.
    """

    def __init__(self, known: Collection[int] = frozenset()) -> None:
        self.leaves: dict[str, Leaf] = {}
        self._known = known
        self._seen: set[int] = set()
        # Types -> how their values are added; the first that fits.
        self._adders: tuple[tuple[Any, Callable[[str, Any, int, str], None]], ...] = (
            (torch.Tensor, self._add_tensor),
            (np.ndarray, self._add_array),
            (np.generic, self._add_number),
            (nn.Module, self._add_module),
            ((torch.Generator, np.random.Generator, random.Random), self._add_generator),
            (dict, self._add_dict),
            ((list, tuple, deque), self._add_sequence),
            ((set, frozenset), self._add_set),
            ((Dataset, DataLoader), self._add_data),
            (types.FunctionType, self._add_function),
            (types.MethodType, self._add_method),
            (type, self._add_class),
            (types.ModuleType, self._add_python_module),
            (types.GeneratorType, self._add_running_generator),
        )

    def add(self, path: str, value: object, depth: int = _DEPTH, of: str = "") -> None:
        """Add a value and what it contains, `depth` levels deep; `of` is the type of the object that contains it."""
        if isinstance(value, _PLAIN):
            self.leaves[path] = leaf_of_plain(value, of)
            return
        if depth == 0 or id(value) in self._seen or is_ours(value):
            return
        if id(value) in self._known and not isinstance(value, nn.Module):
            return
        self._seen.add(id(value))
        for kinds, add in self._adders:
            if isinstance(value, kinds):
                add(path, value, depth, of)
                return
        self._add_object(path, value, depth)

    def _add_tensor(self, path: str, value: torch.Tensor, _depth: int, of: str) -> None:
        if is_spread(value):  # the part of this process; to read the whole, all would have to take part
            return
        try:
            self.leaves[path] = _kept.of(value, of or type(value).__name__)
        except (RuntimeError, TypeError, NotImplementedError):  # without elements that can be read: meta, nested, …
            return

    def _add_array(self, path: str, value: np.ndarray[Any, Any], _depth: int, of: str) -> None:
        if value.dtype.kind in "biufc":
            self.leaves[path] = leaf_of_tensor(torch.from_numpy(np.ascontiguousarray(value)), of or "array")

    def _add_number(self, path: str, value: np.generic, _depth: int, of: str) -> None:
        self.leaves[path] = leaf_of_plain(value.item(), of)

    def _add_generator(
        self, path: str, value: torch.Generator | np.random.Generator | random.Random, _depth: int, _of: str
    ) -> None:
        if isinstance(value, torch.Generator):
            self.leaves[path] = leaf_of_tensor(value.get_state(), "generator")
        elif isinstance(value, random.Random):
            self.leaves[path] = leaf_of_plain(hash(value.getstate()), "generator")
        else:
            self.leaves[path] = leaf_of_plain(str(value.bit_generator.state), "generator")

    def _add_dict(self, path: str, value: dict[Any, Any], depth: int, of: str) -> None:
        for key in list(value)[:_ITEMS]:
            if isinstance(key, (str, int, float, bool, tuple)):
                self.add(f"{path}[{key!r}]", value[key], depth - 1, of or "dict")
        self.leaves[f"len({path})"] = leaf_of_plain(len(value), of or "dict")

    def _add_sequence(self, path: str, value: list[Any] | tuple[Any, ...] | deque[Any], depth: int, of: str) -> None:
        of = of or type(value).__name__
        for index, each in enumerate(list(value)[:_ITEMS]):
            self.add(f"{path}[{index}]", each, depth - 1, of)
        self.leaves[f"len({path})"] = leaf_of_plain(len(value), of)

    def _add_set(self, path: str, value: set[Any] | frozenset[Any], _depth: int, _of: str) -> None:
        self.leaves[path] = leaf_of_plain(sorted(map(repr, value)), "set")

    def _add_data(self, path: str, value: object, _depth: int, _of: str) -> None:
        self._add_attributes(path, value, _PLAIN, 1)

    def _add_method(self, path: str, value: types.MethodType, depth: int, of: str) -> None:
        self.add(path, value.__self__, depth - 1, of)

    def _add_class(self, path: str, value: type, _depth: int, _of: str) -> None:
        if is_users_type(value):
            self._add_attributes(path, value, (*_PLAIN, list, dict), 2)

    def _add_python_module(self, path: str, value: types.ModuleType, _depth: int, _of: str) -> None:
        if is_users_file(getattr(value, "__file__", None) or "<frozen"):
            self._add_attributes(path, value, _PLAIN, 1)

    def _add_running_generator(
        self, path: str, value: types.GeneratorType[Any, Any, Any], depth: int, _of: str
    ) -> None:
        if value.gi_frame is not None and is_users_file(value.gi_code.co_filename):
            for name, each in value.gi_frame.f_locals.items():
                self.add(f"{path}:{name}", each, depth - 1, "iterator")

    def _add_module(self, path: str, module: nn.Module, depth: int, _of: str) -> None:
        of = type(module).__name__
        if id(module) not in self._known:
            for name, each in module.state_dict().items():
                self.add(f"{path}[{name}]", each, depth - 1, of)
        for name, part in module.named_modules():
            where = f"{path}.{name}" if name else path
            for key, each in vars(part).items():
                if not key.startswith("_") and key != "training" and not isinstance(each, (nn.Module, type)):
                    self.add(f"{where}.{key}", each, 2, of)

    def _add_function(self, path: str, function: types.FunctionType, depth: int, _of: str) -> None:
        if not is_users_file(function.__code__.co_filename):
            return
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if cell != types.CellType():  # otherwise its variable has no value yet
                self.add(f"{path}:{name}", cell.cell_contents, depth - 1)
        for name, each in vars(function).items():
            if name != "__wrapped__":
                self.add(f"{path}.{name}", each, 2)
        for index, each in enumerate(function.__defaults__ or ()):
            if isinstance(each, (list, dict)):
                self.add(f"{path} default {index}", each, 2)

    def _add_object(self, path: str, value: object, depth: int) -> None:
        kind = type(value)
        if kind.__module__ == "itertools" and kind.__name__ == "count":
            self.leaves[path] = leaf_of_plain(repr(value), "iterator")
        elif kind.__module__ == "builtins" and kind.__name__.endswith("_iterator"):
            left = operator.length_hint(value, -1)
            self.leaves[path] = leaf_of_plain(f"{left} items left" if left >= 0 else "an iterator", "iterator")
        elif is_users_type(kind):
            for name, each in _attributes(value):
                self.add(f"{path}.{name}", each, depth - 1, kind.__name__)
        elif callable(getattr(value, "state_dict", None)):  # optimizers, schedulers, and those of libraries
            try:
                state = value.state_dict()  # type: ignore[attr-defined]  # it has one
            except Exception:  # noqa: BLE001 - of a library, which may raise anything before it is in use
                return
            self.add(path, state, depth, kind.__name__)
        elif kind.__module__.partition(".")[0] not in ("builtins", "torch", "numpy"):
            self._add_attributes(path, value, (bool, int, float), 1)

    def _add_attributes(self, path: str, value: object, kinds: tuple[type, ...], depth: int) -> None:
        of = type(value).__name__
        for name, each in _attributes(value):
            if isinstance(each, kinds) and not name.startswith("_"):
                self.add(f"{path}.{name}", each, depth, of)


def _attributes(value: object) -> Iterable[tuple[str, Any]]:
    found = dict(getattr(value, "__dict__", {}))
    for kind in () if isinstance(value, type) else type(value).__mro__:
        for name in _slots_of(kind):
            if name not in found and hasattr(value, name):
                found[name] = getattr(value, name)
    return found.items()


def _slots_of(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(name for name in names if not name.startswith("__"))


def is_ours(value: object) -> bool:
    """Return whether a value is of FreeTrain, such as the session: its state is the session's business."""
    module = type(value).__module__ or ""
    return module.partition(".")[0] == "freetrain_parsl" and not is_users_type(type(value))


def flat(value: object, path: str) -> dict[str, Leaf]:
    """Return the digests of what a value contains."""
    flattener = Flattener()
    flattener.add(path, value)
    return flattener.leaves


def globals_of(code: types.CodeType, scope: Mapping[str, Any], visited: set[object]) -> dict[str, Any]:
    """Return the globals that a function, and the functions of the user that it calls, refer to.

    `visited` is the code that has been looked at already; more is added.
    """
    found: dict[str, Any] = {}
    waiting = [(code, scope)]
    while waiting:
        code, scope = waiting.pop()
        if code in visited:
            continue
        visited.add(code)
        waiting.extend((each, scope) for each in code.co_consts if isinstance(each, types.CodeType))
        for name in code.co_names:
            if name not in scope:
                continue
            value = scope[name]
            found.setdefault(name, value)
            value = getattr(value, "__wrapped__", value)
            if isinstance(value, types.FunctionType) and is_users_file(value.__code__.co_filename):
                waiting.append((value.__code__, value.__globals__))
    return found
