"""A new planner that is given the events of a journal decides as the live one did, step by step."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetrain_parsl.errors import InvalidInput
from freetrain_parsl.executor.driver.recorded_planner import RecordedPlanner
from freetrain_parsl.executor.journal import Journal
from freetrain_parsl.extensions.replay.recorded_run import decide_again, read_run
from freetrain_parsl.planning import events as ev
from freetrain_parsl.planning.curves.scaling import ScalingCurve
from freetrain_parsl.planning.model import (
    BlockTerms,
    CostsInSeconds,
    Decision,
    PlannedJob,
    PoolNode,
    Window,
    WindowKind,
)
from freetrain_parsl.planning.placement import place
from freetrain_parsl.planning.planner import Planner
from freetrain_parsl.planning.policies import Policy, resolve_policy
from freetrain_parsl.protocol import journal as record
from freetrain_parsl.protocol.codec import as_json, restored
from freetrain_parsl.protocol.messages import StartRun
from tests.executor.driver.driver_bench import DriverBench
from tests.planning.small_events import SETTINGS, joined, trainer, window

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from random import Random

NODES = tuple(f"n{number}" for number in range(6))


@contextmanager
def recorded(path: Path, policy: str = "milp") -> Iterator[RecordedPlanner]:
    journal = Journal(path)
    yield RecordedPlanner(resolve_policy(policy), SETTINGS, journal.write, 0.0)
    journal.close()


class _Site:
    """Random but plausible events for a planner, whose requests it takes."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.now = 0.0
        self.requested: dict[str, tuple[str, ...]] = {}
        self.running: dict[str, tuple[str, ...]] = {}
        self.trainers: list[str] = []
        self.count = 0
        self.kinds: tuple[Callable[[], ev.Event], ...] = (
            self.survey, self.survey, self.outdate, self.submit, self.progress, self.progress, self.learn, self.finish,
            self.start, self.start, self.join, self.join, self.join, self.leave, self.warn, self.end, self.tasks,
        )  # fmt: skip

    def events(self) -> list[ev.Event]:
        self.now += self.random.choice((0.0, 0.25, 0.25, 1.0, 7.5, 40.0))
        events = []
        for _ in range(self.random.randint(0, 3)):
            events.append(self.random.choice(self.kinds)())
            self.now += self.random.choice((0.0, 0.1))
        return [*events, self.tasks(often=False)]

    def act(self, actions: ev.Actions) -> None:
        for action in actions:
            if isinstance(action, ev.RequestBlock):
                self.requested[action.block] = action.nodes
            elif isinstance(action, ev.QueueBlock):
                self.requested[action.block] = (self.random.choice(NODES),)  # which the planner does not know yet
            elif isinstance(action, ev.ReleaseBlock):
                self.requested.pop(action.block, None)
                self.running.pop(action.block, None)

    def survey(self) -> ev.Event:
        free = [node for node in NODES if self.random.random() < 0.7]
        half = self.random.randint(0, len(free))
        hides, waits = self.random.random() < 0.1, self.random.random() < 0.8
        terms = BlockTerms(start_delay=self.random.choice((0.0, 5.0)), hides_waiting=hides, may_wait=waits)
        found = [
            Window(tuple(nodes), self.now, closes and self.now + closes, self.random.choice(list(WindowKind)))
            for nodes, closes in ((free[:half], None), (free[half:], self.random.choice((60.0, 300.0, 900.0))))
            if nodes
        ]
        return ev.WindowsSeen(self.now - self.random.random(), tuple(found), terms)

    def outdate(self) -> ev.Event:
        return ev.WindowsOutdated(self.now)

    def submit(self) -> ev.Event:
        self.count += 1
        self.trainers.append(name := f"t{self.count}")
        work = self.random.choice((math.inf, 1000.0, 20_000.0))
        return ev.TrainerSubmitted(
            self.now, trainer(name, least=self.random.randint(1, 2), work=work, submitted=self.now)
        )

    def named(self) -> str:
        return self.random.choice(self.trainers or ["nobody"])

    def progress(self) -> ev.Event:
        return ev.TrainerProgressed(self.now, self.named(), self.random.random() * 10_000)

    def learn(self) -> ev.Event:
        curve = ScalingCurve({1: self.random.random() * 20, 4: self.random.random() * 60})
        costs = CostsInSeconds(self.random.random() * 9, self.random.random() * 9, self.random.random() * 30)
        return ev.TrainerLearned(
            self.now,
            PlannedJob(self.named(), 1, self.random.randint(1, 6), curve, costs, self.random.random() * 10_000),
        )

    def finish(self) -> ev.Event:
        kind = self.random.choice((ev.TrainerFinished, ev.TrainerFailed, ev.TrainerWithheld))
        return kind(self.now, name) if (name := self.taken(self.trainers)) else ev.Tick(self.now)

    def taken(self, names: list[str]) -> str | None:
        return names.pop(self.random.randrange(len(names))) if names else None

    def start(self) -> ev.Event:
        if not self.requested:
            return ev.Tick(self.now)
        name, nodes = self.requested.popitem()
        self.running[name] = nodes
        return ev.BlockStarted(self.now, name, nodes, self.random.choice((None, self.now + 200.0)))

    def some(self) -> tuple[str, tuple[str, ...]]:
        return self.random.choice(list(self.running.items())) if self.running else ("none", NODES[:1])

    def join(self) -> ev.Event:
        block, nodes = self.some()
        closes = self.random.choice((None, self.now + 200.0))
        return ev.NodesJoined(self.now, block, tuple(PoolNode(node, closes) for node in nodes))

    def leave(self) -> ev.Event:
        return ev.NodesLeft(self.now, self.some()[1][:1])

    def warn(self) -> ev.Event:
        return ev.NodesClosing(self.now, self.some()[1], self.now + self.random.choice((4.0, 20.0)))

    def end(self) -> ev.Event:
        block, _ = self.some()
        self.running.pop(block, None)
        return ev.BlockEnded(self.now, block)

    def tasks(self, often: bool = True) -> ev.Event:
        nodes = self.random.randint(0, 2) if often or self.random.random() < 0.1 else 0
        return ev.TasksWaiting(self.now, nodes, frozenset(NODES[:nodes]) if self.random.random() < 0.2 else frozenset())


@pytest.mark.parametrize("policy", ["milp", "equal-share"])
@settings(max_examples=8, deadline=None)
@given(random=st.randoms(use_true_random=False))
def test_the_events_of_a_journal_lead_to_the_same_decisions(
    policy: str, random: Random, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("run") / "journal.sqlite"
    site = _Site(random)
    answers: list[ev.Actions] = []
    with recorded(path, policy) as planner:
        for _ in range(40):
            answers.append(planner.advance(*site.events()))
            site.act(answers[-1])
    run = read_run(path)
    assert list(decide_again(run, resolve_policy(policy))) == list(run.steps)
    assert [list(step.actions) for step in run.steps if step.actions] == [answer for answer in answers if answer]


def test_the_driver_s_journal_leads_to_the_same_decisions(tmp_path: Path) -> None:
    with DriverBench(tmp_path) as bench:
        futures = [bench.train("one"), bench.train("two")]
        slots = [bench.slot(), bench.slot()]
        for step, slot in enumerate(slots, 1):
            slot.get(StartRun)
            slot.progress(step)
        slots[0].die()
        bench.entry("node_left")
        bench.slot().get(StartRun)
        for slot in bench.slots:
            slot.finish("done")
        assert [future.result(60) for future in futures] == ["done", "done"]
    run = read_run(bench.journal_path)
    assert run.policy == "milp"
    assert list(decide_again(run, resolve_policy("milp"))) == list(run.steps)
    journaled = [entry for entry in bench.history() if entry.kind in ("assign", "grow", "shrink", "stop")]
    decided = [action for step in run.steps for action in step.actions if isinstance(action, ev.Reassign)]
    assert [(entry.subject, set(entry.detail["nodes"])) for entry in journaled] == [
        (action.trainer, action.nodes) for action in decided
    ]
    assert {type(event) for step in run.steps for event in step.events} >= {
        ev.WindowsSeen, ev.TrainerSubmitted, ev.NodesJoined, ev.NodesLeft, ev.TrainerFinished,
    }  # fmt: skip


_AGAIN = """
import pathlib, sys
from freetrain_parsl.planning.policies import resolve_policy
from freetrain_parsl.extensions.replay.recorded_run import decide_again, read_run
run = read_run(pathlib.Path(sys.argv[1]))
assert list(decide_again(run, resolve_policy("milp"))) == list(run.steps)
"""


def test_another_process_decides_the_same(tmp_path: Path) -> None:
    """In which sets of names are iterated in another order."""
    path = tmp_path / "journal.sqlite"
    with recorded(path) as planner:
        planner.advance(*(ev.TrainerSubmitted(0.0, trainer(name, most=3)) for name in "abc"))
        (request,) = planner.advance(ev.WindowsSeen(1.0, (window(*NODES),)))
        assert isinstance(request, ev.RequestBlock)
        planner.advance(joined(11.0, request.block, *request.nodes))
        planner.advance(ev.NodesLeft(20.0, ("n3",)))
        planner.advance(ev.TrainerFinished(30.0, "b"))
    for seed in ("1", "2"):
        subprocess.run(
            [sys.executable, "-c", _AGAIN, str(path)], env={**os.environ, "PYTHONHASHSEED": seed}, check=True
        )


class _First(Policy):
    """Gives the first training job all that it can use."""

    name = "first"

    def allocate(self, pool, trainers, current, now):
        counts = {trainer.name: 0 for trainer in trainers} | {trainers[0].name: min(trainers[0].max_nodes, len(pool))}
        return Decision(place(counts, pool, current), 0.0, proven_optimal=False, bound=0.0)


def test_another_policy_decides_otherwise(tmp_path: Path) -> None:
    """Otherwise, equality would prove nothing."""
    path = tmp_path / "journal.sqlite"
    with recorded(path) as planner:
        planner.advance(*(ev.TrainerSubmitted(0.0, trainer(name)) for name in "abc"))
        planner.advance(joined(1.0, "0", *NODES))
    run = read_run(path)
    assert [step.actions for step in decide_again(run, resolve_policy("milp"))] == [step.actions for step in run.steps]
    other = [step.actions for step in decide_again(run, _First())]
    assert other[-1] == (ev.Assign("a", frozenset(NODES[:4])),)
    assert other[-1] != run.steps[-1].actions


def test_what_has_no_effect_is_not_recorded(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    with recorded(path) as planner:
        for second in range(100):
            seen = ev.WindowsSeen(float(second), (window("n0", closes=None),))
            planner.advance(seen, ev.TrainerProgressed(second, "u", 5.0), ev.TasksWaiting(second, 0))
        planner.advance(ev.TrainerSubmitted(100.0, trainer("t")), ev.TasksWaiting(100.0, 0))
    first, last = read_run(path).steps
    assert [type(event) for event in first.events] == [ev.WindowsSeen, ev.TrainerProgressed]
    assert [(type(event), event.time) for event in last.events] == [
        (ev.TrainerSubmitted, 100.0),
        (ev.TrainerProgressed, 100.0),
    ]


EVERYTHING: tuple[ev.Event | ev.Action, ...] = (
    ev.Tick(0.1),
    ev.WindowsSeen(
        1.0,
        (Window(("a", "b"), 0.0, None, WindowKind.PREEMPTIBLE, "debug"),),
        BlockTerms(start_delay=3.0, max_nodes=4, hides_waiting=True),
    ),
    ev.WindowsOutdated(2.0),
    ev.BlockStarted(3.0, "0", ("a",), None),
    ev.BlockEnded(4.0, "0"),
    ev.NodesJoined(5.0, "0", (PoolNode("a", 7.5), PoolNode("b"))),
    ev.NodesLeft(6.0, ("a",)),
    ev.NodesClosing(7.0, ("a", "b"), math.inf),
    ev.NodesForecast(8.0, {"a": None, "b": 9.5}, frozenset("ab")),
    ev.TrainerSubmitted(
        9.0,
        PlannedJob("t", 1, 2, ScalingCurve({1: 0.1, 2: 0.3}), CostsInSeconds(1, 2, 3), 1e9, 2.0, 5.0, 0.5, 0.75),
    ),
    ev.TrainerProgressed(10.0, "t", math.inf),
    ev.TrainerLearned(11.0, PlannedJob("t", 1, 2, ScalingCurve.default())),
    ev.TrainerFinished(12.0, "t"),
    ev.TrainerFailed(13.0, "t"),
    ev.TrainerWithheld(14.0, "t"),
    ev.TrainerHolds(14.5, "t", frozenset({"n0"})),
    ev.TasksWaiting(15.0, 2, frozenset({"a"})),
    ev.RequestBlock("1", ("a",), 60.0, Window(("a",), 0.0, 90.0), pinned=False),
    ev.QueueBlock("2", 60.0, "gpu"),
    ev.ReleaseBlock("1"),
    ev.Assign("t", frozenset("ab")),
    ev.Grow("t", frozenset("abc")),
    ev.Shrink("t", frozenset("a")),
    ev.Stop("t", frozenset()),
    ev.Lend(frozenset("b")),
)


@pytest.mark.parametrize("item", EVERYTHING, ids=lambda item: type(item).__name__)
def test_every_event_and_action_comes_back_as_it_was(item: Any, tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.sqlite")
    journal.write(0.0, record.PlannerStarted("", "milp", vars(SETTINGS)))
    journal.write(1.0, record.PlannerStep("", [], [as_json(item)]))
    journal.close()
    (back,) = read_run(journal.path).steps[0].actions
    assert back == item
    assert restored(as_json(item)) == item


def test_every_kind_is_among_them() -> None:
    def leaves(kind: type) -> set[type]:
        return {kind} if not kind.__subclasses__() else set().union(*map(leaves, kind.__subclasses__()))

    assert {type(item) for item in EVERYTHING} == leaves(ev.Event) | leaves(ev.Action)


def test_the_progress_of_a_step_is_one_item_without_what_newer_events_replaced(tmp_path: Path) -> None:
    with recorded(tmp_path / "journal.sqlite") as planner:
        planner.advance(*(ev.TrainerSubmitted(0.0, trainer(name, work=1000)) for name in "abc"))
        planner.advance(*(ev.TrainerProgressed(1.0, name, 900.0) for name in "abc"))
        planner.advance(
            ev.TrainerProgressed(2.0, "a", 800.0),
            ev.TrainerProgressed(2.0, "b", 800.0),
            ev.TrainerLearned(2.0, trainer("b", work=math.inf, most=3)),
            ev.TrainerLearned(3.0, trainer("c", work=700)),
            ev.TrainerProgressed(3.0, "c", math.inf),
            ev.TrainerProgressed(3.0, "a", 600.0),
        )
        left = {one.name: one.work_left for one in planner.trainers}
    step = read_run(tmp_path / "journal.sqlite").steps[-1]
    progress = [event for event in step.events if isinstance(event, ev.TrainerProgressed)]
    assert {event.trainer: event.work_left for event in progress} == {"a": 600.0, "c": math.inf}
    assert left == {"a": 600.0, "b": math.inf, "c": math.inf}
    again = Planner(resolve_policy("milp"), SETTINGS)
    for one in read_run(tmp_path / "journal.sqlite").steps:
        again.advance(*one.events)
    assert {one.name: one.work_left for one in again.trainers} == left


def test_a_journal_without_a_planner_is_refused(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.sqlite")
    journal.close()
    with pytest.raises(InvalidInput, match="no steps of a planner"):
        read_run(journal.path)
