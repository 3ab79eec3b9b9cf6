"""The processes of a sharded training job: their ranks, their replicas, and those that continue after a failure.

A replica is a run of consecutive ranks, and has the whole state. One that loses a process cannot continue; the others
can. Its remaining processes end, and come back as newcomers, which receive the state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from freetrain_parsl.executor.jobs.training.states import Role

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from freetrain_parsl.executor.driver.slot_registry import Slot, SlotRegistry
    from freetrain_parsl.executor.jobs.training.states import GroupMembers, Participant, Regrouping
    from freetrain_parsl.planning.sizes import AllowedCounts

__all__ = ["divided", "fitting", "in_order_of_place", "intact_after", "least_moved", "replicas_of"]


def least_moved(before: Sequence[str], after: Sequence[str]) -> tuple[str, ...]:
    """Return the members of the next group in the order of their ranks.

    A member of rank *i* of *n* has the part of the state from *i*/*n* to (*i* + 1)/*n*. Those that stay get the ranks
    whose parts overlap most with their own, the largest overlaps first; newcomers get the others. The first rank is
    never a newcomer's.

    Parameters
    ----------
    before
        The members of the present group, by rank.
    after
        Those of the next group, in any order.
    """
    old, new = len(before), len(after)
    stay, newcomers = set(before) & set(after), iter([member for member in after if member not in set(before)])
    pairs = [(rank, owner) for rank in range(new) for owner, member in enumerate(before) if member in stay]
    # The first rank before all others, then by overlap.
    pairs.sort(key=lambda pair: (pair[0] > 0, -_overlap(pair[1], old, pair[0], new), pair))
    ranks: dict[int, str] = {}
    for rank, owner in pairs:
        if rank not in ranks and before[owner] in stay:
            ranks[rank] = before[owner]
            stay.remove(before[owner])
    return tuple(ranks[rank] if rank in ranks else next(newcomers) for rank in range(new))


def _overlap(one: int, ones: int, other: int, others: int) -> int:
    """Return the overlap of two parts, in units of 1 / (ones · others)."""
    return max(0, min((one + 1) * others, (other + 1) * ones) - max(one * others, other * ones))


def in_order_of_place(slots: Sequence[Slot], registry: SlotRegistry, now: float) -> list[Slot]:
    """Return slots in an order in which those of a node, a block and a closing time follow each other.

    Replicas are runs of it, so that what takes nodes takes as few replicas as possible.
    """

    def key(slot: Slot) -> tuple[float, str, str, str]:
        block = registry.blocks.get(slot.block)
        return (float("inf") if block is None else block.loses_nodes_at(now), slot.block, slot.place, slot.name)

    return sorted(slots, key=key)


def replicas_of(group: GroupMembers) -> list[tuple[str, ...]]:
    """Return the slots of each replica of a group."""
    shards = len(group.ranks) // group.replicas
    return [group.ranks[first : first + shards] for first in range(0, len(group.ranks), shards)]


def intact_after(
    participants: Mapping[str, Participant], group: GroupMembers, change: Regrouping | None
) -> tuple[tuple[str, ...], int]:
    """Return the slots that can continue after a failure, in order of rank, and the number of their replicas.

    In a change that no member has completed, these are replicas of the group before it: they keep their shards until
    then. If those that leave have left, it is the whole group after it, or none.
    """

    def continues(slot: str) -> bool:
        member = participants.get(slot)
        return member is not None and member.role is Role.MEMBER and member.has_state and not member.unreachable

    whole = [ranks for ranks in replicas_of(group) if all(map(continues, ranks))]
    if whole or change is None or change.begun:
        return tuple(slot for ranks in whole for slot in ranks), len(whole)
    after = change.after
    return (after.ranks, after.replicas) if all(map(continues, after.ranks)) else ((), 0)


def fitting(
    group: GroupMembers, ranks: Sequence[str], place_of: Callable[[str], str], allowed: AllowedCounts
) -> tuple[str, ...]:
    """Return those of the slots of a next group that form replicas: as many units as are allowed.

    Members of whole replicas come before other members, and newcomers come last. Empty: no number of them is allowed.
    """
    chosen = set(ranks)
    whole = {slot for each in replicas_of(group) if chosen.issuperset(each) for slot in each}
    order = sorted(ranks, key=lambda slot: (slot not in whole, slot not in group.ranks))
    places = list(dict.fromkeys(map(place_of, order)))
    kept = set(places[: allowed.at_most(len(places))])
    return tuple(slot for slot in ranks if place_of(slot) in kept)


def divided(group: GroupMembers, ranks: Sequence[str], replicas: int, by_place: Sequence[str]) -> tuple[str, ...]:
    """Return the members of the next group in the order of their ranks.

    Whole replicas stay as they are if the size of a replica does. The others are runs of `by_place`, and receive the
    state. The first rank is never a newcomer's.

    Parameters
    ----------
    group
        The present group.
    ranks
        The members of the next one.
    replicas
        Number of its replicas.
    by_place
        The same members, see `in_order_of_place`.
    """
    if replicas == group.replicas == 1:
        return least_moved(group.ranks, ranks)
    shards = len(ranks) // replicas
    stay = set(group.ranks) & set(ranks)
    whole = [each for each in replicas_of(group) if len(each) == shards and stay.issuperset(each)][:replicas]
    taken = {slot for each in whole for slot in each}
    rest = [slot for slot in by_place if slot not in taken]
    runs = [rest[first : first + shards] for first in range(0, len(rest), shards)]
    if not whole:  # all receive new parts
        runs.sort(key=stay.isdisjoint)
        runs[0].sort(key=lambda slot: slot not in stay)
    return tuple(slot for run in (*whole, *runs) for slot in run)
