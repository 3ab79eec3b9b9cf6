"""Continuing from copies in the members' memory: which one, who has the parts, and how they get to their new owners."""

from __future__ import annotations

import logging
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from freetrain_parsl.extensions.sharding import state as sharded
from freetrain_parsl.extensions.sharding.moving import move
from freetrain_parsl.extensions.sharding.parts import Label, StateParts, unpack
from freetrain_parsl.storage.entry import Entry
from freetrain_parsl.training.checkpoints.format import Restored
from freetrain_parsl.training.group.state_transfer import pass_on

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from freetrain_parsl.protocol.options import SessionOptions
    from freetrain_parsl.training.group.process_group import Group
    from freetrain_parsl.training.node_memory import NodeMemory, Shelf

__all__ = ["Choice", "choose", "recall"]

logger = logging.getLogger(__name__)

_MOST_TRIES = 2  # for one copy: it may be the cause that the training job fails again
_NUMBERS = len(Label(0, 0, 0, 0, 0, is_own=True).numbers())
_ABSENT = [-1] * _NUMBERS


@dataclass(frozen=True)
class Choice:
    """A copy that is complete in a group.

    Parameters
    ----------
    label
        Its label, of owner 0.
    root
        Rank of a member that has its own part of it, and the rest of the state.
    keepers
        Owner -> rank of the member that has its part.
    """

    label: Label
    root: int
    keepers: tuple[int, ...]


def choose(labels: Sequence[Sequence[Label]], known: int) -> Choice | None:
    """Return the newest copy of which the members together have all parts; ``None``: there is none.

    Parameters
    ----------
    labels
        Of the copies that each member has, by rank.
    known
        Step of the newest checkpoint; a copy of an earlier step is not chosen.
    """
    found: dict[Label, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    roots: dict[Label, int] = {}
    for rank, some in enumerate(labels):
        for label in some:
            copy = replace(label, owner=0, is_own=True)
            found[copy][label.owner].append(rank)
            if label.is_own:
                roots.setdefault(copy, rank)
    complete = [copy for copy, keepers in found.items() if len(keepers) == copy.size and copy in roots]
    newest = max(
        (copy for copy in complete if copy.step >= known), key=lambda copy: (copy.step, copy.generation), default=None
    )
    if newest is None:
        return None
    return Choice(newest, roots[newest], tuple(found[newest][owner][0] for owner in range(newest.size)))


def recall(memory: NodeMemory, options: SessionOptions, group: Group, known: int) -> Restored | None:
    """Return the state of the newest complete copy; see `SessionExtension.recall`."""
    shelves = _usable(memory, Label.of_job(options))
    numbers = [label.numbers() for label, _ in shelves]
    table = [known, *(number for row in [*numbers, *[_ABSENT] * len(memory.shelves)] for number in row)]
    rows = [row.tolist() for row in group.gather(torch.tensor(table[: 1 + _NUMBERS * len(memory.shelves)]))]
    known = rows[0][0]
    choice = choose([_labels(row[1:]) for row in rows], known)
    if choice is None:
        return None
    mine = {}
    for label, shelf in shelves:
        if replace(label, owner=0, is_own=True) == choice.label:
            shelf.tried()
            mine[label.owner] = shelf
        else:  # the next copy takes its place, and not that of the one that is used
            shelf.empty()
    state = _collect(group, choice, mine)
    if group.is_first:
        logger.warning(
            "training job %s: continues from step %d, from copies in the memory of its nodes; the newest checkpoint %s",
            options.name, choice.label.step, f"is of step {known}" if known >= 0 else "does not exist",
        )  # fmt: skip
    return Restored(state, Entry(choice.label.step, 0, Path(f"copies of step {choice.label.step} in memory")))


def _usable(memory: NodeMemory, job: int) -> list[tuple[Label, Shelf]]:
    """Return the copies of this training job; those of others are removed."""
    found = []
    for shelf in memory.shelves:
        label = Label.on(shelf)
        if label is not None and label.job == job:
            if shelf.tries < _MOST_TRIES:
                found.append((label, shelf))
        else:
            shelf.empty()
    memory.free()
    return found


def _labels(numbers: list[int]) -> list[Label]:
    rows = [numbers[begin : begin + _NUMBERS] for begin in range(0, len(numbers), _NUMBERS)]
    return [Label.from_numbers(row) for row in rows if row != _ABSENT]


def _collect(group: Group, choice: Choice, shelves: Mapping[int, Shelf]) -> dict[str, Any]:
    """Return the state with this member's part of each sharded tensor, and its own values of the loop.

    Parameters
    ----------
    group, choice
        The new members, and the copy.
    shelves
        Old owner -> this member's shelf with its part.
    """
    heads, contents = {}, {}
    for owner, shelf in shelves.items():
        read = shelf.read()
        assert read is not None, "it has a label"
        heads[owner], contents[owner] = unpack(read[0]), read[1]
    body: Any = None
    if group.rank == choice.root:
        body = next(head for head in heads.values() if "plain" in head)
    others = [rank for rank in range(group.size) if rank != choice.root]
    body = pass_on(group, [choice.root], others, body) or body
    parts, state = StateParts.from_plain(body["parts"]), body["plain"]
    if body["own"]:
        own: list[Any] = [{} for _ in range(min(group.size, choice.label.size))]
        for rank, keeper in enumerate(choice.keepers[: len(own)]):
            part = heads[rank]["own"] if group.rank == keeper else None
            if keeper != rank:
                part = pass_on(group, [keeper], [rank], part)
            if group.rank == rank:
                own[rank] = part
        state["loop"]["own"] = own
    whole: dict[str, Any] = sharded.put_back(state, _moved(group, choice, parts, contents))
    return whole


def _moved(
    group: Group, choice: Choice, parts: StateParts, contents: Mapping[int, torch.Tensor]
) -> dict[str, tuple[torch.Tensor, int]]:
    """Move the parts to their new owners; return name -> this member's part, and the dimension that is sharded."""
    kept = _Kept(parts, choice.label.size, group.size, contents)
    move(parts.tensors, choice.keepers, range(group.size), kept, group)
    return {
        name: (kept.new[number], tensor.dim)
        for number, (tensor, names) in enumerate(zip(parts.tensors, parts.names, strict=True))
        for name in names
    }


class _Kept:
    """The parts that this member keeps, and its new ones: see `moving.Shards`.

    Parameters
    ----------
    parts
        What they are parts of.
    before, now
        Number of owners.
    contents
        Old owner -> memory with its parts.
    """

    def __init__(self, parts: StateParts, before: int, now: int, contents: Mapping[int, torch.Tensor]) -> None:
        self._parts, self._now = parts, now
        self._old = {owner: list(parts.views(content, owner, before)) for owner, content in contents.items()}
        self.new: dict[int, torch.Tensor] = {}
        """Number of a tensor -> this member's new part."""

    def read(self, tensor: int, owner: int) -> torch.Tensor:
        """Return an old part."""
        return self._old[owner][tensor]

    def allocate(self, tensor: int, owner: int) -> torch.Tensor:
        """Return memory for this member's new part."""
        layout = self._parts.tensors[tensor]
        self.new[tensor] = torch.empty(layout.local_shape(owner, self._now), dtype=layout.dtype)
        return self.new[tensor]
