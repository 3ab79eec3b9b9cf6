"""The conductor: moves each training from the slots where it runs to the nodes where it should.

A training begins on its nodes as a group of processes, from its newest checkpoint if it has one. From then on its group
changes in place: newcomers warm up on the nodes that come while the others train; then one order makes all of them form
the next group. The same order, with ``abort``, leads the survivors out of a loss. Only a training that loses all its
nodes, or cannot change in place, is paused with a checkpoint and begins again.
"""

from __future__ import annotations

import logging
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from freetrain_parsl.errors import InvalidTrainer, TooManyRestarts, TrainingCancelled
from freetrain_parsl.executor.chronicle import Chronicle
from freetrain_parsl.executor.protocol import Message, error_in, settle_with_payload
from freetrain_parsl.executor.regrouping import absentees, cut_off, disconnection, next_move, survivors
from freetrain_parsl.executor.rendezvous import RendezvousDesk
from freetrain_parsl.executor.stalls import why_it_stalls
from freetrain_parsl.executor.storage_watch import StorageWatch
from freetrain_parsl.executor.trainings import Change, Generation, Loss, Participant, Role, Training
from freetrain_parsl.storage.root import probe_root
from freetrain_parsl.training.terms import PauseReason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from concurrent.futures import Future

    from freetrain_parsl.executor.journal import Journal
    from freetrain_parsl.executor.roster import Roster, Slot
    from freetrain_parsl.executor.trainings import TrainingSettings
    from freetrain_parsl.planning import events as ev

logger = logging.getLogger(__name__)

__all__ = ["Conductor"]

# The slots of a node are rarely lost in the same instant: seconds after one loss in which others are waited for.
_GATHER = 0.1


class Conductor:
    """Owned by the driver's thread.

    Parameters
    ----------
    settings
        See `TrainingSettings`.
    roster
        The slots.
    send
        Sends a message to a slot.
    kill
        Gives a slot up that does not end: (slot, reason).
    set_aside
        Takes a slot's node out of the pool for some time: (slot, reason).
    emit
        Takes events for the planner.
    journal
        Takes what happened.
    clock
        Seconds since the epoch.
    """

    def __init__(
        self,
        settings: TrainingSettings,
        *,
        roster: Roster,
        send: Callable[[str, Message], object],
        kill: Callable[[Slot, str], None],
        set_aside: Callable[[Slot, str], None] = lambda _slot, _reason: None,
        emit: Callable[[ev.Event], None],
        journal: Journal,
        clock: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._roster = roster
        self._send = send
        self._kill = kill
        self._set_aside = set_aside
        self._clock = clock
        self._chronicle = Chronicle(emit=emit, journal=journal, clock=clock)
        self._storage = StorageWatch(lambda: probe_root(settings.checkpoint_root, settings.root_identity), clock)
        self._trainings: list[Training] = []
        self._numbers = 0
        self._machine_nodes: int | None = None
        self.rendezvous = RendezvousDesk(send)

    def submit(self, training: Training) -> None:
        """Take a new training; it waits for nodes."""
        self._trainings.append(training)
        training.waiting_since = self._clock()
        self._chronicle.submitted(training, self._settings.costs)
        self._refuse_if_too_large(training)

    def machine_has(self, nodes: int | None) -> None:
        """Note how many nodes there are in all, if that is known, and fail the trainings that need more."""
        if nodes == self._machine_nodes:
            return
        self._machine_nodes = nodes
        for training in self._trainings:
            self._refuse_if_too_large(training)

    def cancel(self, future: Future[Any]) -> None:
        """End a training with a checkpoint, if it is not over; its nodes are free for others at once."""
        for training in self._trainings:
            if training.future is future and not training.over and not training.cancelled:
                training.cancelled, training.desired = True, frozenset()
                self._chronicle.cancelled(training)

    def fail_waiting(self, error: Exception) -> None:
        """Fail the trainings that run nowhere and have no nodes to run on."""
        for training in self._trainings:
            if not (training.over or training.crew or training.desired):
                self._fail(training, error)

    def fail_all(self, error: Exception) -> None:
        """Fail every training."""
        for training in self._trainings:
            self._fail(training, error)

    def assign(self, name: str, nodes: frozenset[str]) -> None:
        """Note where a training should run from now on."""
        for training in self._trainings:
            if training.name == name and not (training.over or training.cancelled or training.withheld):
                training.desired = nodes

    def converge(self) -> None:
        """Move every training a step from where it runs to where it should."""
        self._look_after_storage()
        for training in list(self._trainings):
            if not training.over:
                self._advance(training)
                self._tell_why_it_stalls(training)
            self._end_overdue(training)
        self._trainings = [one for one in self._trainings if one.crew or not one.over]

    # What slots tell. A slot's messages come in order, and it is given one thing to do at a time.

    def on_progress(self, slot: Slot, message: Message) -> None:
        """Take a progress report of a first member."""
        if (found := self._find(slot, message)) is not None:
            self._storage.drop(found[0].name)
            self._chronicle.progressed(found[0], found[0].generation, message["progress"])

    def on_beat(self, slot: Slot, waited: float) -> None:
        """Note how long a member had been waiting for the others."""
        if (training := self._of(slot)) is not None:
            training.crew[slot.name].waited = waited

    def run_of(self, slot: Slot) -> int | None:
        """Return the number of the run that a slot was ordered to do and has not ended."""
        training = self._of(slot)
        return None if training is None else training.crew[slot.name].run

    def on_kv(self, slot: Slot, message: Message) -> None:
        """Answer a call of a rendezvous store of the training that the slot runs."""
        training = self._of(slot)
        own = training is not None and message["group"].rpartition("/")[0] == training.name
        self.rendezvous.handle(slot.name, message, self._clock(), own=own)

    def on_ready(self, slot: Slot, message: Message) -> None:
        """Note that a newcomer has everything but the state."""
        if (found := self._find(slot, message)) is not None:
            found[1].ready = self._clock()

    def on_stranded(self, slot: Slot, message: Message) -> None:
        """Note that a member has left its group because it lost another."""
        if (found := self._find(slot, message)) is None:
            return
        training, member = found
        logger.info("training %s: %s has left its group: %s", training.name, slot.name, message["reason"])
        self._go_on_without_unreachable(training, message)
        change = training.change
        if training.over or member.role is Role.LEAVER:
            self._dismiss(training, [member], abort=True)
        elif change is None or not change.abort or message["generation"] >= change.after.number:
            # Else its order is on the way.
            member.stranded, member.complaint, member.deadline = self._clock(), message["reason"], None

    def on_regrouped(self, slot: Slot, message: Message) -> None:
        """Note that a member goes on in its new group."""
        if (found := self._find(slot, message)) is None:
            return
        training, member = found
        change = training.change
        if change is None or message["generation"] != change.after.number:
            return  # of a group that has lost a member since
        if not change.begun:
            change.begun = True
            training.generation = change.after
        member.goes_on()
        change.waiting.discard(slot.name)
        change.paused = max(change.paused, message["paused"])
        if not change.waiting:
            self._complete(training, change)

    def on_ended(self, slot: Slot, message: Message) -> None:
        """Note that a slot's run is over, one way or another."""
        if (found := self._find(slot, message)) is None:
            return
        slot.busy = None
        training, participant = found
        generation, outcome = training.generation, message["outcome"]
        first = generation is not None and slot.name == generation.first
        if first and message.header.get("progress"):
            self._chronicle.progressed(training, generation, message["progress"])
        if outcome == "peer_lost":
            self._go_on_without_unreachable(training, message)
        counts = self._remove(training, participant)
        why = message.header.get("reason", "")
        logger.info("training %s: its run on %s is over: %s %s", training.name, slot.name, outcome, why)
        if outcome == "storage":
            self._withhold(training, message.header.get("condition") or why)
        elif outcome == "failed":
            self._fail(training, error_in(message.payload))
        elif outcome == "finished" and first:
            self._finish(training, message.payload)
        elif outcome == "peer_lost" or why == PauseReason.LEFT.value:
            if counts and participant.role is Role.MEMBER and not training.over:
                self._note_loss(training, Loss(why, crash=False))
        elif outcome == "paused" and counts and generation is not None and not generation.pausing:
            self._stop(training, generation)  # a node is about to close, or the slot was told to end: all pause
        self._end_if_empty(training)

    def on_lost(self, slot: Slot, reason: str, *, crash: bool) -> None:
        """Note that a slot is gone; a `crash` is a loss that nobody outside caused."""
        training = self._of(slot)
        if training is None:
            return
        counts = self._remove(training, training.crew[slot.name])
        if counts and training.over:
            self._dismiss(training, training.crew.values(), abort=True)
        elif counts:
            self._note_loss(training, Loss(reason, crash=crash))
        self._end_if_empty(training)

    # One training.

    def _advance(self, training: Training) -> None:
        """Do what is next for a training that is not over."""
        now = self._clock()
        generation = training.generation
        if training.losses:
            if generation is None or not generation.running or now - training.last_lost >= _GATHER:
                self._recover(training)
        elif generation is None:
            if training.cancelled:
                if not training.crew:
                    training.future.set_exception(TrainingCancelled(f"training {training.name!r} was cancelled"))
            elif training.desired:
                self._start(training)
        elif generation.lost:
            return  # its members are leaving
        elif (cut := disconnection(training, generation, self._roster, self._settings, now)) is not None:
            self._note_loss(training, Loss(cut, crash=True))
            self._recover(training, with_newcomers=False)  # they may be why
        elif training.change is not None:
            visitors = self.rendezvous.visitors(training.change.after.key(training.name))
            for name in absentees(training, visitors, self._settings, now):
                limit = self._settings.loss_timeout
                self._kill(self._roster.slots[name], f"it hangs: it did not join the others within {limit:g} s")
        elif not any(member.stranded is not None for member in training.members()):
            self._move(training, generation)

    def _move(self, training: Training, generation: Generation) -> None:
        move = next_move(training, generation, self._roster, self._clock())
        self._dismiss(training, [training.crew[name] for name in move.dismiss], abort=False)
        for slot in move.start:
            self._run(training, slot, {"joining": True})
        if move.pause and not generation.pausing:
            self._stop(training, generation)
        elif move.ranks:
            self._order(training, generation, move.ranks, abort=False)

    def _start(self, training: Training) -> None:
        """Begin with a new group, if all slots of its nodes are there and free."""
        slots = self._roster.complete_slots(training.desired)
        if slots is None or any(slot.busy is not None or slot.leaving for slot in slots):
            return
        now = self._clock()
        self._numbers += 1
        ranks = tuple(slot.name for slot in slots)
        training.generation = generation = Generation(self._numbers, training.desired, ranks, began=now)
        self.rendezvous.open(generation.key(training.name))
        for rank, slot in enumerate(slots):
            place = {"generation": generation.number, "rank": rank, "world_size": len(slots)}
            self._run(training, slot, {"joining": False, **place})
        self._chronicle.began(training, generation, in_place=False)

    def _run(self, training: Training, slot: Slot, place: dict[str, Any]) -> None:
        self._numbers += 1
        request, settings = training.request, self._settings
        own = request.checkpoint_interval
        header = {
            "trainer": training.name,
            "run": self._numbers,
            "meeting_timeout": settings.meeting_timeout,
            "checkpoint_root": str(settings.checkpoint_root),
            "checkpoint_interval": settings.checkpoint_interval if own is None else own.total_seconds(),
            "mean_time_between_losses": self._chronicle.loss_rate.mean_time_between,
            "keep": settings.keep,
            "save_margin": settings.save_margin,
            "seed": request.seed,
            "threads": settings.threads,
            "epochs": request.epochs,
            "root_identity": settings.root_identity,
            "code": None if request.code is None else asdict(request.code),
            "on_code_change": request.on_code_change,
            "call": request.call,
            **place,
        }
        role = Role.NEWCOMER if place["joining"] else Role.MEMBER
        slot.busy = training.name
        training.crew[slot.name] = Participant(
            slot.name, slot.node, self._numbers, role, has_state=role is Role.MEMBER, began=self._clock()
        )
        self._send(slot.name, Message("run", header, training.payload))

    def _order(self, training: Training, before: Generation, ranks: tuple[str, ...], *, abort: bool) -> None:
        """Order these slots into the next group, and all others of the present one out."""
        now = self._clock()
        change = training.change
        came = frozenset() if change is None else self.rendezvous.visitors(change.after.key(training.name))
        self._abandon_change(training)
        self._numbers += 1
        crew = training.crew
        after = Generation(
            self._numbers,
            frozenset(crew[slot].node for slot in ranks),
            ranks,
            began=now,
            pausing=before.pausing,
            reported=True,
        )
        grows = any(not crew[slot].has_state for slot in ranks)
        training.change = Change(before, after, abort=abort, grows=grows, waiting=set(ranks))
        self.rendezvous.open(after.key(training.name))
        others = [one for name, one in crew.items() if name not in ranks]
        leavers = [one for one in others if one.role is Role.MEMBER or (abort and one.slot in before.running)]
        self._dismiss(training, leavers, abort=abort)
        for rank, slot in enumerate(ranks):
            member = crew[slot]
            member.role, member.stranded, member.complaint, member.waited = Role.MEMBER, None, "", 0.0
            # Only who has answered the order before this one, by a report or by coming to the meeting, gets time anew.
            if abort and (member.deadline is None or slot in came):
                member.deadline = now + self._settings.loss_timeout + self._settings.meeting_timeout
            place = {"next": after.number, "rank": rank, "world_size": len(ranks), "abort": abort}
            self._tell(training, member, "regroup", place)

    def _complete(self, training: Training, change: Change) -> None:
        """Note that all members go on in the new group; those that had to leave it must have ended soon."""
        now = self._clock()
        training.change = None
        self.rendezvous.drop(change.before.key(training.name))
        self._chronicle.changed(training, change)
        for one in training.crew.values():
            if one.role is Role.LEAVER and one.deadline is None:
                one.deadline = now + self._settings.loss_timeout + self._settings.meeting_timeout
        if change.after.pausing:  # it was told to before the loss: those who heard it then still know
            self._stop(training, change.after)

    def _abandon_change(self, training: Training) -> None:
        """Give up an order that was not carried out by all, for another or because the training ends."""
        change, training.change = training.change, None
        if change is None:
            return
        if change.begun:
            self._chronicle.changed(training, change)
            self.rendezvous.drop(change.before.key(training.name))
        else:
            self.rendezvous.drop(change.after.key(training.name))

    def _stop(self, training: Training, generation: Generation) -> None:
        """Let the members pause, or end as they do anyway, and send everybody else away."""
        generation.pausing = True
        if training.change is not None and not training.change.begun:
            newcomers = [training.crew[slot] for slot in training.change.after.ranks if slot in training.crew]
            self._dismiss(training, [one for one in newcomers if not one.has_state], abort=False)
            self._abandon_change(training)
        self._dismiss(training, training.newcomers(), abort=False)
        for member in training.crew.values():
            if member.role is Role.MEMBER:
                self._tell(training, member, "pause", {})

    def _dismiss(self, training: Training, leavers: Iterable[Participant], *, abort: bool) -> None:
        """Send newcomers away, and members: at the boundary where the others regroup, or at once with `abort`."""
        for one in list(leavers):
            if one.role is Role.NEWCOMER or not one.has_state:
                self._tell(training, one, "pause", {})
            elif abort or one.role is not Role.LEAVER:
                change = training.change
                place = {"next": change.after.number if change else 0, "rank": None, "world_size": 0, "abort": abort}
                self._tell(training, one, "regroup", place)
            if abort:
                one.deadline = self._clock() + self._settings.loss_timeout
            elif one.role is Role.NEWCOMER:
                one.deadline = self._clock() + self._settings.loss_timeout + self._settings.meeting_timeout
            one.role = Role.LEAVER

    # Losses.

    def _go_on_without_unreachable(self, training: Training, message: Message) -> None:
        """Take out of a group that could not form those whom the others do not reach, though they reach the driver."""
        change, number = training.change, message.header.get("generation")
        groups = [change.after] if change is not None else []
        groups += [training.generation] if training.generation is not None else []
        ranks = next((group.ranks for group in groups if group.number == number), ())
        for name in cut_off(ranks, message.header.get("unreachable", ())):
            member, slot = training.crew.get(name), self._roster.slots.get(name)
            if member is None or slot is None or member.cut_off or training.over:
                continue
            member.cut_off = True
            reason = f"other nodes of training {training.name} do not reach it, though it reaches the driver"
            self._set_aside(slot, reason)
            self._note_loss(training, Loss(f"{slot.node}: {reason}", crash=False))

    def _note_loss(self, training: Training, loss: Loss) -> None:
        training.losses.append(loss)
        training.last_lost = self._clock()

    def _recover(self, training: Training, *, with_newcomers: bool = True) -> None:
        """Go on with those who are left, or, if nobody has the state, from the newest checkpoint."""
        losses, training.losses = training.losses, []
        training.count(next((loss for loss in losses if loss.crash), losses[-1]))
        generation = training.generation
        if generation is None:
            return
        if training.restarts > self._settings.max_restarts:
            self._fail(
                training,
                TooManyRestarts(
                    f"training {training.name!r}: {training.restarts} crashes without a step beyond step "
                    f"{training.furthest}, though its nodes were not taken; the last: {training.last_crash}; "
                    "see the worker logs in the run directory"
                ),
            )
        elif generation.lost:
            self._end_if_empty(training)
        else:
            in_place = training.in_place and generation.reported
            ranks = survivors(training, with_newcomers=with_newcomers) if in_place else ()
            if ranks:
                self._order(training, generation, ranks, abort=True)
            else:
                self._chronicle.loss_rate.losses += 1
                generation.lost = True
                self._abandon_change(training)
                self._dismiss(training, training.crew.values(), abort=True)
                self._end_if_empty(training)

    def _end_overdue(self, training: Training) -> None:
        now = self._clock()
        late = [one for one in training.crew.values() if one.deadline is not None and now > one.deadline]
        for one in late:
            self._kill(self._roster.slots[one.slot], "it did not answer a loss, or did not leave, in time")

    # The checkpoint directory.

    def _withhold(self, training: Training, condition: str) -> None:
        """Take a training off its nodes that cannot start, or go on, without the checkpoint directory; it waits."""
        if training.over or training.cancelled or training.withheld:
            return
        training.withheld, training.desired = True, frozenset()
        self._chronicle.withheld(training, condition, self._storage.hold(training.name))
        training.losses.clear()
        if training.generation is not None:
            training.generation.lost = True
        self._abandon_change(training)
        self._dismiss(training, training.crew.values(), abort=True)

    def _look_after_storage(self) -> None:
        """Let the trainings that wait for the checkpoint directory try again when it works."""
        ready, postponed = self._storage.turn()
        for training in self._trainings:
            if not training.withheld or training.over or training.cancelled:
                continue
            if training.name in postponed:
                self._chronicle.waits(training, *postponed[training.name])
            elif training.name in ready:
                training.withheld = False
                self._chronicle.released(training)

    # The end of a slot's run, of a group, of a training.

    def _remove(self, training: Training, participant: Participant) -> bool:
        """Take a slot out of the crew; whether the others miss it."""
        name = participant.slot
        del training.crew[name]
        generation, change = training.generation, training.change
        missed = generation is not None and name in generation.running
        if generation is not None:
            generation.running.discard(name)
        if change is not None:
            missed = missed or name in change.after.running
            change.after.running.discard(name)
            change.waiting.discard(name)
        return missed

    def _end_if_empty(self, training: Training) -> None:
        """End the group when the last of its members has ended."""
        generation = training.generation
        if generation is None or generation.running or training.losses:
            return
        self._abandon_change(training)
        self.rendezvous.drop(generation.key(training.name))
        self._chronicle.ended(training, generation, self._clock(), lost=generation.lost)
        training.generation, training.waiting_since = None, self._clock()
        self._dismiss(training, training.newcomers(), abort=False)

    def _finish(self, training: Training, payload: bytes) -> None:
        self._chronicle.finished(training)
        settle_with_payload(training.future, payload)
        training.losses.clear()
        self._dismiss(training, [one for one in training.crew.values() if not one.has_state], abort=False)
        self._abandon_change(training)

    def _fail(self, training: Training, error: BaseException) -> None:
        if training.over:
            return
        self._chronicle.failed(training, error)
        training.future.set_exception(error)
        training.losses.clear()
        self._abandon_change(training)
        self._dismiss(training, training.crew.values(), abort=True)

    def _refuse_if_too_large(self, training: Training) -> None:
        needed = training.request.min_nodes
        if self._machine_nodes is None or training.over or training.generation is not None:
            return
        if needed > self._machine_nodes:
            self._fail(
                training,
                InvalidTrainer(
                    f"training {training.name!r} needs min_nodes={needed} nodes at the same time, but there are only "
                    f"{self._machine_nodes} for its blocks: lower min_nodes, or use a larger partition"
                ),
            )

    def _tell_why_it_stalls(self, training: Training) -> None:
        why = "" if training.over else why_it_stalls(training, self._clock())
        if why != training.stall_told:
            training.stall_told = why
            self._chronicle.stalled(training, why)

    # Who is who.

    def _of(self, slot: Slot) -> Training | None:
        return next((training for training in self._trainings if slot.name in training.crew), None)

    def _find(self, slot: Slot, message: Message) -> tuple[Training, Participant] | None:
        """Find the training that a slot speaks of, and its part in it; ``None`` if that is over."""
        training = self._of(slot)
        if training is None or training.crew[slot.name].run != message["run"]:
            return None
        return training, training.crew[slot.name]

    def _tell(self, training: Training, participant: Participant, kind: str, header: dict[str, Any]) -> None:
        self._send(participant.slot, Message(kind, {"trainer": training.name, "run": participant.run, **header}))
