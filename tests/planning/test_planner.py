"""The planner: time-stamped events in, actions out, nothing else."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest

from freetrain_parsl.errors import InvalidSettings, InvalidTrainer
from freetrain_parsl.planning import events as ev
from freetrain_parsl.planning.model import (
    Allocation,
    BlockTerms,
    Decision,
    Pool,
    PoolNode,
    RescaleCosts,
    Trainer,
    Window,
)
from freetrain_parsl.planning.objectives import MaxMin
from freetrain_parsl.planning.planner import Planner
from freetrain_parsl.planning.policies.base import Policy
from freetrain_parsl.planning.policies.milp import MilpPolicy
from freetrain_parsl.planning.scaling import ScalingCurve
from freetrain_parsl.planning.settings import PlannerSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

SETTINGS = PlannerSettings(
    startup=10,
    min_useful=20,
    closing_margin=5,
    max_walltime=1000,
    idle_timeout=30,
    join_timeout=60,
    replan_interval=1e6,
    settle=2,
    max_pending_blocks=4,
)
# Concave, so that sharing pays: with linear curves any split of the nodes is as good as another.
CURVE = ScalingCurve({1: 10.0, 2: 18.0, 4: 32.0, 8: 50.0, 64: 60.0})


def trainer(name: str, *, least: int = 1, most: int = 4, work: float = math.inf, submitted: float = 0.0) -> Trainer:
    return Trainer(name, least, most, CURVE, RescaleCosts(1, 1, 1), work_left=work, submitted=submitted)


def window(*nodes: str, closes: float | None = 500.0, opens: float = 0.0) -> Window:
    return Window(nodes, opens, closes)


def joined(time: float, block: str, *nodes: str, closes: float | None = 500.0) -> ev.NodesJoined:
    return ev.NodesJoined(time, block, tuple(PoolNode(name, closes) for name in nodes))


@pytest.fixture
def planner() -> Planner:
    return Planner(MilpPolicy(), SETTINGS)


def only(kind: type, actions: ev.Actions) -> list:
    return [action for action in actions if isinstance(action, kind)]


def held(planner: Planner, *nodes: str, closes: float = 500.0, time: float = 0.0) -> str:
    """Bring a block with these nodes through request, start and join; needs a trainer that wants them."""
    (request,) = only(ev.RequestBlock, planner.advance(ev.WindowsSeen(time, (window(*nodes, closes=closes),))))
    planner.advance(ev.BlockStarted(time, request.block, request.nodes, closes))
    planner.advance(joined(time, request.block, *request.nodes, closes=closes))
    return request.block


def test_a_block_is_requested_only_when_a_trainer_wants_nodes(planner: Planner) -> None:
    assert planner.advance(ev.WindowsSeen(0, (window("a", "b"),))) == []
    (request,) = planner.advance(ev.TrainerSubmitted(1, trainer("t")))
    assert request.nodes == ("a", "b")


def test_a_block_ends_with_its_window_at_the_latest(planner: Planner) -> None:
    planner.advance(ev.TrainerSubmitted(0, trainer("t")))
    (request,) = planner.advance(ev.WindowsSeen(100, (window("a", closes=300),)))
    assert 100 + request.seconds <= 300


def test_a_window_of_unknown_closing_gets_the_longest_block(planner: Planner) -> None:
    planner.advance(ev.TrainerSubmitted(0, trainer("t")))
    (request,) = planner.advance(ev.WindowsSeen(0, (window("a", closes=None),)))
    assert request.seconds == SETTINGS.max_walltime


@pytest.mark.parametrize(("closes", "requested"), [(34.9, 0), (35.0, 1)])
def test_a_window_is_used_only_if_it_pays_for_its_own_start(planner: Planner, closes: float, requested: int) -> None:
    """10 s start-up + 20 s useful + 5 s margin."""
    planner.advance(ev.TrainerSubmitted(0, trainer("t")))
    assert len(planner.advance(ev.WindowsSeen(0, (window("a", closes=closes),)))) == requested


def test_a_block_fits_its_window_even_if_it_starts_late_and_in_whole_minutes(planner: Planner) -> None:
    """500 s less 30 s until the start is 470 s: 7 whole minutes."""
    planner.advance(ev.TrainerSubmitted(0, trainer("t")))
    terms = BlockTerms(start_delay=30, walltime_step=60)
    (request,) = planner.advance(ev.WindowsSeen(0, (window("a", closes=500),), terms))
    assert request.seconds == 420


@pytest.mark.parametrize(("closes", "requested"), [(89.9, 0), (90.0, 1)])
def test_a_window_must_pay_for_the_late_start_and_the_rounding_too(
    planner: Planner, closes: float, requested: int
) -> None:
    """35 s are needed after the start: a walltime of one minute, and 30 s until it starts."""
    planner.advance(ev.TrainerSubmitted(0, trainer("t")))
    terms = BlockTerms(start_delay=30, walltime_step=60)
    assert len(planner.advance(ev.WindowsSeen(0, (window("a", closes=closes),), terms))) == requested


def test_blocks_keep_to_the_limits_of_the_site(planner: Planner) -> None:
    planner.advance(ev.TrainerSubmitted(0, trainer("t")))
    terms = BlockTerms(max_walltime=120, min_nodes=2, max_nodes=3)
    requests = planner.advance(ev.WindowsSeen(0, (window(*"abcd", closes=None),), terms))
    assert [(len(request.nodes), request.seconds) for request in requests] == [(3, 120)]


def requested(planner: Planner, *names: str, terms: BlockTerms = BlockTerms()) -> ev.RequestBlock:  # noqa: B008 - frozen
    """Let a trainer that wants nodes see a window of these."""
    planner.advance(ev.TrainerSubmitted(0, trainer("t")))
    (request,) = planner.advance(ev.WindowsSeen(0, (window(*names),), terms))
    return request


def test_a_block_whose_nodes_somebody_else_took_is_withdrawn(planner: Planner) -> None:
    """It is pinned, since other windows close too early, and so waits in vain."""
    planner.advance(ev.TrainerSubmitted(0, trainer("t", most=2)))
    short = window("x", closes=50.0)
    (request,) = planner.advance(ev.WindowsSeen(0, (window("a", "b"), short)))
    assert request.pinned
    assert ev.ReleaseBlock(request.block) in planner.advance(ev.WindowsSeen(5, (window("b", "c"), short)))


def test_a_block_that_may_run_anywhere_waits_while_there_are_enough_nodes(planner: Planner) -> None:
    planner.advance(ev.TrainerSubmitted(0, trainer("t", most=2)))
    (request,) = planner.advance(ev.WindowsSeen(0, (window("a", "b"),)))
    assert not request.pinned
    assert planner.advance(ev.WindowsSeen(5, (window("b", "c"),))) == []
    actions = planner.advance(ev.WindowsSeen(6, (window("c"),)))
    assert ev.ReleaseBlock(request.block) in actions
    (again,) = only(ev.RequestBlock, actions)
    assert again.nodes == ("c",), "what is left is no less welcome for it"


def test_a_block_that_the_batch_system_does_not_start_is_withdrawn(planner: Planner) -> None:
    """After twice the time that a start may take, and the start-up."""
    terms = BlockTerms(start_delay=30)
    request = requested(planner, "a", terms=terms)
    assert planner.advance(ev.WindowsSeen(69, (window("a"),), terms)) == []
    later = (window("a", closes=501),)
    assert ev.ReleaseBlock(request.block) in planner.advance(ev.WindowsSeen(71, later, terms))


def test_after_a_preemption_nothing_is_requested_before_the_next_look(planner: Planner) -> None:
    """Whoever takes our nodes may have taken those that were idle a moment ago, too."""
    planner.advance(ev.TrainerSubmitted(0, trainer("t", most=2)))
    block = held(planner, "a", "b", closes=1000.0)
    planner.advance(ev.WindowsSeen(20, (window("c", "d"),)))
    assert only(ev.RequestBlock, planner.advance(ev.NodesClosing(21, ("a", "b"), 25.0))) == []
    assert only(ev.RequestBlock, planner.advance(ev.NodesLeft(22, ("a", "b")))) == []
    actions = planner.advance(ev.WindowsSeen(23, (window("c", "d"),)), ev.BlockEnded(23, block))
    (request,) = only(ev.RequestBlock, actions)
    assert request.nodes == ("c", "d")


def test_nothing_is_requested_from_windows_that_are_outdated(planner: Planner) -> None:
    """While nobody wanted nodes nobody looked; the first training waits for a look."""
    planner.advance(ev.WindowsSeen(0, (window("a"),)), ev.WindowsOutdated(20))
    assert planner.advance(ev.TrainerSubmitted(30, trainer("t"))) == []
    (request,) = planner.advance(ev.WindowsSeen(31, (window("a"),)))
    assert request.nodes == ("a",)


def test_a_block_that_started_is_not_withdrawn(planner: Planner) -> None:
    request = requested(planner, "a", "b")
    planner.advance(ev.BlockStarted(1, request.block, request.nodes, 500.0))
    actions = planner.advance(ev.WindowsSeen(40, ()))
    assert only(ev.ReleaseBlock, actions) == []


def test_nodes_where_a_block_did_not_start_are_left_alone_ever_longer() -> None:
    """10 s of patience: 20 s of peace after the first time, 40 s after the second, and so on."""
    planner = Planner(MilpPolicy(), SETTINGS)
    planner.advance(ev.TrainerSubmitted(0, trainer("t")))
    requests = [
        float(second)
        for second in range(400)
        # Told every second that the node is free, and never that a block has started.
        if only(ev.RequestBlock, planner.advance(ev.WindowsSeen(second, (window("a", closes=10_000.0 + second),))))
    ]
    assert [later - earlier for earlier, later in pairwise(requests)] == [31, 51, 91, 171]


def test_no_more_nodes_are_requested_than_trainers_can_use(planner: Planner) -> None:
    planner.advance(ev.TrainerSubmitted(0, trainer("t", most=3)))
    (request,) = planner.advance(ev.WindowsSeen(0, (window(*"abcdefgh"),)))
    assert len(request.nodes) == 3


def test_nodes_that_are_free_for_longer_are_no_reason_to_hold_more_than_can_be_used(planner: Planner) -> None:
    """The block on a and b ends with its walltime, c and d are free for ever; the trainer takes two nodes."""
    planner.advance(ev.TrainerSubmitted(0, trainer("t", most=2)))
    (request,) = planner.advance(ev.WindowsSeen(0, (window(*"abcd", closes=None),)))
    free = window(*sorted(set("abcd") - set(request.nodes)), closes=None)
    actions = planner.advance(ev.WindowsSeen(1, (free,)), ev.BlockStarted(1, request.block, request.nodes, 1000.0))
    actions += planner.advance(joined(11, request.block, *request.nodes, closes=1000.0))
    assert only(ev.RequestBlock, actions) == []


def test_nodes_that_close_soon_are_replaced_in_time_for_the_start_up(planner: Planner) -> None:
    """They close at 100; a block requested at 84 would be ready 1 s too early to count, one at 85 in time."""
    planner.advance(ev.TrainerSubmitted(0, trainer("t", most=2)))
    held(planner, "a", "b", closes=100.0)
    assert only(ev.RequestBlock, planner.advance(ev.WindowsSeen(84, (window("c", "d"),)))) == []
    (request,) = only(ev.RequestBlock, planner.advance(ev.WindowsSeen(85, (window("c", "d", closes=501.0),))))
    assert request.nodes == ("c", "d")


def test_the_same_nodes_are_not_requested_twice(planner: Planner) -> None:
    planner.advance(ev.TrainerSubmitted(0, trainer("t")))
    seen = (window("a", "b"),)
    assert len(planner.advance(ev.WindowsSeen(0, seen))) == 1
    assert planner.advance(ev.WindowsSeen(1, (window("a", "b", closes=501),))) == []


def test_blocks_longer_than_their_windows_differ_by_window(planner: Planner) -> None:
    planner.advance(ev.TrainerSubmitted(0, trainer("t")))
    requests = planner.advance(ev.WindowsSeen(0, (window("a", closes=100), window("b", "c", closes=200))))
    assert [(r.nodes, r.seconds) for r in requests] == [(("b", "c"), 200), (("a",), 100)]


def test_blocks_are_split_to_their_largest_size_and_limited_in_number() -> None:
    settings = PlannerSettings(startup=1, min_useful=1, closing_margin=1, max_pending_blocks=3, max_nodes_per_block=2)
    planner = Planner(MilpPolicy(), settings)
    planner.advance(ev.TrainerSubmitted(0, trainer("t", most=16)))
    requests = planner.advance(ev.WindowsSeen(0, (window(*"abcdefghij"),)))
    assert [len(request.nodes) for request in requests] == [2, 2, 2]


def test_ready_nodes_are_assigned_and_all_trainers_get_some(planner: Planner) -> None:
    planner.advance(ev.TrainerSubmitted(0, trainer("t", most=8)), ev.TrainerSubmitted(0, trainer("u", most=8)))
    held(planner, *"abcd")
    assert sum(map(len, planner.assigned.values())) == 4
    assert not planner.assigned["t"] & planner.assigned["u"]


def test_a_refused_block_is_requested_again(planner: Planner) -> None:
    planner.advance(ev.TrainerSubmitted(0, trainer("t")))
    (request,) = planner.advance(ev.WindowsSeen(0, (window("a"),)))
    (again,) = planner.advance(ev.BlockEnded(1, request.block))
    assert again.nodes == request.nodes
    assert again.block != request.block


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


@pytest.mark.parametrize("end", [ev.TrainerFinished, ev.TrainerFailed])
def test_a_block_that_nothing_wants_is_released_after_its_time_out(planner: Planner, end: type) -> None:
    planner.advance(ev.TrainerSubmitted(0, trainer("t")))
    block = held(planner, "a", "b")
    assert planner.advance(end(10, "t")) == []
    assert planner.wake_at(10) == 40
    assert planner.advance(ev.Tick(39)) == []
    assert planner.advance(ev.Tick(40)) == [ev.ReleaseBlock(block)]


def test_a_block_wanted_again_in_time_is_kept(planner: Planner) -> None:
    planner.advance(ev.TrainerSubmitted(0, trainer("t")))
    held(planner, "a")
    planner.advance(ev.TrainerFinished(10, "t"))
    assert only(ev.Assign, planner.advance(ev.TrainerSubmitted(20, trainer("u")))) == [ev.Assign("u", frozenset("a"))]
    assert planner.advance(ev.Tick(100)) == []


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


def test_a_trainer_that_is_nearly_done_neither_grows_nor_asks_for_blocks(planner: Planner) -> None:
    planner.advance(ev.TrainerSubmitted(0, trainer("t", most=4, work=10_000)))
    held(planner, "a")
    # 10 samples/s on one node: 50 samples are 5 s, less than the 10 s in which a block would be ready.
    planner.advance(ev.TrainerProgressed(20, "t", 50.0))
    assert planner.advance(ev.WindowsSeen(21, (window("x", "y"),))) == []


def test_a_node_that_does_not_come_back_is_given_up_and_replaced(planner: Planner) -> None:
    planner.advance(ev.TrainerSubmitted(0, trainer("t", most=1)))
    block = held(planner, "a")
    planner.advance(ev.WindowsSeen(1, (window("x"),)), ev.NodesLeft(1, ("a",)))
    assert planner.wake_at(1) == 61
    assert planner.advance(ev.WindowsSeen(60, (window("x"),))) == []
    released, requested = planner.advance(ev.Tick(61))
    assert released == ev.ReleaseBlock(block)
    assert requested.nodes == ("x",)


def test_a_node_that_comes_back_in_time_is_used_again(planner: Planner) -> None:
    planner.advance(ev.TrainerSubmitted(0, trainer("t", most=1)))
    block = held(planner, "a")
    planner.advance(ev.NodesLeft(1, ("a",)))
    assert planner.advance(joined(20, block, "a")) == [ev.Assign("t", frozenset("a"))]
    assert planner.advance(ev.Tick(100)) == []


def test_without_events_it_decides_again_after_its_interval() -> None:
    planner = Planner(MilpPolicy(), PlannerSettings(startup=10, min_useful=20, closing_margin=5, replan_interval=30))
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
    with pytest.raises(InvalidTrainer, match="alive already"):
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


def test_ordinary_tasks_are_lent_free_nodes_first(planner: Planner) -> None:
    planner.advance(ev.TrainerSubmitted(0, trainer("t", most=1)), ev.TasksWaiting(0, 1))
    held(planner, "a", "b")
    (used,) = planner.assigned.values()
    (lent,) = {"a", "b"} - used
    assert planner.advance(ev.TasksWaiting(5, 0, frozenset({lent}))) == []
    assert planner.advance(ev.TasksWaiting(6, 0)) == [ev.Lend(frozenset())]


def test_waiting_tasks_alone_bring_blocks(planner: Planner) -> None:
    planner.advance(ev.WindowsSeen(0, (window("a", "b", "c"),)))
    (request,) = planner.advance(ev.TasksWaiting(1, 2))
    assert len(request.nodes) == 2


@pytest.mark.parametrize("wrong", [{"startup": -1.0}, {"settle": math.nan}, {"max_pending_blocks": 0}])
def test_settings_out_of_range_are_refused_by_name(wrong: dict) -> None:
    with pytest.raises(InvalidSettings, match=next(iter(wrong))):
        PlannerSettings(**wrong)


def test_equal_histories_give_equal_actions() -> None:
    def history(planner: Planner) -> list:
        actions = planner.advance(*(ev.TrainerSubmitted(0, trainer(name)) for name in "tuvw"))
        actions += planner.advance(ev.WindowsSeen(0, (window(*"abcdefgh"),)))
        for block in [a for a in actions if isinstance(a, ev.RequestBlock)]:
            actions += planner.advance(joined(1, block.block, *block.nodes))
        return actions + planner.advance(ev.NodesLeft(9, ("a", "c")))

    assert history(Planner(MilpPolicy(), SETTINGS)) == history(Planner(MilpPolicy(), SETTINGS))


class _Spy(Policy):
    """Asks the optimal policy and remembers what it was asked last."""

    name = "spy"

    def __init__(self, asked: Policy | None = None) -> None:
        self.asked = asked or MilpPolicy()
        self.calls = 0
        self.pool = Pool()
        self.trainers: dict[str, Trainer] = {}

    def allocate(self, pool: Pool, trainers: Sequence[Trainer], current: Allocation, now: float) -> Decision:
        self.calls += 1
        self.pool, self.trainers = pool, {t.name: t for t in trainers}
        return self.asked.allocate(pool, trainers, current, now)


AT_ONCE = PlannerSettings(closing_margin=0, settle=0, replan_interval=1e6)
"""For a pool that is simply there, without blocks."""


def test_a_forecast_tells_which_nodes_are_likely_to_close_soon() -> None:
    """Nodes that were due lasted 10 s, those that nobody needed 1000 s: new ones are expected to do likewise."""
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
    assert spy.pool.horizon == planner.outlook.horizon


def test_nodes_that_we_give_back_say_nothing_of_how_long_nodes_last() -> None:
    expected = []
    for end in (ev.NodesLeft(1040, ("a",)), ev.Tick(1040)):
        planner = Planner(MilpPolicy(), SETTINGS)
        planner.advance(ev.TrainerSubmitted(0, trainer("t")))
        held(planner, "a", closes=5000)
        planner.advance(ev.WindowsSeen(5, ()), ev.TrainerFinished(1000, "t"))
        planner.advance(end)  # it closes, or it is released after its idle time
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
    """Growing or shrinking is neither; losing all nodes ends a run, even if others come at once."""
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


def test_what_is_learned_of_a_trainer_replaces_what_was_told_but_not_since_when_it_runs() -> None:
    spy = _Spy()
    planner = Planner(spy, AT_ONCE)
    flat = ScalingCurve({1: 10.0})
    planner.advance(ev.TrainerSubmitted(0, trainer("t", most=4)), ev.TrainerSubmitted(0, trainer("u", most=4)))
    planner.advance(joined(1, "b", *"wxyz", closes=None))
    assert len(planner.assigned["t"]) == 2
    learned = replace(trainer("t", most=3), curve=flat)
    planner.advance(ev.TrainerLearned(2, learned), ev.TrainerLearned(2, trainer("stranger")), ev.NodesLeft(2, ("w",)))
    assert spy.trainers["t"] == replace(learned, since=1)
    assert set(spy.trainers) == {"t", "u"}
    planner.advance(joined(500, "b", "v", closes=None))
    assert {name: len(nodes) for name, nodes in planner.assigned.items()} == {"t": 1, "u": 3}


@pytest.mark.parametrize("swaps", [False, True])
def test_with_max_min_none_waits_longer_than_the_bound(swaps: bool) -> None:
    """Five trainers on two nodes that stay, or that are replaced, both at once, every 20 s."""
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
