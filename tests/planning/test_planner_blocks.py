"""The planner and its blocks: which are requested, their walltimes, and when they are withdrawn or released."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from freetrain_parsl.planning import events as ev
from freetrain_parsl.planning.model import BlockTerms
from freetrain_parsl.planning.planner import Planner
from freetrain_parsl.planning.policies.milp import MilpPolicy
from tests.planning.small_events import DEFAULTS, SETTINGS, held, joined, only, trainer, window


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
    """It is pinned because other windows close too early, and would therefore never start."""
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
    assert again.nodes == ("c",), "the remaining node is still requested"


def test_of_blocks_that_may_run_anywhere_the_one_whose_nodes_were_taken_is_withdrawn(planner: Planner) -> None:
    """The nodes of the other one are free: it would be requested again at once, and withdrawn, with each decision."""
    planner.advance(ev.TrainerSubmitted(0, trainer("t")))
    (first,) = planner.advance(ev.WindowsSeen(0, (window("a", "b"),)))
    (second,) = planner.advance(ev.WindowsSeen(5, (window(*"abcd"),)))
    assert second.nodes == ("c", "d")
    assert planner.advance(ev.WindowsSeen(6, (window("c", "d"),))) == [ev.ReleaseBlock(first.block)]


def test_a_block_that_the_batch_system_does_not_start_is_withdrawn(planner: Planner) -> None:
    """After twice the maximum start delay plus the start-up."""
    terms = BlockTerms(start_delay=30)
    request = requested(planner, "a", terms=terms)
    assert planner.advance(ev.WindowsSeen(69, (window("a"),), terms)) == []
    later = (window("a", closes=501),)
    assert ev.ReleaseBlock(request.block) in planner.advance(ev.WindowsSeen(71, later, terms))


def test_a_block_is_not_withdrawn_before_a_survey_could_show_its_start(planner: Planner) -> None:
    """It must start within 10 s, but the batch system is queried every 20 s."""
    request = requested(planner, "a")
    assert planner.advance(ev.TrainerSubmitted(15, trainer("u"))) == []
    started = ev.BlockStarted(20, request.block, request.nodes, 500.0)
    assert only(ev.ReleaseBlock, planner.advance(ev.WindowsSeen(20, ()), started)) == []


def test_a_block_that_the_next_survey_still_shows_waiting_is_withdrawn(planner: Planner) -> None:
    request = requested(planner, "a")
    planner.advance(ev.TrainerSubmitted(15, trainer("u")))
    later = (window("a", closes=501),)
    assert ev.ReleaseBlock(request.block) in planner.advance(ev.WindowsSeen(20, later))


def test_after_a_preemption_nothing_is_requested_before_the_next_look(planner: Planner) -> None:
    """The jobs that take our nodes may also have taken those that were idle a moment ago."""
    planner.advance(ev.TrainerSubmitted(0, trainer("t", most=2)))
    block = held(planner, "a", "b", closes=1000.0)
    planner.advance(ev.WindowsSeen(20, (window("c", "d"),)))
    assert only(ev.RequestBlock, planner.advance(ev.NodesClosing(21, ("a", "b"), 25.0))) == []
    assert only(ev.RequestBlock, planner.advance(ev.NodesLeft(22, ("a", "b")))) == []
    actions = planner.advance(ev.WindowsSeen(23, (window("c", "d"),)), ev.BlockEnded(23, block))
    (request,) = only(ev.RequestBlock, actions)
    assert request.nodes == ("c", "d")


def test_nothing_is_requested_from_windows_that_are_outdated(planner: Planner) -> None:
    """While no nodes were needed, windows were not queried; the first training job waits for a survey."""
    planner.advance(ev.WindowsSeen(0, (window("a"),)), ev.WindowsOutdated(20))
    assert planner.advance(ev.TrainerSubmitted(30, trainer("t"))) == []
    (request,) = planner.advance(ev.WindowsSeen(31, (window("a"),)))
    assert request.nodes == ("a",)


def test_a_block_that_started_is_not_withdrawn(planner: Planner) -> None:
    request = requested(planner, "a", "b")
    planner.advance(ev.BlockStarted(1, request.block, request.nodes, 500.0))
    actions = planner.advance(ev.WindowsSeen(40, ()))
    assert only(ev.ReleaseBlock, actions) == []


def test_a_block_whose_slots_are_ready_is_not_withdrawn_though_nobody_said_that_it_started(planner: Planner) -> None:
    """The batch system may be down, or slower than the slots."""
    request = requested(planner, "a")
    planner.advance(joined(5, request.block, "a"))
    later = planner.advance(ev.WindowsSeen(400, (window("a", closes=900),)))
    assert only(ev.ReleaseBlock, later) == []


def test_nodes_where_a_block_did_not_start_are_left_alone_ever_longer() -> None:
    """10 s of patience: not requested for 20 s after the first time, 40 s after the second, and so on."""
    planner = Planner(MilpPolicy(), SETTINGS)
    planner.advance(ev.TrainerSubmitted(0, trainer("t")))
    requests = [
        float(second)
        for second in range(400)
        # Every second the node is reported free, and a block never starts.
        if only(ev.RequestBlock, planner.advance(ev.WindowsSeen(second, (window("a", closes=10_000.0 + second),))))
    ]
    assert [later - earlier for earlier, later in pairwise(requests)] == [31, 51, 91, 171]


def test_no_more_nodes_are_requested_than_trainers_can_use(planner: Planner) -> None:
    planner.advance(ev.TrainerSubmitted(0, trainer("t", most=3)))
    (request,) = planner.advance(ev.WindowsSeen(0, (window(*"abcdefgh"),)))
    assert len(request.nodes) == 3


def test_nodes_that_are_free_for_longer_are_no_reason_to_hold_more_than_can_be_used(planner: Planner) -> None:
    """The block on a and b ends with its walltime, c and d are free indefinitely; the trainer takes two nodes."""
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
    settings = replace(DEFAULTS, startup=1, min_useful=1, closing_margin=1, max_pending_blocks=3, max_nodes_per_block=2)
    planner = Planner(MilpPolicy(), settings)
    planner.advance(ev.TrainerSubmitted(0, trainer("t", most=16)))
    requests = planner.advance(ev.WindowsSeen(0, (window(*"abcdefghij"),)))
    assert [len(request.nodes) for request in requests] == [2, 2, 2]


def test_a_refused_block_is_requested_again(planner: Planner) -> None:
    planner.advance(ev.TrainerSubmitted(0, trainer("t")))
    (request,) = planner.advance(ev.WindowsSeen(0, (window("a"),)))
    (again,) = planner.advance(ev.BlockEnded(1, request.block))
    assert again.nodes == request.nodes
    assert again.block != request.block


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


def test_waiting_tasks_alone_bring_blocks(planner: Planner) -> None:
    planner.advance(ev.WindowsSeen(0, (window("a", "b", "c"),)))
    (request,) = planner.advance(ev.TasksWaiting(1, 2))
    assert len(request.nodes) == 2
