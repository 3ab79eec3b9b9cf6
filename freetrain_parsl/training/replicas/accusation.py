"""Finding out which members differ in what, and saying so."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import torch

from freetrain_parsl.errors import PeerFailed, ReplicasDiffer
from freetrain_parsl.training.replicas.contents import Fact

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from freetrain_parsl.training.data.cursor import Place
    from freetrain_parsl.training.group.process_group import Group

__all__ = ["Disagreement", "Since", "accuse", "differences", "sentence"]

_NAMED = 3  # differences of a kind that are named in a message

_LOCAL = "session.rank, the loss of its own share of the batch, the clock"
_CAUSES = {
    "position": (
        "a loop was left or a batch was skipped on some processes only: decide by a value that all have, such as "
        "session.broadcast(value)"
    ),
    "structure": f"the model or the optimizer was changed on some processes only, by what differs there ({_LOCAL})",
    "hyperparameter": (
        f"it was set from something that differs between processes ({_LOCAL}): compute it from session.metrics or "
        "session.broadcast(value)"
    ),
    "trainable": f"parameters were frozen by something that differs between processes ({_LOCAL})",
    "loop": (
        f"it was computed from something that differs between processes ({_LOCAL}): use session.broadcast(value), or "
        "session.state(per_process=True)"
    ),
    "buffer": (
        "it was computed from a process's own share of the batch: add up the shares first, "
        "session.all_reduce(x.sum(0)), or "
        "register it with persistent=False if it is no part of the state"
    ),
    "parameter": (
        "random numbers or a process's own values were added to parameters or to .grad after session.backward: use the "
        "same on all processes, from a generator seeded with session.metrics['steps'], or session.all_reduce(tensor)"
    ),
    "optimizer": "the optimizer was used on some processes only, or its step draws random numbers",
}
"""Kind of a difference -> what usually causes it, and the remedy; the first kind that differs is explained."""


class Since(NamedTuple):
    """When replicas were compared.

    Parameters
    ----------
    plain, tensors
        The last step after which their plain values, and their tensors, were known to be equal; ``None``: never.
    now
        The current step.
    """

    plain: int | None
    tensors: int | None
    now: int


class Disagreement(NamedTuple):
    """A thing that is not equal on all members.

    Parameters
    ----------
    kind, name
        See `Fact`.
    values
        Rank -> value for a message, of the members that are compared; empty: it is too long.
    groups
        The ranks, grouped by equal values.
    """

    kind: str
    name: str
    values: Mapping[int, str]
    groups: Sequence[Sequence[int]]

    def __str__(self) -> str:
        shown = {self.values[ranks[0]] for ranks in self.groups}
        if "" in shown or len(shown) < len(self.groups):  # numbers that look the same, but have other bits
            return f"{self.name} is not the same on {' and '.join(map(_ranks, self.groups))}"
        values = (f"{self.values[ranks[0]]} on {_ranks(ranks)}" for ranks in self.groups)
        return f"{self.name} is {', '.join(values)}"


def accuse(job: str, group: Group, among: Sequence[int], facts: Iterable[Fact], place: Place, since: Since) -> NoReturn:
    """Exchange what the members have, and raise an error that names what differs; all members call this.

    Parameters
    ----------
    job
        Name of the training job.
    group
        The members.
    among
        Ranks of those that are compared.
    facts
        This member's.
    place
        This member's position in the data.
    since
        When they were compared.

    Raises
    ------
    ReplicasDiffer
        Always.
    PeerFailed
        A member has failed meanwhile.
    """
    epoch, _, position, _ = place
    where = Fact("position", "the position in the data", str(place), f"epoch {epoch}, sample {position}")
    everyone = group.gather_objects([where, *facts])
    with suppress(PeerFailed):  # another member has got everything, and has ended
        group.sum(torch.zeros(1, dtype=torch.int64))  # none ends while others still receive
    raise ReplicasDiffer(sentence(job, differences({rank: everyone[rank] for rank in among}), since))


def differences(facts: Mapping[int, Iterable[Fact]]) -> list[Disagreement]:
    """Return what differs between the facts of the members, by rank; the most telling kinds first."""
    by_rank = {rank: {(fact.kind, fact.name): fact for fact in each} for rank, each in facts.items()}
    names = dict.fromkeys(name for each in by_rank.values() for name in each)
    found = []
    for kind, name in sorted(names, key=lambda name: list(_CAUSES).index(name[0])):
        present = {rank: each.get((kind, name)) for rank, each in by_rank.items()}
        groups: dict[str, list[int]] = {}
        for rank, fact in present.items():
            groups.setdefault("" if fact is None else fact.key, []).append(rank)
        if len(groups) > 1:
            values = {rank: "missing" if fact is None else fact.text for rank, fact in present.items()}
            found.append(Disagreement(kind, name, values, list(groups.values())))
    return found


def sentence(job: str, found: Sequence[Disagreement], since: Since) -> str:
    """Return the message: what differs on which ranks, since which step, and what usually causes it."""
    if not found:
        return (
            f"job {job!r}: its processes differed for a moment and are equal again (step {since.now}): something is "
            "changed on some of them earlier than on others; change it at the same place on all"
        )
    first = found[0].kind
    named = [str(each) for each in found if each.kind == first][:_NAMED]
    others = len(found) - len(named)
    rest = f", and {others} other {'value' if others == 1 else 'values'}" if others else ""
    equal = since.tensors if first in ("buffer", "parameter", "optimizer") else since.plain
    when = f"after step {since.now}" + ("" if equal in (None, since.now) else f", equal after step {equal}")
    return f"job {job!r}: its processes no longer agree: {'; '.join(named)}{rest} ({when}); usually {_CAUSES[first]}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
