"""The journal of a run, turned into a log and replayed, leads to the decisions of the run, event by event.

The run is that of the real control loop on a simulated site. Polls, starts of blocks and the training jobs' speed are
the same in both; everything else is once the executor's and once the replay's.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from random import Random
from typing import TYPE_CHECKING

import pytest

from freetrain_parsl.errors import InvalidInput, InvalidSettings
from freetrain_parsl.extensions.replay import simulation
from freetrain_parsl.extensions.replay.block_site import BlockSettings
from freetrain_parsl.extensions.replay.ideal import BestRates
from freetrain_parsl.extensions.replay.recorded_run import JournalLog, read_run, trainers_of
from freetrain_parsl.extensions.replay.simulation import Cost, ReplaySettings, replay
from freetrain_parsl.planning import events as ev
from freetrain_parsl.planning.model import CostsInSeconds
from freetrain_parsl.planning.objectives.base import resolve_objective
from freetrain_parsl.planning.planner import Planner
from freetrain_parsl.planning.policies import resolve_policy
from freetrain_parsl.planning.settings import PlannerSettings
from tests.executor.driver.simulated_site import POLL, SimulatedSite
from tests.planning.small_events import joined, trainer, window

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from freetrain_parsl.planning.model import PlannedJob

SETTINGS = PlannerSettings(
    startup=timedelta(seconds=10),
    closing_margin=timedelta(seconds=5),
    min_useful=timedelta(seconds=20),
    max_walltime=timedelta(minutes=3),
)
Answers = list[tuple[float, ev.Action]]
Holes = list[tuple[str, float, float]]


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> Answers:
    """Collect the answers of the planner of a replay."""
    answers: Answers = []

    class Watched(Planner):
        def advance(self, *events: ev.Event) -> ev.Actions:
            actions = super().advance(*events)
            answers.extend((self._now, action) for action in actions)
            return actions

    monkeypatch.setattr(simulation, "Planner", Watched)
    return answers


def live(
    directory: Path, holes: Holes, trainers: Sequence[PlannedJob], start_delay: float
) -> tuple[Answers, JournalLog, tuple[PlannedJob, ...]]:
    """Let the control loop run; return its planner's answers, and its journal as a log with training jobs."""
    site = SimulatedSite(directory, holes, trainers, SETTINGS.in_seconds(), start_delay)
    site.run(500.0)
    run = read_run(site.journal_path)
    steps = [step.events for step in run.steps]
    log = JournalLog("run", steps)
    answers = [(step.time, action) for step in run.steps for action in step.actions if step.time < log.end]
    return answers, log, trainers_of(steps, log.start)


def replay_run(log: JournalLog, trainers: tuple[PlannedJob, ...], start_delay: float) -> None:
    blocks = BlockSettings(SETTINGS, timedelta(seconds=start_delay), timedelta(seconds=POLL))
    replay(
        log,
        BestRates(trainers, resolve_objective("throughput")),
        resolve_policy("milp", "throughput"),
        ReplaySettings(cost=Cost.FULL, start_seconds=0.0, blocks=blocks),
    )


def test_a_run_with_a_preemption_and_walltimes_that_end(tmp_path: Path, replayed: Answers) -> None:
    holes = [("a", 0.0, 150.0), ("b", 0.0, 400.0), ("c", 50.0, 1000.0)]
    trainers = [
        replace(trainer("t", most=3, work=30_000.0), costs=CostsInSeconds(2.0, 0.0, 5.0)),
        replace(trainer("u", most=2, work=1000.0, submitted=20.0), costs=CostsInSeconds(1.0, 0.0, 1.0)),
    ]
    answers, log, submitted = live(tmp_path, holes, trainers, start_delay=3.0)
    assert [change.time for change in log.changes()][:4] == [0.0, 50.0, 150.0, 400.0]
    assert submitted == tuple(trainers)
    replay_run(log, submitted, start_delay=3.0)
    assert replayed == answers
    assert {type(action) for _, action in answers} >= {ev.RequestBlock, ev.Assign, ev.Grow, ev.Shrink}


@pytest.mark.parametrize("seed", [0, 1, 3, 4, 5])
def test_random_runs(seed: int, tmp_path: Path, replayed: Answers) -> None:
    random = Random(seed)
    holes: Holes = []
    for node in "abcde"[: random.randint(1, 5)]:
        end = 0
        for _ in range(random.randint(1, 4)):
            start = end + random.randint(bool(end), 150)
            end = start + random.randint(20, 400)
            holes.append((node, float(start), float(end)))
    trainers = [
        replace(
            trainer(f"t{number}", least=random.randint(1, 2), work=float(random.randint(100, 20_000))),
            submitted=float(random.randint(0, 150)),
            costs=CostsInSeconds(random.randint(0, 5), 0.0, random.randint(0, 30)),
        )
        for number in range(random.randint(1, 3))
    ]
    start_delay = random.choice((0.0, 1.0, 20.0))
    answers, log, submitted = live(tmp_path, holes, trainers, start_delay)
    replay_run(log, submitted, start_delay)
    assert replayed == answers
    assert answers


def test_holes_are_what_the_planner_saw() -> None:
    steps = [
        (ev.WindowsSeen(0.0, (window("a", "b"),)),),
        (ev.WindowsSeen(10.0, (window("b"),)), ev.BlockStarted(10.5, "0", ("a",), 500.0)),
        (joined(20.0, "0", "a"),),
        (ev.NodesLeft(30.0, ("a",)), joined(31.0, "0", "a")),
        (ev.WindowsSeen(40.0, ()),),
        (ev.NodesLeft(44.0, ("a",)),),
        (ev.WindowsSeen(50.0, (window("c"),)), ev.BlockEnded(50.0, "0")),
        (ev.TrainerSubmitted(60.0, replace(trainer("t", submitted=58.0), deadline=90.0)), ev.Tick(60.0)),
    ]
    log = JournalLog("run", steps)
    holes = [(hole.node, hole.start, hole.end) for change in log.changes() for hole in change.opened]
    assert holes == [("a", 0.0, 44.0), ("b", 0.0, 40.0), ("c", 50.0, 60.0)]
    assert (log.nodes, log.start, log.end) == (3, 0.0, 60.0)
    (found,) = trainers_of(steps, 50.0)
    assert (found.submitted, found.deadline) == (8.0, 40.0)
    with pytest.raises(InvalidSettings, match="closing times cannot be estimated"):
        log.changes(forecasts=True)


def test_a_run_without_idle_nodes_is_refused() -> None:
    with pytest.raises(InvalidInput, match="no idle nodes"):
        JournalLog("run", [(ev.Tick(0.0),)])
