"""The planner: time-stamped events in, actions out, nothing else. Its blocks: test_planner_blocks.py."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from freetrain_parsl.errors import InvalidApp, InvalidSettings
from freetrain_parsl.planning import events as ev
from freetrain_parsl.planning.curves.scaling import ScalingCurve
from freetrain_parsl.planning.model import Allocation, CostsInSeconds, Decision, PlannedJob, Pool, PoolNode
from freetrain_parsl.planning.objectives.base import MaxMin
from freetrain_parsl.planning.planner import Planner
from freetrain_parsl.planning.policies.base import Policy
from freetrain_parsl.planning.policies.milp import MilpPolicy
from freetrain_parsl.planning.settings import PlannerSettings
from tests.planning.small_events import DEFAULTS, SETTINGS, held, joined, only, trainer, window

if TYPE_CHECKING:
    from collections.abc import Sequence


def test_ready_nodes_are_assigned_and_all_trainers_get_some(planner: Planner) -> None:
    planner.advance(ev.TrainerSubmitted(0, trainer("t", most=8)), ev.TrainerSubmitted(0, trainer("u", most=8)))
    held(planner, *"abcd")
    assert sum(map(len, planner.assigned.values())) == 4
    assert not planner.assigned["t"] & planner.assigned["u"]


def test_nodes_that_leave_shrink_or_stop_their_trainers(planner: Planner) -> None:
    planner.advance(ev.TrainerSubmitted(0, trainer("t", most=3)))
    held(planner, "a", "b", "c")
    actions = planner.advance(ev.WindowsSeen(1, ()), ev.NodesLeft(1, ("b",)))
    assert only(ev.Reassign, actions) == [ev.Shrink("t", frozenset("ac"))]
    actions = planner.advance(ev.NodesLeft(2, ("a", "c")))
    assert only(ev.Reassign, actions) == [ev.Stop("t", frozenset())]


def test_a_block_that_ends_takes_its_nodes_with_it(planner: Planner) -> None:
    planner.advance(ev.TrainerSubmitted(0, trainer("t")))
    block = held(planner, "a", "b")
    actions = planner.advance(ev.WindowsSeen(1, ()), ev.BlockEnded(1, block))
    assert only(ev.Reassign, actions) == [ev.Stop("t", frozenset())]


def test_a_node_is_vacated_its_margin_before_it_closes(planner: Planner) -> None:
    planner.advance(ev.TrainerSubmitted(0, trainer("t")))
    held(planner, "a", closes=100.0)
    assert planner.wake_at(50) == 95
    assert planner.advance(ev.WindowsSeen(50, ()), ev.Tick(94)) == []
    assert only(ev.Reassign, planner.advance(ev.Tick(95))) == [ev.Stop("t", frozenset())]


def test_a_notice_brings_the_closing_forward(planner: Planner) -> None:
    planner.advance(ev.TrainerSubmitted(0, trainer("t", most=2)))
    held(planner, "a", "b")
    actions = planner.advance(ev.NodesClosing(10, ("a",), 12))
    assert only(ev.Reassign, actions) == [ev.Shrink("t", frozenset("b"))]


def test_a_notice_never_puts_the_closing_off(planner: Planner) -> None:
    planner.advance(ev.TrainerSubmitted(0, trainer("t", most=1)))
    held(planner, "a", closes=100.0)
    planner.advance(ev.NodesClosing(10, ("a",), 900))
    assert planner.wake_at(10) == 95


def test_what_is_given_up_comes_before_what_is_taken(planner: Planner) -> None:
    planner.advance(ev.TrainerSubmitted(0, trainer("a", most=4)))
    held(planner, *"wxyz")
    actions = only(ev.Reassign, planner.advance(ev.TrainerSubmitted(1, trainer("b", most=4))))
    kinds = [isinstance(action, (ev.Grow, ev.Assign)) for action in actions]
    assert kinds == sorted(kinds)
    assert len(kinds) == 2


def test_a_finished_trainer_frees_its_nodes_for_the_others(planner: Planner) -> None:
    planner.advance(ev.TrainerSubmitted(0, trainer("t", most=4)), ev.TrainerSubmitted(0, trainer("u", most=4)))
    held(planner, *"abcd")
    actions = planner.advance(ev.TrainerFinished(10, "t"))
    assert only(ev.Reassign, actions) == [ev.Grow("u", frozenset("abcd"))]


def test_trainers_grow_once_for_all_nodes_of_a_block_that_is_joining(planner: Planner) -> None:
    planner.advance(ev.TrainerSubmitted(0, trainer("t", most=4)))
    (request,) = planner.advance(ev.WindowsSeen(0, (window(*"abcd"),)))
    planner.advance(ev.BlockStarted(0, request.block, request.nodes, 500))
    assert planner.advance(joined(10, request.block, "a")) == [ev.Assign("t", frozenset("a"))]
    assert planner.advance(joined(10.5, request.block, "b")) == []
    assert planner.advance(joined(11, request.block, "c", "d")) == [ev.Grow("t", frozenset("abcd"))]


def test_growth_waits_for_stragglers_only_so_long(planner: Planner) -> None:
    planner.advance(ev.TrainerSubmitted(0, trainer("t", most=4)))
    (request,) = planner.advance(ev.WindowsSeen(0, (window(*"abcd"),)))
    planner.advance(ev.BlockStarted(0, request.block, request.nodes, 500))
    planner.advance(joined(10, request.block, "a"))
    planner.advance(joined(10.5, request.block, "b"))
    assert planner.wake_at(10.5) == 12
    assert planner.advance(ev.Tick(12)) == [ev.Grow("t", frozenset("ab"))]


def test_a_node_that_comes_back_in_time_is_used_again(planner: Planner) -> None:
    planner.advance(ev.TrainerSubmitted(0, trainer("t", most=1)))
    block = held(planner, "a")
    planner.advance(ev.NodesLeft(1, ("a",)))
    assert planner.advance(joined(20, block, "a")) == [ev.Assign("t", frozenset("a"))]
    assert planner.advance(ev.Tick(100)) == []


def test_without_events_it_decides_again_after_its_interval() -> None:
    planner = Planner(MilpPolicy(), replace(DEFAULTS, startup=10, min_useful=20, closing_margin=5, replan_interval=30))
    planner.advance(ev.TrainerSubmitted(0, trainer("t")))
    held(planner, "a")
    solves = len(planner.statistics.solve_seconds)
    planner.advance(ev.Tick(29))
    assert len(planner.statistics.solve_seconds) == solves
    assert planner.wake_at(29) == 30
    planner.advance(ev.Tick(30))
    assert len(planner.statistics.solve_seconds) > solves


def test_a_second_trainer_of_the_same_name_is_refused(planner: Planner) -> None:
    planner.advance(ev.TrainerSubmitted(0, trainer("t")))
    with pytest.raises(InvalidApp, match="already named"):
        planner.advance(ev.TrainerSubmitted(1, trainer("t")))


class _Greedy(Policy):
    """Gives every trainer the whole pool: never feasible with two trainers."""

    name = "greedy"

    def allocate(self, pool, trainers, current, now):
        everything = {t.name: frozenset(pool) for t in trainers}
        return Decision(everything, objective=1.0, proven_optimal=False, bound=math.inf)


def test_a_policy_that_breaks_its_contract_is_refused_and_the_last_allocation_stays(
    caplog: pytest.LogCaptureFixture,
) -> None:
    planner = Planner(_Greedy(), SETTINGS)
    planner.advance(ev.TrainerSubmitted(0, trainer("t", most=2)))
    held(planner, "a", "b")
    assert planner.assigned == {"t": frozenset("ab")}
    assert planner.advance(ev.TrainerSubmitted(1, trainer("u"))) == []
    assert planner.assigned == {"t": frozenset("ab")}
    assert planner.statistics.refused > 0
    assert "greedy" in caplog.text


def test_a_policy_that_fails_while_a_node_closes_asks_for_nothing() -> None:
    """The last allocation has a node that closes before others could be ready."""
    planner = Planner(_Greedy(), SETTINGS)
    planner.advance(ev.TrainerSubmitted(0, trainer("t", most=1)))
    held(planner, "a", closes=100)
    planner.advance(ev.TrainerSubmitted(1, trainer("u")))
    assert planner.advance(ev.WindowsSeen(88, (window("b"),))) == []
    assert planner.assigned == {"t": frozenset("a")}


def test_ordinary_tasks_are_lent_free_nodes_first(planner: Planner) -> None:
    planner.advance(ev.TrainerSubmitted(0, trainer("t", most=1)), ev.TasksWaiting(0, 1))
    held(planner, "a", "b")
    (used,) = planner.assigned.values()
    (lent,) = {"a", "b"} - used
    assert planner.advance(ev.TasksWaiting(5, 0, frozenset({lent}))) == []
    assert planner.advance(ev.TasksWaiting(6, 0)) == [ev.Lend(frozenset())]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"startup": timedelta(seconds=-1)}, "PlannerSettings: startup must be at least 0 s, got -1 s"),
        ({"settle": 2}, "PlannerSettings: settle must be a timedelta, got 2; in seconds: timedelta(seconds=2)"),
        ({"settle": "2 s"}, "PlannerSettings: settle must be a timedelta, got '2 s'"),
        ({"max_walltime": timedelta(0)}, "PlannerSettings: max_walltime must be at least 1 s, got 0 s"),
        ({"max_pending_blocks": 0}, "PlannerSettings: max_pending_blocks must be a whole number of at least 1, got 0"),
        (
            {"max_nodes_per_block": 2.5},
            "PlannerSettings: max_nodes_per_block must be a whole number of at least 1, got 2.5",
        ),
    ],
)
def test_settings_out_of_range_are_refused_in_one_line(wrong: dict, message: str) -> None:
    with pytest.raises(InvalidSettings) as caught:
        PlannerSettings(**wrong)
    assert str(caught.value) == message


def test_settings_reach_the_planner_in_seconds() -> None:
    settings = PlannerSettings(startup=timedelta(minutes=2), settle=timedelta(milliseconds=500), max_nodes_per_block=3)
    seconds = settings.in_seconds()
    assert (seconds.startup, seconds.settle, seconds.max_nodes_per_block) == (120.0, 0.5, 3)


def test_equal_histories_give_equal_actions() -> None:
    def history(planner: Planner) -> list:
        actions = planner.advance(*(ev.TrainerSubmitted(0, trainer(name)) for name in "tuvw"))
        actions += planner.advance(ev.WindowsSeen(0, (window(*"abcdefgh"),)))
        for block in [a for a in actions if isinstance(a, ev.RequestBlock)]:
            actions += planner.advance(joined(1, block.block, *block.nodes))
        return actions + planner.advance(ev.NodesLeft(9, ("a", "c")))

    assert history(Planner(MilpPolicy(), SETTINGS)) == history(Planner(MilpPolicy(), SETTINGS))


class _Spy(Policy):
    """Calls the optimal policy and records the last arguments."""

    name = "spy"

    def __init__(self, asked: Policy | None = None) -> None:
        self.asked = asked or MilpPolicy()
        self.calls = 0
        self.pool = Pool()
        self.trainers: dict[str, PlannedJob] = {}

    def allocate(self, pool: Pool, trainers: Sequence[PlannedJob], current: Allocation, now: float) -> Decision:
        self.calls += 1
        self.pool, self.trainers = pool, {t.name: t for t in trainers}
        return self.asked.allocate(pool, trainers, current, now)


AT_ONCE = replace(DEFAULTS, closing_margin=0, settle=0, replan_interval=1e6)
"""For a pool without blocks."""


def test_a_forecast_tells_which_nodes_are_likely_to_close_soon() -> None:
    """Due nodes lasted 10 s, those without a planned job 1000 s: new ones are expected to behave likewise."""
    spy = _Spy()
    planner = Planner(spy, AT_ONCE)
    planner.advance(ev.TrainerSubmitted(0, trainer("t")))
    for index in range(50):
        now, due, free = 2000 * index, f"due{index}", f"free{index}"
        planner.advance(joined(now, "b", due, free, closes=None))
        planner.advance(ev.NodesForecast(now, {due: None, free: None, "unknown": 7.0}, frozenset({due})))
        planner.advance(ev.NodesLeft(now + 10, (due,)))
        planner.advance(ev.NodesLeft(now + 1000, (free,)))
    now = 200_000
    planner.advance(
        joined(now, "b", "x", "y", closes=None), ev.NodesForecast(now, {"x": None, "y": None}, frozenset({"x"}))
    )
    assert spy.pool["x"].closing_rate > 10 * spy.pool["y"].closing_rate
    assert spy.pool["x"].lasts_until < now + 100 < spy.pool["y"].lasts_until
    assert spy.pool["x"].closes is None


def test_a_forecast_is_no_reason_to_decide() -> None:
    spy = _Spy()
    planner = Planner(spy, AT_ONCE)
    planner.advance(ev.TrainerSubmitted(0, trainer("t")), joined(0, "b", "x", closes=None))
    before = spy.calls
    assert planner.advance(ev.NodesForecast(1, {"x": 80.0})) == []
    assert spy.calls == before


def test_nodes_of_unknown_closing_come_with_what_is_expected_and_the_others_with_what_is_known() -> None:
    spy = _Spy()
    planner = Planner(spy, AT_ONCE)
    planner.advance(ev.TrainerSubmitted(0, trainer("t")))
    for index in range(50):  # such nodes last for 10 s
        planner.advance(joined(20 * index, "b", f"n{index}", closes=None))
        planner.advance(ev.NodesLeft(20 * index + 10, (f"n{index}",)))
    planner.advance(joined(1000, "b", "known", closes=1500), joined(1000, "b", "unknown", closes=None))
    known, unknown = spy.pool["known"], spy.pool["unknown"]
    assert (known.lasts_until, known.closing_rate) == (1500, 0)
    assert 1000 < unknown.lasts_until < 1100
    assert unknown.closing_rate > 0
    assert spy.pool.horizon == planner.outlook.horizon()


def test_the_horizon_follows_the_mean_cost_of_a_start_of_those_that_are_alive() -> None:
    """The planner is the same live and in a replay, so both follow it."""
    spy = _Spy()
    planner = Planner(spy, AT_ONCE)
    for name, seconds in (("a", 90.0), ("b", 30.0)):
        planner.advance(ev.TrainerSubmitted(0, replace(trainer(name), costs=CostsInSeconds(start=seconds))))
    planner.advance(joined(0, "b", "x", closes=None))
    assert spy.pool.horizon == 6 * 60
    planner.advance(ev.TrainerLearned(1, replace(trainer("a"), costs=CostsInSeconds(start=150.0))))
    planner.advance(joined(2, "b", "y", closes=None))
    assert spy.pool.horizon == 6 * 90
    planner.advance(ev.TrainerFinished(3, "a"))
    assert spy.pool.horizon == 6 * 30


def test_nodes_that_we_give_back_say_nothing_of_how_long_nodes_last() -> None:
    expected = []
    for end in (ev.NodesLeft(1040, ("a",)), ev.Tick(1040)):
        planner = Planner(MilpPolicy(), SETTINGS)
        planner.advance(ev.TrainerSubmitted(0, trainer("t")))
        held(planner, "a", closes=5000)
        planner.advance(ev.WindowsSeen(5, ()), ev.TrainerFinished(1000, "t"))
        planner.advance(end)  # it closes or is released after its idle timeout
        planner.advance(joined(1050, "b", "z", closes=None))
        expected.append(planner.outlook.remaining("z", 1050))
    closed, released = expected
    assert released > closed


def test_without_blocks_windows_and_tasks_only_who_runs_where_is_decided() -> None:
    purposes: list[str] = []
    planner = Planner(MilpPolicy(), AT_ONCE, lambda _time, purpose, _decision: purposes.append(purpose))
    planner.advance(ev.TrainerSubmitted(0, trainer("t")), joined(0, "b", "x"))
    assert purposes == ["assign"]
    planner.advance(ev.WindowsSeen(1, (window("y"),)))
    assert purposes == ["assign", "assign", "demand"]


def test_trainers_know_since_when_they_run_or_wait() -> None:
    """Growing and shrinking do not count; losing all nodes ends a run, even if others follow immediately."""
    spy = _Spy()
    planner = Planner(spy, AT_ONCE)
    sinces = []
    for events in (
        [ev.TrainerSubmitted(5, trainer("t", submitted=3))],
        [joined(10, "b", "x", closes=None)],
        [joined(20, "b", "y", closes=None)],
        [ev.NodesLeft(30, ("x",))],
        [ev.NodesLeft(40, ("y",))],
        [joined(50, "b", "z", closes=None)],
        [ev.NodesLeft(60, ("z",)), joined(60, "b", "x", closes=None)],
    ):
        planner.advance(*events)
        (told,) = planner.trainers
        sinces.append((spy.trainers["t"].since, told.since))
    assert [after for _, after in sinces] == [None, 10, 10, 10, 40, 50, 60]
    assert [before for before, _ in sinces] == [None, None, 10, 10, 40, 40, 60]


def test_service_is_counted_in_node_seconds() -> None:
    """Two nodes for 10 s, none after they left: what is learned meanwhile does not reset it."""
    spy = _Spy()
    planner = Planner(spy, AT_ONCE)
    planner.advance(ev.TrainerSubmitted(0, trainer("t")), joined(1, "b", *"xy", closes=None))
    planner.advance(ev.TrainerLearned(5, trainer("t", most=2)))
    planner.advance(ev.NodesLeft(11, ("x", "y")))
    assert spy.trainers["t"].service == 20
    planner.advance(joined(40, "b", *"x", closes=None))
    assert spy.trainers["t"].service == 20


def test_what_is_learned_of_a_trainer_replaces_what_was_told_but_not_its_past() -> None:
    spy = _Spy()
    planner = Planner(spy, AT_ONCE)
    flat = ScalingCurve({1: 10.0})
    planner.advance(ev.TrainerSubmitted(0, trainer("t", most=4)), ev.TrainerSubmitted(0, trainer("u", most=4)))
    planner.advance(joined(1, "b", *"wxyz", closes=None))
    assert len(planner.assigned["t"]) == 2
    learned = replace(trainer("t", most=3), curve=flat)
    planner.advance(ev.TrainerLearned(2, learned), ev.TrainerLearned(2, trainer("stranger")), ev.NodesLeft(2, ("w",)))
    assert spy.trainers["t"] == replace(learned, since=1, service=2)
    assert set(spy.trainers) == {"t", "u"}
    planner.advance(joined(500, "b", "v", closes=None))
    assert {name: len(nodes) for name, nodes in planner.assigned.items()} == {"t": 1, "u": 3}


@pytest.mark.parametrize("swaps", [False, True])
def test_with_max_min_none_waits_longer_than_the_bound(swaps: bool) -> None:
    """Five trainers on two nodes that stay, or that are both replaced every 20 s."""
    turn, step = 60.0, 20.0
    planner = Planner(MilpPolicy(MaxMin(turn=timedelta(seconds=turn))), replace(AT_ONCE, replan_interval=step))
    names = "pqrst"
    planner.advance(*(ev.TrainerSubmitted(0, trainer(name, most=2)) for name in names))
    nodes: tuple[str, ...] = ()
    waited, longest = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0.0)
    for number in range(100):
        now = number * step
        events: list[ev.Event] = [ev.Tick(now)]
        if swaps or not nodes:
            new = (f"a{number}", f"b{number}")
            events = [ev.NodesLeft(now, nodes), joined(now, "b", *new, closes=None)]
            nodes = new
        planner.advance(*events)
        for name in names:
            waited[name] = 0.0 if name in planner.assigned else waited[name] + step
            longest[name] = max(longest[name], waited[name])
    assert max(longest.values()) <= (len(names) - 2) * (turn + step)
    assert min(longest.values()) > 0


@pytest.mark.parametrize(("leaves", "expected"), [(494.0, True), (495.0, False)])
def test_a_node_that_leaves_at_the_end_of_its_block_s_walltime_is_no_early_closing(
    planner: Planner, leaves: float, expected: bool
) -> None:
    """A closing shortens the expected lives of nodes, and with them the horizon of decisions."""
    planner.advance(ev.TrainerSubmitted(0.0, trainer("t")))
    held(planner, "a", "b")
    planner.outlook.closed(leaves, [])  # the change itself shortens the horizon, too
    before = planner.outlook.horizon()
    planner.advance(ev.NodesLeft(leaves, ("a",)))
    assert (planner.outlook.horizon() < before) is expected


def test_an_event_about_one_node_looks_at_no_other(planner: Planner, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a thousand nodes, each that joined, left or closed cost a loop over all."""
    planner.advance(ev.TrainerSubmitted(0, trainer("t", most=1000)))
    block = held(planner, *(f"n{number}" for number in range(1000)))
    looked_at: list[str] = []
    monkeypatch.setattr(PoolNode, "machine", property(lambda node: looked_at.append(node.name) or node.name))
    planner._take(ev.NodesLeft(1, ("n7",)))
    planner._take(ev.NodesClosing(1, ("n8",), 50))
    planner._take(joined(1, block, "n7"))
    assert set(looked_at) <= {"n7", "n8"}
    planner.wake_at(1)
    looked_at.clear()
    planner._take(ev.TrainerProgressed(2, "t", 5.0))
    planner.wake_at(2)
    assert not looked_at, "the time of the next event is known"


def test_progress_between_decisions_describes_no_trainer_anew(
    planner: Planner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundred training jobs report it two hundred times a second; a decision is made every half minute."""
    planner.advance(ev.TrainerSubmitted(0, trainer("t")))
    held(planner, "a")
    made: list[str] = []
    original = PlannedJob.__post_init__
    monkeypatch.setattr(PlannedJob, "__post_init__", lambda job: made.append(job.name) or original(job))
    for second in range(1, 5):
        assert planner.advance(ev.TrainerProgressed(second, "t", 1000.0 - second)) == []
    assert not made
    (now,) = planner.trainers
    assert (now.work_left, now.service) == (996.0, 4.0)


def test_what_a_trainer_learned_replaces_its_earlier_progress(planner: Planner) -> None:
    planner.advance(ev.TrainerSubmitted(0, trainer("t", work=1000)))
    planner.advance(ev.TrainerProgressed(1, "t", 900), ev.TrainerLearned(1, trainer("t", work=800)))
    assert planner.trainers[0].work_left == 800
    planner.advance(ev.TrainerProgressed(2, "t", 700))
    assert planner.trainers[0].work_left == 700
