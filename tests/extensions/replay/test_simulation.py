"""Replays, against an independent recount and results computed by hand."""

from __future__ import annotations

import itertools
import logging
import math
import random
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetrain_parsl.errors import InvalidSettings
from freetrain_parsl.extensions.replay.ideal import BestRates, ideal_value
from freetrain_parsl.extensions.replay.simulation import Cost, Curves, Knowledge, Outcome, ReplaySettings, replay
from freetrain_parsl.planning.curves.scaling import ScalingCurve
from freetrain_parsl.planning.model import Allocation, CostsInSeconds, Decision, PlannedJob, Pool
from freetrain_parsl.planning.objectives.base import OBJECTIVES, Objective
from freetrain_parsl.planning.policies import POLICIES, EqualSharePolicy, MilpPolicy, Policy
from tests.extensions.replay.small_logs import SmallLog, random_logs, random_trainers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

LINEAR = ScalingCurve({1: 10.0, 10: 100.0})


def trainer(
    name: str = "t", least: int = 1, most: int = 10, costs: tuple[float, float, float] = (0, 0, 0), **more: float
) -> PlannedJob:
    return PlannedJob(name, least, most, LINEAR, CostsInSeconds(*costs), **more)


def best_rates(*trainers: PlannedJob, objective: str = "throughput") -> BestRates:
    return BestRates(trainers, OBJECTIVES[objective])


class Arbitrary(Policy):
    """Allocates nodes at random, differently at each instant, and moves trainers; reproducible."""

    name = "arbitrary"

    def allocate(self, pool: Pool, trainers: Sequence[PlannedJob], current: Allocation, now: float) -> Decision:
        rng = random.Random(f"{now} {list(pool)} {[t.name for t in trainers]}")
        free = list(pool)
        rng.shuffle(free)
        allocation = {}
        for item in rng.sample(list(trainers), len(trainers)):
            count = rng.choice([0, *range(item.min_nodes, item.max_nodes + 1)])
            if 0 < count <= len(free):
                allocation[item.name] = frozenset(free.pop() for _ in range(count))
        return Decision(allocation, 0.0, proven_optimal=False, bound=math.inf)


@dataclass
class Spy(Policy):
    """Calls another policy and records its arguments and decisions."""

    asked: Policy
    times: list[float] = field(default_factory=list)
    pools: list[Pool] = field(default_factory=list)
    trainers: list[tuple[PlannedJob, ...]] = field(default_factory=list)
    answers: list[Allocation] = field(default_factory=list)
    name = "spy"

    def allocate(self, pool: Pool, trainers: Sequence[PlannedJob], current: Allocation, now: float) -> Decision:
        decision = self.asked.allocate(pool, trainers, current, now)
        self.times.append(now)
        self.pools.append(pool)
        self.trainers.append(tuple(trainers))
        self.answers.append(decision.allocation)
        return decision


@dataclass
class Recount:
    """The expected result of a replay, from the holes and the decisions alone.

    It steps through the instants between which nothing changes, and looks up everything at each of them.
    """

    log: SmallLog
    trainers: Sequence[PlannedJob]
    objective: Objective
    spy: Spy
    how: ReplaySettings
    value: float = 0.0
    rescale: float = 0.0
    preemption: float = 0.0
    start: float = 0.0
    unused: float = 0.0
    idle_seconds: float = 0.0
    used_seconds: float = 0.0
    finished: dict[str, float] = field(default_factory=dict)
    started: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.samples = {t.name: 0.0 for t in self.trainers}
        self.holds: dict[str, set[str]] = {t.name: set() for t in self.trainers}
        self.queue = sorted(self.trainers, key=lambda t: t.submitted)
        self.alive: list[PlannedJob] = []
        self.decided = dict(zip(self.spy.times, self.spy.answers, strict=True))
        asked = dict(zip(self.spy.times, self.spy.trainers, strict=True))
        log = self.log
        edges = [time for hole in log.holes for time in (hole.start, hole.end)]
        submits = [log.start + t.submitted for t in self.trainers]
        marks = sorted({log.start, *(t for t in (*edges, *submits, *self.decided) if log.start <= t < log.end)})
        for now, then in itertools.pairwise([*marks, log.end]):
            self.come_and_go(now)
            if now in asked:
                assert {t.name for t in asked[now]} == {t.name for t in self.alive}
            for item in self.alive:
                self.change(item, now)
            self.run(now, then)
        self.come_and_go(log.end)

    def come_and_go(self, now: float) -> None:
        for item in list(self.alive):
            left = item.work_left - self.samples[item.name]
            assert left >= -1e-6, f"{item.name} continued after its work was done"
            if left <= 1e-6:
                self.finished[item.name] = now
                self.holds[item.name] = set()
                self.alive.remove(item)
        while self.queue and self.log.start + self.queue[0].submitted <= now and self.room():
            self.alive.append(self.queue.pop(0))

    def room(self) -> bool:
        return self.how.concurrent is None or len(self.alive) < self.how.concurrent

    def change(self, item: PlannedJob, now: float) -> None:
        before = self.holds[item.name]
        lost = before & {hole.node for hole in self.log.holes if hole.end == now}
        if lost:
            self.preemption += self.charge(item, item.costs.down, len(before))
        kept = before - lost
        new = set(self.decided[now].get(item.name, ())) if now in self.decided else kept
        if kept and new != kept:
            self.rescale += self.charge(item, item.costs.up if new - kept else item.costs.down, len(kept))
        elif new and not kept:
            full = self.how.cost is Cost.FULL
            self.start += self.charge(item, (item.costs.start or self.how.start_seconds) if full else 0.0, len(new))
            self.started.setdefault(item.name, now)
        self.holds[item.name] = new

    def run(self, now: float, then: float) -> None:
        idle = {hole.node for hole in self.log.holes if hole.start <= now < hole.end}
        assert set().union(*self.holds.values()) <= idle
        for item in self.alive:
            self.value += (then - now) * self.worth(item, len(self.holds[item.name]))
            self.samples[item.name] += (then - now) * self.rate(item, len(self.holds[item.name]))
        used = sum(map(len, self.holds.values()))
        self.idle_seconds += len(idle) * (then - now)
        self.used_seconds += used * (then - now)
        self.unused += (self.best(len(idle)) - self.best(used)) * (then - now)

    def charge(self, item: PlannedJob, seconds: float, nodes: int) -> float:
        self.samples[item.name] -= seconds * self.rate(item, nodes)
        self.value -= seconds * self.worth(item, nodes)
        return seconds * self.worth(item, nodes)

    def rate(self, item: PlannedJob, nodes: int) -> float:
        return item.rate(nodes) if nodes >= item.min_nodes else 0.0

    def worth(self, item: PlannedJob, nodes: int) -> float:
        return self.objective(item, nodes) if nodes >= item.min_nodes else 0.0

    def best(self, nodes: int) -> float:
        choices = [[0, *range(t.min_nodes, min(t.max_nodes, nodes) + 1)] for t in self.alive]
        fitting = (counts for counts in itertools.product(*choices) if sum(counts) <= nodes)
        return max(sum(self.worth(t, n) for t, n in zip(self.alive, counts, strict=True)) for counts in fitting)


def agree(outcome: Outcome, expected: Recount) -> None:
    losses = outcome.losses
    assert outcome.value == pytest.approx(expected.value, abs=1e-6)
    assert losses.rescale == pytest.approx(expected.rescale, abs=1e-6)
    assert losses.preemption == pytest.approx(expected.preemption, abs=1e-6)
    assert losses.start == pytest.approx(expected.start, abs=1e-6)
    assert outcome.unused == pytest.approx(expected.unused, abs=1e-6)
    assert outcome.idle_seconds == pytest.approx(expected.idle_seconds)
    assert outcome.used_seconds == pytest.approx(expected.used_seconds)
    accounts = {account.trainer.name: account for account in outcome.accounts}
    assert {name: account.samples for name, account in accounts.items()} == pytest.approx(expected.samples, abs=1e-5)
    assert {n: a.finished for n, a in accounts.items() if a.finished is not None} == pytest.approx(expected.finished)
    assert {n: a.started for n, a in accounts.items() if a.started is not None} == expected.started


MAKERS: dict[str, Callable[[], Policy]] = {
    **POLICIES,
    "arbitrary": Arbitrary,
    "milp with a short horizon": lambda: MilpPolicy("throughput", horizon=timedelta(seconds=3)),
}
QUICK = ("arbitrary", "milp", "equal-share")  # the other policies decide in the same replay


@pytest.mark.parametrize(
    "maker", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in MAKERS]
)
@settings(max_examples=60, deadline=None)
@given(
    log=random_logs(),
    trainers=random_trainers(),
    objective=st.sampled_from(("priority", "speedup", "throughput")),
    how=st.builds(
        ReplaySettings,
        knowledge=st.sampled_from(Knowledge),
        cost=st.sampled_from(Cost),
        curves=st.sampled_from(Curves),
        start_seconds=st.sampled_from([0.0, 2.0]),
        concurrent=st.sampled_from([None, 1, 2]),
    ),
)
def test_a_replay_counts_what_its_decisions_make(
    maker: str, log: SmallLog, trainers: tuple[PlannedJob, ...], objective: str, how: ReplaySettings
) -> None:
    """The result agrees with a recount, the bins agree with the totals, and each instant has one decision."""
    spy = Spy(MAKERS[maker]())
    rates = best_rates(*trainers, objective=objective)
    outcome = replay(log, rates, spy, how)
    assert outcome.refused == 0
    assert spy.times == sorted(set(spy.times))
    assert len(outcome.decisions) == len(spy.times)
    agree(outcome, Recount(log, trainers, OBJECTIVES[objective], spy, how))
    assert outcome.bins.sums("value").sum() == pytest.approx(outcome.value, abs=1e-6)
    assert outcome.bins.sums("idle").sum() == pytest.approx(outcome.idle_seconds)
    for account in outcome.accounts:
        assert outcome.trainer_bins.sums(account.trainer.name).sum() == pytest.approx(account.node_seconds)
    if all(math.isinf(t.work_left) for t in trainers):
        ideal = ideal_value(rates, log, concurrent=how.concurrent)
        assert outcome.value <= ideal + 1e-6


@settings(max_examples=20, deadline=None)
@given(log=random_logs(), trainers=random_trainers())
def test_the_same_replay_gives_the_same_counts(log: SmallLog, trainers: tuple[PlannedJob, ...]) -> None:
    first, second = (replay(log, best_rates(*trainers), MilpPolicy("throughput")) for _ in range(2))
    assert (first.value, first.losses, first.unused, first.events) == (
        second.value,
        second.losses,
        second.unused,
        second.events,
    )
    assert first.accounts == second.accounts


# Results computed by hand.

OPEN = SmallLog([("a", 0, 100), ("b", 0, 100)])


def test_costs_by_hand() -> None:
    """A trainer starts on a, grows to b (up at rate 10), loses a (down at rate 20), and continues."""
    log = SmallLog([("a", 0, 30), ("b", 10, 50)])
    one = trainer(costs=(2, 1, 4))
    paper = replay(log, best_rates(one), EqualSharePolicy())
    assert (paper.losses.rescale, paper.losses.preemption, paper.losses.start) == (20, 20, 0)
    assert paper.value == 10 * 10 + 20 * 20 + 20 * 10 - 40
    full = replay(log, best_rates(one), EqualSharePolicy(), ReplaySettings(cost=Cost.FULL))
    assert full.losses.start == 40
    assert full.value == paper.value - 40
    (account,) = paper.accounts
    assert (account.rescales, account.preemptions, account.node_seconds) == (1, 1, 70)


@pytest.mark.parametrize(("own", "assumed", "charged"), [(0.0, 5.0, 100.0), (3.0, 5.0, 60.0), (0.0, 0.0, 0.0)])
def test_full_cost_charges_a_start_at_the_rate_that_follows(own: float, assumed: float, charged: float) -> None:
    """The trainer's own cost takes precedence over the common assumption."""
    how = ReplaySettings(cost=Cost.FULL, start_seconds=assumed)
    outcome = replay(OPEN, best_rates(trainer(costs=(0, 0, own))), EqualSharePolicy(), how)
    assert outcome.losses.start == charged
    assert outcome.value == 2000 - charged


def test_a_preempted_trainer_pays_once_for_all_nodes_lost_at_an_instant() -> None:
    log = SmallLog([("a", 0, 50), ("b", 0, 50), ("c", 0, 100)])
    outcome = replay(log, best_rates(trainer(costs=(0, 3, 0))), EqualSharePolicy())
    assert outcome.losses.preemption == 3 * 30
    assert outcome.losses.rescale == 0


def test_a_trainer_ends_when_its_work_is_done_and_the_next_has_its_nodes_from_then() -> None:
    first, second = trainer("first", work_left=300.0), trainer("second", submitted=1.0, work_left=400.0)
    outcome = replay(OPEN, best_rates(first, second), EqualSharePolicy(), ReplaySettings(concurrent=1))
    assert [(account.started, account.finished) for account in outcome.accounts] == [(0, 15), (15, 35)]
    assert [account.samples for account in outcome.accounts] == pytest.approx([300, 400])
    assert outcome.used_seconds == 70
    assert outcome.unused == 0  # no trainer could use the rest


def test_who_is_done_as_its_nodes_are_taken_has_lost_nothing() -> None:
    log = SmallLog([("a", 0, 30), ("a", 40, 100)])
    outcome = replay(log, best_rates(trainer(costs=(0, 5, 0), work_left=300.0)), EqualSharePolicy())
    assert outcome.accounts[0].finished == 30
    assert outcome.losses.preemption == 0


def test_who_is_done_as_the_log_ends_is_done() -> None:
    outcome = replay(OPEN, best_rates(trainer(work_left=2000.0)), EqualSharePolicy())
    assert outcome.accounts[0].finished == 100


@pytest.mark.parametrize("epoch", [0.0, 1.7e9, 1e12])
@pytest.mark.parametrize("work", [1 / 3, 7.1, 612.3])
def test_trainers_end_whatever_the_clock_counts_from(epoch: float, work: float) -> None:
    """With times as large as Unix time, the remaining time can be less than the resolution of the clock."""
    log = SmallLog([("a", epoch, epoch + 200), ("b", epoch, epoch + 200)])
    trainers = [trainer(f"t{index}", work_left=work * (index + 1)) for index in range(3)]
    outcome = replay(log, best_rates(*trainers), MilpPolicy("throughput"))
    for account, item in zip(outcome.accounts, trainers, strict=True):
        assert account.finished is not None
        assert account.samples == pytest.approx(item.work_left, abs=20 * 1e-15 * epoch + 1e-6)


def test_submissions_wait_for_their_time_and_their_turn() -> None:
    """At most two at a time, first come, first served; each change of the trainers is one event."""
    trainers = [trainer(f"t{i}", most=1, work_left=100.0 * (i + 1), submitted=s) for i, s in enumerate([0, 2, 1, 50])]
    spy = Spy(EqualSharePolicy())
    outcome = replay(OPEN, best_rates(*trainers), spy, ReplaySettings(concurrent=2))
    assert [account.started for account in outcome.accounts] == [0, 10, 1, 50]
    assert [account.finished for account in outcome.accounts] == [10, 30, 31, 90]
    assert spy.times == [0, 1, 10, 30, 31, 50, 90]
    assert outcome.events == 7
    assert max(map(len, spy.trainers)) == 2


def test_a_trainer_is_told_to_the_planner_on_the_logs_clock() -> None:
    log = SmallLog([("a", 1000, 1100)])
    spy = Spy(EqualSharePolicy())
    item = trainer(costs=(1, 2, 3), submitted=5.0, deadline=60.0, work_left=1e6)
    replay(log, best_rates(item), spy)
    told = spy.trainers[-1][0]
    assert (told.submitted, told.deadline, told.costs) == (1005, 1060, CostsInSeconds(1, 2, 0))
    replay(log, best_rates(item), spy, ReplaySettings(cost=Cost.FULL))
    assert spy.trainers[-1][0].costs.start == 3


CLOSING = SmallLog([("a", 0, 30), ("b", 10, 40), ("a", 35, 50)], forecasts={0: {"a": 20}, 10: {"a": None, "b": 90}})


@pytest.mark.parametrize(
    ("knowledge", "told"),
    [
        (Knowledge.NONE, [{"a": None}, {"a": None, "b": None}, {"b": None}, {"a": None, "b": None}, {"a": None}]),
        (Knowledge.PERFECT, [{"a": 30}, {"a": 30, "b": 40}, {"b": 40}, {"a": 50, "b": 40}, {"a": 50}]),
        (Knowledge.ESTIMATED, [{"a": None}, {"a": None, "b": None}, {"b": None}, {"a": None, "b": None}, {"a": None}]),
    ],
)
def test_the_planner_is_told_what_it_may_know(knowledge: Knowledge, told: list[dict[str, float | None]]) -> None:
    spy = Spy(EqualSharePolicy())
    replay(CLOSING, best_rates(trainer()), spy, ReplaySettings(knowledge=knowledge))
    assert [{name: node.closes for name, node in pool.items()} for pool in spy.pools] == told


def test_forecasts_that_change_are_no_event_and_no_reason_to_decide() -> None:
    log = SmallLog([("a", 0, 100)], forecasts={0: {"a": 90}, 20: {"a": 90}, 40: {"a": 70}})
    spy = Spy(EqualSharePolicy())
    outcome = replay(log, best_rates(trainer()), spy, ReplaySettings(knowledge=Knowledge.ESTIMATED))
    assert spy.times == [0]
    assert outcome.events == 1  # nodes came


def test_what_forecasts_are_worth_is_learned() -> None:
    """Nodes with a planned job close after 10 s here, the others after 100 s: the same is then expected."""
    starts = range(0, 20_000, 200)
    holes = [("soon", start, start + 10) for start in starts] + [("late", start, start + 100) for start in starts]
    forecasts = {start: {"soon": start + 150.0, "late": None} for start in starts}
    spy = Spy(EqualSharePolicy())
    replay(SmallLog(holes, forecasts=forecasts), best_rates(trainer()), spy, ReplaySettings(Knowledge.ESTIMATED))
    last = [pool for pool in spy.pools if len(pool) == 2][-1]
    assert last["soon"].lasts_until < last["late"].lasts_until - 50


def test_forecasts_of_a_log_that_has_none_are_refused() -> None:
    with pytest.raises(InvalidSettings, match="closing times cannot be estimated"):
        replay(OPEN, best_rates(trainer()), EqualSharePolicy(), ReplaySettings(knowledge=Knowledge.ESTIMATED))


class Faulty(EqualSharePolicy):
    """From 10 s on it gives all nodes to every trainer, from 20 s on it raises, from 30 s on it works again."""

    name = "faulty"

    def allocate(self, pool: Pool, trainers: Sequence[PlannedJob], current: Allocation, now: float) -> Decision:
        if 10 <= now < 20:
            return Decision({t.name: frozenset(pool) for t in trainers}, 0.0, proven_optimal=False, bound=0.0)
        if 20 <= now < 30:
            raise ZeroDivisionError
        return super().allocate(pool, trainers, current, now)


def test_a_policy_that_fails_is_refused_by_name_and_the_last_good_allocation_stays(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Except for nodes that have closed."""
    log = SmallLog([("a", 0, 25), ("b", 0, 50), ("c", 10, 50), ("d", 30, 50)])
    with caplog.at_level(logging.ERROR):
        outcome = replay(log, best_rates(trainer("t"), trainer("u")), Faulty())
    assert outcome.refused == 2
    assert "'faulty'" in caplog.text
    assert outcome.used_seconds == 25 * 2 + 5 * 1 + 20 * 3
    assert len(outcome.decisions) == outcome.events - outcome.refused == 2


@pytest.mark.parametrize("wrong", [{"start_seconds": -1.0}, {"start_seconds": math.nan}, {"concurrent": 0}])
def test_settings_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InvalidSettings):
        ReplaySettings(**wrong)  # type: ignore[arg-type]


def test_progress_is_told_on_the_logs_clock() -> None:
    seen: list[float] = []
    replay(CLOSING, best_rates(trainer()), EqualSharePolicy(), on_progress=seen.append)
    assert seen[0] == CLOSING.start
    assert seen == sorted(seen)


@pytest.mark.slow
def test_learned_curves_come_close_to_known_ones() -> None:
    """Many nodes open and close; after the first sizes are tried, decisions equal those with the true curves."""
    rng = random.Random(5)
    holes = [
        (f"n{node:02}", start, start + rng.uniform(200, 500))
        for node in range(12)
        for start in (600.0 * i + rng.uniform(0, 100) for i in range(40))
    ]
    log = SmallLog(holes)
    curves = [{1: 10.0, 2: 19.0, 4: 34.0, 8: 52.0, 12: 56.0}, {1: 10.0, 2: 14.0, 4: 16.0, 12: 17.0}]
    trainers = [
        PlannedJob(f"t{i}", 1, 12, ScalingCurve(curves[i % 2]), CostsInSeconds(5, 3), submitted=float(i))
        for i in range(3)
    ]
    known, learned, default = (
        replay(log, best_rates(*trainers), MilpPolicy("throughput"), ReplaySettings(curves=curves_known))
        for curves_known in Curves
    )
    assert learned.value >= 0.98 * known.value
    assert learned.value > default.value
