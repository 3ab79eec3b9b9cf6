"""Calls of models: what must be equal to make them at once, and those that never meet because they differ."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.utils import _pytree as pytree

from freetrain_parsl.errors import CannotFuse
from freetrain_parsl.extensions.fusion.engine.ambient import autocast_state
from freetrain_parsl.extensions.fusion.forward.sparse import is_sparse, same_sparse
from freetrain_parsl.protocol.options import digest_of

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from torch import nn

    from freetrain_parsl.extensions.fusion.engine.array import MemberObjects

__all__ = [
    "ArgumentsDiffer",
    "CallsApart",
    "ModelCall",
    "arguments_of",
    "call_of",
    "check_stackable",
    "difference",
    "is_same",
]

_ROUNDS = 8  # in a row in which all members called a model and some calls differed: the last batch of an epoch may


_PARTS = ("the kinds", "the models", "the modes (training or evaluation)", "the autocast modes", "the arguments")
"""Of a call's kind, but for the kinds of its arguments."""


class ModelCall(NamedTuple):
    """A call of a participant's model.

    Parameters
    ----------
    participant, number
        Whose, and of which of its models.
    leaves, spec
        Of the arguments, as of a pytree: of the positional ones only, unless `has_kwargs`.
    has_kwargs
        Whether there are named ones.
    kind
        Equal for calls that can be made at once.
    """

    participant: MemberObjects
    number: int
    leaves: list[Any]
    spec: Any
    has_kwargs: bool
    kind: tuple[Any, ...]


def call_of(
    participant: MemberObjects, number: int, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> ModelCall:
    """Return a call of a model."""
    leaves, spec = _flat((args, kwargs)) if kwargs else _flat(args)
    kind = ("forward", number, model.training, autocast_state(), spec, tuple(map(_kind_of, leaves)))
    return ModelCall(participant, number, leaves, spec, bool(kwargs), kind)


def arguments_of(call: ModelCall) -> tuple[Any, Any]:
    """Return the positional and the named arguments of a call."""
    arguments = _whole(call.leaves, call.spec)
    return arguments if call.has_kwargs else (arguments, {})


class ArgumentsDiffer(CannotFuse):
    """Arguments that cannot be stacked differ between these members: those of others may be the same."""


def check_stackable(values: Sequence[torch.Tensor]) -> None:
    """Check that an argument that differs between the members can be stacked.

    Raises
    ------
    ArgumentsDiffer
        It is sparse.
    """
    if any(map(is_sparse, values)):
        raise ArgumentsDiffer(
            f"an argument of the model is {_described(values[0])} whose entries differ between the training jobs: give "
            "all the same one, or a dense one"
        )


def is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors are the same numbers in memory, as of a batch that training jobs share.

    Sparse ones are if their entries are equal.
    """
    if one is other:
        return True
    if is_sparse(one) or is_sparse(other):
        return same_sparse(one, other)
    return (
        one.data_ptr() == other.data_ptr()
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.dtype == other.dtype
        and not (one.requires_grad or other.requires_grad)
    )


def _flat(tree: tuple[Any, ...]) -> tuple[list[Any], Any]:
    """Return leaves and structure of nested containers; at once for a tuple of tensors."""
    if all(isinstance(item, torch.Tensor) for item in tree):
        return list(tree), None
    return pytree.tree_flatten(tree)


def _whole(leaves: list[Any], spec: Any) -> Any:
    """Return the nested containers of `_flat`."""
    return tuple(leaves) if spec is None else pytree.tree_unflatten(leaves, spec)


def _kind_of(leaf: Any) -> object:
    if isinstance(leaf, torch.Tensor):
        return leaf.shape, leaf.dtype, leaf.device, leaf.requires_grad, leaf.layout
    if isinstance(leaf, np.ndarray):
        return "array", leaf.shape, leaf.dtype.str, leaf.tobytes()
    return leaf if leaf.__hash__ else ("object", id(leaf))  # the models would all get that of the first member


class CallsApart:
    """Counts rounds in which the members' calls could not be made at once, since the last one in which they were."""

    def __init__(self) -> None:
        self.kinds: dict[MemberObjects, str] = {}
        """Member -> digest of what its calls are like; found when they have been apart for long."""
        self._rounds = 0
        self._seen: defaultdict[MemberObjects, Counter[Hashable]] = defaultdict(Counter)
        self._met = self._apart = 0

    @property
    def share(self) -> float:
        """Fraction of all rounds in which the calls differed."""
        return self._apart / max(1, self._met + self._apart)

    def met(self) -> None:
        """Note that the calls of all were alike."""
        self._met += 1
        if self._rounds:
            self._rounds = 0
            self._seen.clear()

    def note(self, calls: Sequence[tuple[MemberObjects, Hashable]]) -> bool:
        """Note the calls of all members in a round; return whether they have been apart for long.

        Parameters
        ----------
        calls
            For each member: what must be equal for its call to be made together with others.
        """
        self._rounds += 1
        self._apart += 1
        for member, kind in calls:
            self._seen[member][kind] += 1
        if self._rounds < _ROUNDS:
            return False
        self.kinds = {member: digest_of([repr(kinds.most_common(1)[0][0])])[:8] for member, kinds in self._seen.items()}
        self._rounds = 0
        self._seen.clear()
        return True

    def forget(self, member: MemberObjects) -> None:
        """Forget a member that has left."""
        self.kinds.pop(member, None)
        self._seen.pop(member, None)


def difference(one: ModelCall, other: ModelCall) -> str:
    """Say how two calls differ."""
    for name, mine, others in zip(_PARTS, one.kind, other.kind, strict=False):
        if mine != others:
            return f"{name} of their models' calls differ"
    found = [pytree.tree_flatten_with_path(arguments_of(call))[0] for call in (one, other)]
    for (path, mine), (_, others) in zip(*found, strict=True):
        if _described(mine) != _described(others):
            return f"{_name(path)} is {_described(mine)} in one and {_described(others)} in another"
    return "the arguments of their models' calls differ"


def _name(path: Sequence[Any]) -> str:
    named, first, *rest = path
    is_named = getattr(named, "idx", 0) == 1
    name = str(first.key) if is_named else f"argument {first.idx}"
    return name + pytree.keystr(tuple(rest))


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        gradient = " with a gradient" if value.requires_grad else ""
        sparse = "sparse " if is_sparse(value) else ""
        return f"a {sparse}tensor{gradient} of {tuple(value.shape)}, {str(value.dtype).removeprefix('torch.')},"
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:39]}…"
