"""The arrays of a cohort: in which slots they run, who trains in them, and who changes to another one.

A member that changes to another array trains on until there is a place for it: a slot in which an array can start, or
an array whose members have all begun. The members of an array start one after another, so each place gets one at a
time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from freetrain_parsl.executor.jobs import commands as do
from freetrain_parsl.extensions.fusion.driver.members import CohortMember, RunningArray
from freetrain_parsl.extensions.fusion.messages import AddMember, ReleaseMember, StartArray
from freetrain_parsl.protocol import journal as record
from freetrain_parsl.protocol.messages import PauseRun

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from freetrain_parsl.executor.driver.slot_registry import Slot
    from freetrain_parsl.executor.jobs.commands import Response
    from freetrain_parsl.extensions.fusion.driver.cohort_trainer import CohortTrainer

__all__ = ["CohortArrays"]

_WORTH_MOVING = 3.0  # starts of an array that a member must still need to be moved to a free slot
_FIRST_SIZE = 2  # members of an array that does not know yet how many it can train
_HAND_OVER = 5.0  # seconds in which an array whose node is taken hands its members over, before it pauses


class CohortArrays:
    """The arrays of a cohort that run, and the queue of the members that are in none."""

    def __init__(
        self, cohort: str, limit: int | None, trainer: CohortTrainer, response: Response, numbers: Iterator[int]
    ) -> None:
        self.queue: list[CohortMember] = []
        """The members that are in no array, in the order in which they are to train."""
        self.size: int | None = None
        """The best size of an array, once it is known."""
        self.turns = ""
        """Why their members are not fused, but step in turns; empty: they are fused, as far as is known."""
        self._cohort = cohort
        self._limit = limit  # of the members of an array
        self._trainer = trainer
        self._response = response
        self._numbers = numbers
        self._running: dict[str, RunningArray] = {}  # by slot

    def __bool__(self) -> bool:
        """Return whether an array runs."""
        return bool(self._running)

    def __iter__(self) -> Iterator[RunningArray]:
        """Iterate over the arrays that run."""
        return iter(list(self._running.values()))

    def of_run(self, slot: str, run: int) -> RunningArray | None:
        """Return the array of a run, unless it has ended."""
        array = self._running.get(slot)
        return array if array is not None and array.run == run else None

    def in_slot(self, slot: str) -> RunningArray | None:
        """Return the array in a slot."""
        return self._running.get(slot)

    def with_member(self, name: str) -> RunningArray | None:
        """Return the array in which a member trains."""
        return next((array for array in self if name in array.members), None)

    def limit_to(self, size: int) -> None:
        """Let no array have more members than this, whatever size others find best."""
        self._limit = min(size, self._limit or size)
        self.decide(size, self.turns)

    def decide(self, size: int, turns: str = "") -> None:
        """Note the best size of an array, and why its members step in turns."""
        self.size, self.turns = min(size, self._limit or size), turns

    def remove(self, array: RunningArray) -> None:
        """Forget an array that has ended."""
        del self._running[array.slot]

    # ── who trains where ──────────────────────────────────────────────────────────────────────────

    def place(self, free: Sequence[Slot], *, wanted: frozenset[str], leaving: frozenset[str], members: int) -> None:
        """Fill the arrays from the queue, start arrays in free slots, divide arrays, and vacate nodes.

        Parameters
        ----------
        free
            The idle slots of the nodes.
        wanted
            The nodes on which arrays are to run.
        leaving
            Nodes that close soon.
        members
            Number of members that are to train in arrays.
        """
        arrays = [array for array in self if array.place in wanted and not array.pausing]
        others = [array for array in self if array.place not in wanted]
        for array in arrays:
            array.leave_by = None
        if members == 0 or not (arrays or free):
            for array in others:
                self.pause(array)
            return
        sizes = self._trainer.sizes(members, len(arrays) + len(free), self.size)
        started = self._start(free, sizes, len(arrays))
        arrays += started
        slots = min(len(free) - len(started), max(0, len(sizes) - len(arrays)))  # in which an array can start
        for array in arrays:
            self._release_beyond(array, array.size)
        self._vacate(others, arrays, slots, max(sizes), leaving)
        if not others:
            self._divide(arrays, slots, sizes)
        for array in sorted(arrays, key=lambda each: each.staying):
            for member in self._next(min(array.size, max(sizes)) - array.staying):
                self._add(array, member)

    def _start(self, free: Sequence[Slot], sizes: Sequence[int], running: int) -> list[RunningArray]:
        """Start arrays with members of the queue."""
        room = max(0, len(sizes) - running)
        first = max(sizes) if self.size is not None else _FIRST_SIZE
        share = -(-len(self.queue) // max(1, min(room, len(free))))
        started = []
        for slot in free[:room]:
            members = self._next(min(first, share, max(sizes)))
            if not members:
                break
            array = RunningArray(slot.name, slot.place, next(self._numbers), len(members), self._response.now)
            array.size, array.turns = self.size or _FIRST_SIZE, self.turns
            self._running[slot.name] = array
            names = tuple(member.name for member in members)
            start = StartArray(self._cohort, array.run, names, self._limit, self.size, self.turns)
            self._response.do(do.Send(slot.name, start))
            self._response.log(record.ArrayStarted(self._cohort, array.name, array.place))
            for member in members:
                self._add(array, member)
            started.append(array)
        return started

    def _vacate(
        self,
        others: Iterable[RunningArray],
        arrays: Sequence[RunningArray],
        slots: int,
        most: int,
        leaving: frozenset[str],
    ) -> None:
        """Let arrays whose nodes are taken hand their members over, if they have the time and the others the room."""
        known = most if self.size is None else min(self.size, most)  # else the arrays may turn out to have room
        room = slots + sum(max(0, known - array.staying) for array in arrays) - len(self.queue)
        for array in others:
            if array.leave_by is None:
                array.leave_by = self._response.now + _HAND_OVER
            if room <= 0 or array.place in leaving or self._response.now >= array.leave_by:
                self.pause(array)
        places = slots + sum(array.takes_members(most) for array in arrays) - len(self.queue) - self._in_transit()
        for array in others:
            for name in list(reversed(array.members))[: max(0, places)]:
                places -= self.release(array, name)

    def _divide(self, arrays: Sequence[RunningArray], slots: int, sizes: Sequence[int]) -> None:
        """Let members of large arrays change to slots for which there is no member in the queue."""
        most = max(sizes)
        by_size = sorted(arrays, key=lambda each: each.staying, reverse=True)
        padded = (*sizes, *[most] * len(by_size))  # there may be fewer sizes than arrays
        shares = [min(array.size, share) for array, share in zip(by_size, padded, strict=False)]
        if all(array.staying <= share for array, share in zip(by_size, shares, strict=True)):
            for array in arrays:
                array.filling = False
            return
        takers = [array for array in arrays if array.filling and array.takes_members(most)]
        places = slots + len(takers) - len(self.queue) - self._in_transit()
        for array, share in zip(by_size, shares, strict=True):
            places -= self._release_beyond(array, share, places)

    def _in_transit(self) -> int:
        """Return the number of members that were commanded to leave an array, and continue in another."""
        return sum(len(array.members) - array.staying for array in self)

    def _next(self, count: int) -> list[CohortMember]:
        """Take members out of the queue."""
        taken = self.queue[: max(0, count)]
        del self.queue[: len(taken)]
        return taken

    def _add(self, array: RunningArray, member: CohortMember) -> None:
        array.members[member.name] = member
        array.shared = array.shared or len(array.members) > 1
        add = AddMember(self._cohort, array.run, member.request.options, b"", member.request.likeness)
        member.response.do(do.Send(array.slot, add))

    # ── leaving ───────────────────────────────────────────────────────────────────────────────────

    def _release_beyond(self, array: RunningArray, size: int, limit: int | None = None) -> int:
        """Make members leave an array that has more than `size`: the last that joined, which have done least.

        Parameters
        ----------
        array, size
            The array, and its new number of members, at least one.
        limit
            Maximum number of members that leave now.

        Returns
        -------
        released
            Number of members that leave.
        """
        surplus = array.staying - max(1, size)
        if limit is not None:
            surplus = min(surplus, limit)
        released = 0
        for name in list(reversed(array.members)):
            if released >= surplus:
                break
            left = array.members[name].seconds_left
            if left is None or left > _WORTH_MOVING * self._trainer.start_seconds:
                released += self.release(array, name)
        return released

    def release(self, array: RunningArray, name: str) -> bool:
        """Make a member leave its array; return false if it does already."""
        if name in array.releasing or array.pausing:
            return False
        array.releasing.add(name)
        self._response.do(do.Send(array.slot, ReleaseMember(self._cohort, array.run, name)))
        return True

    def pause(self, array: RunningArray) -> None:
        """Make all members leave an array, which ends."""
        if not array.pausing:
            array.pausing = True
            self._response.do(do.Send(array.slot, PauseRun(self._cohort, array.run)))
