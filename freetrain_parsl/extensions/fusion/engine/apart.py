"""Calls of models that never meet, because their arguments differ: which members are of one kind, and what differs."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from freetrain_parsl.protocol.options import digest_of

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Sequence

    from freetrain_parsl.extensions.fusion.engine.array import MemberObjects

__all__ = ["CallsApart"]

_ROUNDS = 8  # in a row in which all members called a model and some calls differed: the last batch of an epoch may


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


def difference(names: Sequence[str], kinds: Sequence[Collection[Any]], arguments: Sequence[tuple[Any, Any]]) -> str:
    """Say how two calls differ.

    Parameters
    ----------
    names
        What the items of `kinds` are, but for the last one, which has an item for each argument.
    kinds
        Of each call: what must be equal.
    arguments
        Of each call: positional and named ones.
    """
    for name, one, other in zip(names, *kinds, strict=False):
        if one != other:
            return f"{name} of their models' calls differ"
    found = [pytree.tree_flatten_with_path(each)[0] for each in arguments]
    for (path, one), (_, other) in zip(*found, strict=True):
        if _described(one) != _described(other):
            return f"{_name(path)} is {_described(one)} in one and {_described(other)} in another"
    return "the arguments of their models' calls differ"


def _name(path: Sequence[Any]) -> str:
    named, first, *rest = path
    is_named = getattr(named, "idx", 0) == 1
    name = str(first.key) if is_named else f"argument {first.idx}"
    return name + pytree.keystr(tuple(rest))


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        gradient = " with a gradient" if value.requires_grad else ""
        return f"a tensor{gradient} of {tuple(value.shape)}, {str(value.dtype).removeprefix('torch.')},"
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:39]}…"
