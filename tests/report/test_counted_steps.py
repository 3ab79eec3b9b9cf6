"""The time in steps that count is a part of the node time, whatever happened to drivers and training jobs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freetrain_parsl.extensions.pages.run_view import RunView
from freetrain_parsl.protocol import journal as record
from freetrain_parsl.report.projection.counted_steps import CountedSteps
from freetrain_parsl.report.projection.node_time import NodePhase
from freetrain_parsl.report.projection.projection import Projection

if TYPE_CHECKING:
    from freetrain_parsl.report.projection.node_time import NodeTime


@dataclass
class _Training:
    """A job of the model, with its steps since its beginning: whether a journal shows them, and slot-seconds."""

    steps: list[tuple[bool, float]] = field(default_factory=list)
    saved: int = 0
    """Number of steps in its checkpoint."""
    reported: int = 0
    """Number of steps in the last report to the driver."""
    trains: bool = False

    @property
    def position(self) -> float:
        return sum(seconds for _, seconds in self.steps)

    @property
    def reported_position(self) -> float:
        return sum(seconds for _, seconds in self.steps[: self.reported])

    def lose_unreported(self) -> None:
        self.steps = [(shown and number < self.reported, s) for number, (shown, s) in enumerate(self.steps)]


class _World:
    """Two training jobs, each with a node of its own, and drivers one after the other; writes their journals."""

    def __init__(self, slots: int, earlier: float) -> None:
        self.time = 0.0
        self.slots = slots
        self.trainings = {"a": _Training([(False, earlier)] if earlier else [], saved=bool(earlier)), "b": _Training()}
        self.journals: list[list[tuple[float, record.Record]]] = []
        self.progress: list[dict[str, dict[str, float]]] = []
        self.reported: list[float] = []
        self.ended: list[float | None] = []
        self.runs = False
        self.generation = 0
        self.begin_driver()

    def write(self, entry: record.Record) -> None:
        self.journals[-1].append((self.time, entry))

    def begin_driver(self) -> None:
        if self.runs:
            return
        self.runs = True
        self.journals.append([])
        self.progress.append({})
        self.reported.append(0.0)
        for name in self.trainings:
            block, node = f"block-{name}", f"node-{name}"
            self.write(record.TrainingSubmitted(name, 1, 1, None))
            self.write(record.BlockRequested(block, [node], 1000.0, None))
            self.write(record.BlockStarted(block, [node], self.time + 1000.0))
            for number in range(self.slots):
                self.write(record.SlotJoined(f"{name}-{number}", node, block, 1))
            self.write(record.NodeJoined(node, block, self.time + 1000.0))

    def start(self, name: str) -> None:
        training = self.trainings[name]
        if not self.runs or training.trains:
            return
        training.trains = True
        training.steps = training.steps[: training.saved]
        self.generation += 1
        self.write(record.FragmentStarted(name, self.generation, [f"node-{name}"], in_place=False, paused=0.0))
        if training.saved:
            self.write(record.FragmentResumed(name, training.saved, training.position))
        self.report(name)

    def train(self, seconds: float) -> None:
        """Train for that long, half of it in steps; also without a driver, which the journal cannot show."""
        self.time += seconds
        for training in self.trainings.values():
            if training.trains:
                training.steps.append((self.runs, seconds * self.slots / 2))

    def report(self, name: str) -> None:
        training = self.trainings[name]
        if self.runs and training.trains:
            training.reported = len(training.steps)
            self.progress[-1][name] = {"slot_seconds": training.position, "step": len(training.steps)}
            self.reported[-1] = self.time

    def save(self, name: str) -> None:
        if self.trainings[name].trains:
            self.trainings[name].saved = len(self.trainings[name].steps)

    def stop(self, name: str) -> None:
        self.save(name)
        self.report(name)
        self.end(name, failure=False)

    def change_group(self, name: str) -> None:
        """Let another group continue in place, without a checkpoint."""
        if self.runs and self.trainings[name].trains:
            self.end(name, failure=False)
            self.trainings[name].trains = True
            self.generation += 1
            self.write(record.FragmentStarted(name, self.generation, [f"node-{name}"], in_place=True, paused=0.1))

    def fail(self, name: str) -> None:
        if self.runs and self.trainings[name].trains:
            self.trainings[name].lose_unreported()
        self.end(name, failure=True)

    def end(self, name: str, *, failure: bool) -> None:
        training = self.trainings[name]
        if self.runs and training.trains:
            training.trains = False
            position = training.reported_position
            ended = record.FragmentEnded(name, self.generation, [f"node-{name}"], failure, slot_seconds=position)
            self.write(ended)

    def kill(self, dark: float) -> None:
        """Kill the driver; its training jobs continue for a while, and save."""
        if not self.runs:
            return
        self.runs = False
        self.ended.append(None)
        for training in self.trainings.values():
            training.lose_unreported()
        self.train(dark)
        for name, training in self.trainings.items():
            if dark > 2.0:
                self.save(name)
            training.trains = False

    def lose(self, name: str, seconds: float) -> None:
        """Train on after a checkpoint, fail, and begin again from it."""
        self.start(name)
        self.train(seconds)
        self.save(name)
        self.train(seconds)
        self.report(name)
        self.fail(name)
        self.start(name)

    def replace_driver(self, dark: float) -> None:
        """Train with a driver, kill it, and with the next one."""
        for _ in range(2):
            self.kill(dark)
            self.begin_driver()
            for name in self.trainings:
                self.start(name)
            self.train(dark)
            self.report("a")

    def finish(self) -> None:
        if self.runs:
            for name in self.trainings:
                self.stop(name)
            self.runs = False
            self.ended.append(self.time)

    @property
    def truth(self) -> float:
        """Slot-seconds in steps that the journals show and that are in the state of the training jobs."""
        return sum(seconds for training in self.trainings.values() for shown, seconds in training.steps if shown)


_NAMES = st.sampled_from(["a", "b"])
_SECONDS = st.floats(0.5, 8.0)
_ACTIONS = st.one_of(
    st.tuples(st.sampled_from(["start", "report", "save", "stop", "fail", "change_group"]), _NAMES),
    st.tuples(st.sampled_from(["train", "kill", "replace_driver"]), _SECONDS),
    st.tuples(st.just("lose"), _NAMES, _SECONDS),
    st.tuples(st.sampled_from(["finish", "begin_driver"])),
)


def _shown_by(run: Projection, world: _World) -> Projection:
    for timed, progress, reported, ended in zip(
        world.journals, world.progress, world.reported, world.ended, strict=True
    ):
        run.begin_driver()
        run.take(timed)
        run.take_progress(progress, reported)
        run.end_driver(ended, "killed" if ended is None else "stopped")
    return run


def _figures(world: _World) -> tuple[NodeTime, float]:
    account = _shown_by(Projection(), world).node_time()
    return account, account.useful_slot_seconds


def _page(world: _World) -> dict[str, Any]:
    view = RunView("run")
    _shown_by(view, world)
    run: dict[str, Any] = view.since()["run"]
    return run


def _play(world: _World, actions: list[tuple]) -> None:
    for name, *arguments in actions:
        getattr(world, name)(*arguments)
    world.finish()


@given(st.integers(1, 3), st.sampled_from([0.0, 50.0]), st.lists(_ACTIONS, max_size=40))
def test_steps_that_count_are_those_that_the_journals_show(slots, earlier, actions):
    """Not those of an earlier run, nor those after a driver was killed, nor those that were lost: to the second."""
    world = _World(slots, earlier)
    _play(world, actions)
    account, counted = _figures(world)
    assert counted == pytest.approx(world.truth)
    training = account.phases[NodePhase.TRAINING]
    assert counted / account.slots_per_node <= training + 1e-6 <= account.held + 2e-6
    page = _page(world)
    assert page["useful_node_seconds"] == pytest.approx(counted / account.slots_per_node, abs=1.0)
    assert {phase.value: seconds for phase, seconds in account.phases.items()} == pytest.approx(
        page["node_seconds"], abs=1.0
    )


def test_steps_made_after_the_driver_was_killed_are_not_in_its_node_time():
    """The defect, by hand: 10 s of training, 8 s more until the processes notice, and 10 s with the next driver."""
    world = _World(1, 0.0)
    world.start("a")
    world.train(10.0)
    world.report("a")
    world.kill(8.0)
    world.begin_driver()
    world.start("a")
    world.train(10.0)
    world.finish()
    account, counted = _figures(world)
    assert world.trainings["a"].position == 5.0 + 4.0 + 5.0
    assert (account.phases[NodePhase.TRAINING], counted) == (20.0, 10.0)


def test_steps_that_are_lost_do_not_count_with_any_driver():
    """Of 20 s with the first driver, the checkpoint has 10; the next driver trains for 10."""
    world = _World(2, 0.0)
    world.start("a")
    world.train(10.0)
    world.save("a")
    world.train(10.0)
    world.report("a")
    world.kill(1.0)  # too short for a checkpoint
    world.begin_driver()
    world.start("a")
    world.train(10.0)
    world.finish()
    account, counted = _figures(world)
    assert (account.phases[NodePhase.TRAINING], account.slots_per_node, counted) == (30.0, 2.0, 2 * (5.0 + 5.0))


def test_a_driver_that_learns_late_of_a_group_does_not_count_more_steps_than_training():
    """As after it was suspended: its nodes count as between training jobs until then."""
    counted = CountedSteps()
    counted.take(record.FragmentStarted("a", 1, ["n1"], in_place=False, paused=0.0))
    counted.take_progress({"a": {"slot_seconds": 90.0}})
    assert counted.total(slot_seconds=60.0) == 60.0
    assert counted.total(slot_seconds=100.0) == 90.0
    counted.end_driver(60.0)
    assert counted.total() == 60.0
