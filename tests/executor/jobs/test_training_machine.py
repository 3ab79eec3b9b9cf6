"""The state machine of training jobs under any order of events, tested against a model of the real processes.

After any number of faults, both training jobs must reach their nodes in bounded time, end, and leave nothing behind.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from freetrain_parsl.errors import TooManyRestarts, TrainingCancelled, TrainingError
from freetrain_parsl.executor.jobs.training.states import Abandoning, Ended, Goal, Regrouping, Running, Waiting
from freetrain_parsl.protocol.reports import PauseReason
from tests.executor.jobs.training_world import LIMITS, UNITS, Process, World

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

# Where the planner wants a and b; mostly a step from one to the next.
LAYOUTS = ("0/", "0/23", "01/23", "012/", "0123/", "1/23", "/0123", "/23", "01/", "02/13", "/")
LAST_LAYOUTS = ("0/23", "23/01", "01/23", "1/023")
# Rounds of half a second. A member that hangs is killed after 25 s, or 45 s if all do, and then the next.
REACHED_WITHIN = 400
ENDED_WITHIN = 150
LEFT_WITHIN = 100


class Walk(World, RuleBasedStateMachine):
    """What may happen, in any order."""

    @initialize()
    def begin(self) -> None:
        """Both training jobs train."""
        self.assign_and_settle("0/23")

    def teardown(self) -> None:
        """Without further faults, every training job reaches its nodes, ends, and leaves nothing behind."""
        self.stop_faults()
        self.reach_assignment(LAST_LAYOUTS[next(self.names) % len(LAST_LAYOUTS)])
        self.end()
        self.leave_nothing()

    # What may happen.

    @rule(layout=st.sampled_from(LAYOUTS))
    def assign(self, layout: str) -> None:
        """Assign the nodes as the planner does, never one node to two training jobs."""
        self._assign(layout)

    @rule(layout=st.sampled_from(LAYOUTS))
    def assign_and_settle(self, layout: str) -> None:
        """Assign, and let some time pass without events."""
        self._assign(layout)
        for _ in range(12):
            self._round()

    @rule(random=st.randoms(use_true_random=False), rounds=st.integers(1, 12), lazy=st.sampled_from([0.0, 0.2, 0.6]))
    def go_on(self, random: Random, rounds: int, lazy: float) -> None:
        """Run some rounds in which processes act and messages arrive in any order, some of them late."""
        for _ in range(rounds):
            for process in random.sample(list(self.processes.values()), len(self.processes)):
                if process.inbox and random.random() >= lazy:
                    self._receive(process)
                if random.random() >= lazy:
                    self._act(process)
                if process.outbox and process.slot in self.registry.slots and random.random() >= lazy:
                    self._report(process)
            self._pass_time(0.2)

    @rule(seconds=st.sampled_from([0.05, 0.2, 1.0, 6.0, 30.0]))
    def wait(self, seconds: float) -> None:
        """Let time pass without messages."""
        if seconds > LIMITS.peer_timeout:  # processes do nothing meanwhile: they may seem to hang
            self.faults.update(self.machines.keys())
        self._pass_time(seconds)

    @precondition(lambda self: any(process.inbox for process in self.processes.values()))
    @rule(data=st.data())
    def deliver_to_slot(self, data: st.DataObject) -> None:
        """Deliver a message from the driver."""
        self._receive(self._one_of(data, lambda process: bool(process.inbox)))

    @precondition(lambda self: any(process.outbox for process in self.processes.values()))
    @rule(data=st.data(), repeated=st.booleans())
    def deliver_to_driver(self, data: st.DataObject, repeated: bool) -> None:
        """Deliver a message from a slot, perhaps twice."""
        self._report(self._one_of(data, lambda process: bool(process.outbox)), repeated=repeated)

    @precondition(lambda self: self.processes)
    @rule(data=st.data())
    def act(self, data: st.DataObject) -> None:
        """Let a process perform its next action."""
        self._act(self._one_of(data, lambda _: True))

    @precondition(lambda self: self.processes)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        """Kill a process; the driver learns it later."""
        self._die(self._one_of(data, lambda _: True))

    @rule(
        layout=st.sampled_from(LAYOUTS),
        rounds=st.integers(1, 9),
        victims=st.sets(st.sampled_from(UNITS), min_size=1, max_size=3),
        how=st.sampled_from(["dies", "dies late", "hangs"]),
    )
    def fail_during_a_change(self, layout: str, rounds: int, victims: set[int], how: str) -> None:
        """Let processes die or hang some time after the planner has decided otherwise."""
        self._assign(layout)
        for _ in range(rounds):
            self._round()
        for process in [process for process in self.processes.values() if process.unit in victims]:
            if how == "hangs":
                self._hang(process)
            else:
                self._die(process)
        while self.dead and how == "dies":
            self._lose(self.dead.pop(0).slot, crash=True)

    @precondition(lambda self: any(process.run for process in self.processes.values()))
    @rule(data=st.data())
    def hang(self, data: st.DataObject) -> None:
        """Let a process hang; it is still alive."""
        self._hang(self._one_of(data, lambda process: process.run is not None))

    @rule(units=st.sets(st.sampled_from(UNITS), min_size=2, max_size=2))
    def cut_connection(self, units: set[int]) -> None:
        """Let two units reach the driver, but not each other, in the groups that form from now on."""
        self.cut.add(frozenset(units))

    @precondition(lambda self: any(self.heard.values()))
    @rule(data=st.data())
    def hear_again(self, data: st.DataObject) -> None:
        """Deliver an old message a second time."""
        slots = sorted(slot for slot, messages in self.heard.items() if messages and slot in self.registry.slots)
        if slots:
            slot = data.draw(st.sampled_from(slots))
            self._hear(slot, data.draw(st.sampled_from(self.heard[slot])), again=True)

    @precondition(lambda self: self.dead)
    @rule(crash=st.booleans())
    def learn_of_death(self, crash: bool) -> None:
        """Let HTEX report a death."""
        self._lose(self.dead.pop(0).slot, crash=crash)

    @rule(unit=st.sampled_from(UNITS), warned=st.booleans())
    def reclaim(self, unit: int, warned: bool) -> None:
        """Reclaim a node, as the batch system does; its processes stop at the next boundary, the others with them."""
        node = f"n{unit // self.slots_per_node}"
        for slot in self.registry.slots.values():
            slot.leaving = slot.leaving or (warned and slot.node == node)
        for process in self.processes.values():
            if process.node == node and process.place == "group":
                process.pauses = PauseReason.CLOSING

    @precondition(lambda self: any(slot.leaving for slot in self.registry.slots.values()))
    @rule()
    def take_reclaimed(self) -> None:
        """Take the reclaimed nodes; others come in their place."""
        self._take_reclaimed()

    @precondition(lambda self: self._all_train())
    @rule(rare=st.integers(0, 8), name=st.sampled_from("ab"))
    def crash_without_progress(self, rare: int, name: str) -> None:
        """Rarely, let all processes of a training job crash as soon as they are started, until it is given up."""
        for _ in range(LIMITS.max_restarts + 1 if rare == 0 else 0):
            self._pass_time(1.0)
            slots = list(self.machines[name].participants)
            if not slots or any(slot not in self.registry.slots for slot in slots):
                return
            for slot in slots:
                self._vanish(slot)
                self._lose(slot, crash=True)
            self._pass_time(1.0)
        assert rare or isinstance(self.futures[name].exception(timeout=0), TooManyRestarts)

    @precondition(lambda self: any(process.run for process in self.processes.values()))
    @rule(data=st.data(), rare=st.integers(0, 6))
    def fill_disk(self, data: st.DataObject, rare: int) -> None:
        """Now and then, let the checkpoint directory fail, for one process or for all attempts."""
        if rare <= 1:
            process = self._one_of(data, lambda process: process.run is not None)
            if not process.hangs:
                self._fail_to_save(process)
        self.storage.works = rare != 1

    @precondition(lambda self: not any(future.done() for future in self.futures.values()))
    @rule(data=st.data(), rare=st.integers(0, 3))
    def cancel_or_raise(self, data: st.DataObject, rare: int) -> None:
        """Now and then, let the user cancel a training job, or its code raise an exception."""
        if rare == 0:
            self.manager.cancel(self.futures["b"])
        elif rare == 1 and any(process.run for process in self.processes.values()):
            process = self._one_of(data, lambda process: process.run is not None)
            if not process.hangs:
                self._raise(process)

    # Invariants.

    @invariant()
    def at_most_one_group_of_a_training_trains(self) -> None:
        for name in self.machines:
            groups = {
                one.group
                for one in self.processes.values()
                if one.run and one.run.training == name and one.place == "group" and self._works(one)
            }
            assert len(groups) <= 1, groups

    @invariant()
    def every_slot_is_free_or_has_one_training(self) -> None:
        owners: dict[str, str] = {}
        for name, machine in self.machines.items():
            for slot in machine.participants:
                assert slot not in owners
                owners[slot] = name
        assert owners.keys() <= self.registry.slots.keys()
        for name, slot in self.registry.slots.items():
            assert slot.busy == owners.get(name)

    @invariant()
    def groups_are_as_commanded_and_have_their_stores(self) -> None:
        """Check that ranks are 0 to size - 1, and that exactly the stores of the current groups are open."""
        stores = set()
        for name, machine in self.machines.items():
            phase = machine.phase
            if isinstance(phase, Regrouping):
                groups = [phase.before, phase.after]
            else:
                groups = [] if isinstance(phase, Waiting) else [phase.group]
            for group in groups:
                if group is not None:
                    assert self.places[group.number] == dict(enumerate(group.ranks))
                    over = isinstance(phase, Ended) and not group.running
                    stores |= set() if over else {f"{name}/{group.number}"}
        assert self.manager.rendezvous._stores.keys() == stores

    @invariant()
    def the_planner_knows_the_trainings_that_want_nodes(self) -> None:
        for name, machine in self.machines.items():
            wants = machine.goal is Goal.TRAIN and not machine.over
            assert (name in self.planned) == wants
            assert wants or machine.over or not machine.desired
            assert machine.over == self.futures[name].done()

    @invariant()
    def no_work_is_given_up_while_a_process_has_it(self) -> None:
        """Check that no live process is ahead of the checkpoint to which its training job falls back."""
        before, self.restarts = self.restarts, self.manager._failure_rate.failures
        if self.restarts == before:
            return
        for process in self.processes.values():
            if process.run is not None and process.step is not None and not process.hangs:
                name = process.run.training
                abandoned = isinstance(self.machines[name].phase, (Abandoning, Waiting))
                assert not abandoned or process.step <= self.checkpoints[name]

    @invariant()
    def restarts_are_counted(self) -> None:
        for name, machine in self.machines.items():
            assert machine.over or machine._tracker._crashes <= LIMITS.max_restarts
            if isinstance(error := self._error(name), TooManyRestarts):
                assert self.faults[name], error

    # A suffix without faults.

    def stop_faults(self) -> None:
        """End all faults that nobody but the batch system or the user would end."""
        self.storage.works = True
        self._take_reclaimed()
        for process in list(self.processes.values()):
            if process.hangs and process.place == "preparing":  # it may just be slow, so that the driver waits
                self._die(process)
        while self.dead:
            self._lose(self.dead.pop(0).slot, crash=False)

    def reach_assignment(self, layout: str) -> None:
        """Check that both training jobs reach their nodes."""

        def reached() -> bool:
            return all(
                machine.over
                or machine.goal is Goal.CANCEL
                or (isinstance(machine.phase, Running) and machine.phase.group.nodes == machine.desired)
                for machine in self.machines.values()
            )

        self._go_on_until(reached, layout, REACHED_WITHIN)

    def end(self) -> None:
        """Check that both training jobs end, with their result unless there was a cause of another end."""
        self.ending = True
        self._go_on_until(lambda: all(future.done() for future in self.futures.values()), None, ENDED_WITHIN)
        for name, future in self.futures.items():
            error = self._error(name)
            assert isinstance(error, (type(None), TrainingCancelled, TrainingError, TooManyRestarts)), error
            if error is None:
                assert future.result() == self.counted[name] == self.last[name]

    def leave_nothing(self) -> None:
        """Check that all slots become free."""

        def left() -> bool:
            busy = any(slot.busy is not None for slot in self.registry.slots.values())
            return not (busy or self.manager._by_name or any(process.run for process in self.processes.values()))

        self._go_on_until(left, None, LEFT_WITHIN)

    def _go_on_until(self, done: Callable[[], bool], layout: str | None, rounds: int) -> None:
        for _ in range(rounds):
            if layout is not None:
                self._assign(layout)
            self._round()
            self.every_slot_is_free_or_has_one_training()
            self.groups_are_as_commanded_and_have_their_stores()
            if done():
                return
        states = [str(machine.state) for machine in self.machines.values()]
        raise AssertionError(states, self.processes)

    # Helpers.

    def _one_of(self, data: st.DataObject, condition: Callable[[Process], bool]) -> Process:
        names = sorted(name for name, process in self.processes.items() if condition(process))
        return self.processes[data.draw(st.sampled_from(names))]

    def _die(self, process: Process) -> None:
        self.faults[str(self.registry.slots[process.slot].busy)] += 1
        self.dead.append(self.processes.pop(process.slot))

    def _hang(self, process: Process) -> None:
        """Let a process hang, unless it runs nothing, or trains alone, so that nobody could notice."""
        if process.run is not None and (process.place != "group" or process.ranks > 1):
            process.hangs = True
            self.faults[process.run.training] += 1

    def _take_reclaimed(self) -> None:
        for slot in [slot for slot in self.registry.slots.values() if slot.leaving]:
            self._vanish(slot.name)
            self._lose(slot.name, crash=False)

    def _all_train(self) -> bool:
        return all(isinstance(machine.phase, Running) for machine in self.machines.values())

    def _error(self, name: str) -> BaseException | None:
        future = self.futures[name]
        return future.exception() if future.done() else None


class SharedWalk(Walk):
    """The same on two nodes of two slots each, which both training jobs share."""

    slots_per_node = 2


class OneNodeWalk(Walk):
    """The same on one node of four slots."""

    slots_per_node = 4


TestWalk = Walk.TestCase
TestWalk.settings = settings(max_examples=30, stateful_step_count=25)
TestSharedWalk = SharedWalk.TestCase
TestSharedWalk.settings = settings(max_examples=15, stateful_step_count=25)
TestOneNodeWalk = OneNodeWalk.TestCase
TestOneNodeWalk.settings = settings(max_examples=15, stateful_step_count=25)


@pytest.mark.slow
@pytest.mark.parametrize("walk", [Walk, SharedWalk, OneNodeWalk])
def test_many_walks(walk: type[Walk]) -> None:
    """Walk further, and more often."""
    run_state_machine_as_test(walk, settings=settings(max_examples=20, stateful_step_count=40))
