"""Blocks that wait in the queue of a preemptible partition for any node to become idle."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freetrain_parsl.planning import events as ev
from freetrain_parsl.planning.curves.scaling import ScalingCurve
from freetrain_parsl.planning.model import BlockTerms
from freetrain_parsl.planning.planner import Planner
from freetrain_parsl.planning.policies.milp import MilpPolicy
from freetrain_parsl.planning.sizes import AllowedCounts
from tests.planning.small_events import SETTINGS, joined, only, trainer, window

if TYPE_CHECKING:
    from freetrain_parsl.planning.settings import SettingsInSeconds

PREEMPTIBLE = BlockTerms(max_walltime=600.0, walltime_step=60.0, may_wait=True)
ON_STANDBY = replace(SETTINGS, standby_blocks=2)


@pytest.fixture
def planner() -> Planner:
    return Planner(MilpPolicy(), ON_STANDBY)


def queued(actions: ev.Actions) -> list[str]:
    return [action.block for action in only(ev.QueueBlock, actions)]


def seen(time: float, *nodes: str, closes: float | None = None, terms: BlockTerms = PREEMPTIBLE) -> ev.WindowsSeen:
    return ev.WindowsSeen(time, (window(*nodes, closes=closes),) if nodes else (), terms)


def test_blocks_wait_while_trainers_want_more_nodes_than_are_idle(planner: Planner) -> None:
    planner.advance(ev.TrainerSubmitted(0, trainer("t")))
    actions = planner.advance(seen(1, "a"))
    assert [request.nodes for request in only(ev.RequestBlock, actions)] == [("a",)]
    assert [(action.seconds, action.node_kind) for action in only(ev.QueueBlock, actions)] == [(600.0, "")] * 2


def test_no_block_waits_for_a_node_that_no_trainer_would_use(planner: Planner) -> None:
    assert planner.advance(seen(0)) == []
    actions = planner.advance(ev.TrainerSubmitted(1, trainer("t", most=1)))
    assert len(queued(actions)) == 1
    assert queued(planner.advance(ev.TrainerSubmitted(2, trainer("u", most=1)))) != []
    assert queued(planner.advance(ev.TrainerSubmitted(3, trainer("v", most=1)))) == [], "two wait at most"


def test_no_block_waits_for_nodes_that_could_only_be_used_together(planner: Planner) -> None:
    """One would be held without use until the other one is there."""
    planner.advance(ev.TrainerSubmitted(0, trainer("t", least=2)))
    assert planner.advance(seen(1)) == []
    actions = planner.advance(seen(15, "a", "b"))
    assert len(only(ev.RequestBlock, actions)) == 2
    assert len(queued(actions)) == 2, "it can use a third one at once"


def test_no_further_block_waits_once_a_single_node_is_of_no_use(planner: Planner) -> None:
    """The numbers of nodes are 1, 2 and 4: a second one is of use by itself, a third one is not."""
    planner.advance(ev.TrainerSubmitted(0, replace(trainer("t"), allowed_counts=AllowedCounts(divisor_of=4))))
    first, second = queued(planner.advance(seen(1)))
    assert queued(planner.advance(joined(2, first, "a"))) != []
    assert queued(planner.advance(joined(5, second, "b"))) == []


def test_a_node_that_is_of_no_use_alone_is_released_although_a_second_one_may_come(planner: Planner) -> None:
    planner.advance(ev.TrainerSubmitted(0, trainer("t", least=2)))
    first, second = only(ev.RequestBlock, planner.advance(seen(1, "a", "b")))
    planner.advance(joined(10, first.block, "a", closes=600.0), ev.BlockEnded(10, second.block), seen(10))
    released = [action for second in range(11, 60) for action in planner.advance(ev.Tick(second))]
    assert ev.ReleaseBlock(first.block) in released


@pytest.mark.parametrize(
    ("windows", "sizes"), [((1, 1, 1), (1, 1, 1)), ((10,), (3, 3, 3, 1)), ((40, 9, 3), (13, 13, 13, 1, 9, 3))]
)
def test_idle_nodes_are_divided_among_a_few_blocks(windows: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    """Each is a submission, of which sites allow few; a node that is needed ends a block of a part of them only."""
    planner = Planner(MilpPolicy(), replace(ON_STANDBY, max_pending_blocks=32))
    planner.advance(ev.TrainerSubmitted(0, replace(trainer("t", most=100), curve=ScalingCurve({1: 1.0, 100: 100.0}))))
    offered = [
        window(*(f"{number}-{node:02}" for node in range(count)), closes=None if number == 0 else 900.0 - number)
        for number, count in enumerate(windows)
    ]
    requests = only(ev.RequestBlock, planner.advance(ev.WindowsSeen(1, tuple(offered), PREEMPTIBLE)))
    assert tuple(len(request.nodes) for request in requests) == sizes


@pytest.mark.parametrize(
    ("terms", "settings"),
    [(replace(PREEMPTIBLE, may_wait=False), ON_STANDBY), (PREEMPTIBLE, replace(ON_STANDBY, standby_blocks=0))],
    ids=["not preemptible", "switched off"],
)
def test_elsewhere_none_waits(terms: BlockTerms, settings: SettingsInSeconds) -> None:
    planner = Planner(MilpPolicy(), settings)
    planner.advance(ev.TrainerSubmitted(0, trainer("t")))
    assert planner.advance(seen(1, terms=terms)) == []


def test_one_that_has_started_is_replaced(planner: Planner) -> None:
    """Its slots join before a survey shows its start, with a node that nobody knew."""
    planner.advance(ev.TrainerSubmitted(0, trainer("t")))
    first, _ = queued(planner.advance(seen(1)))
    actions = planner.advance(joined(20, first, "n7", closes=600.0))
    assert [action.nodes for action in only(ev.Assign, actions)] == [{"n7"}]
    assert len(queued(actions)) == 1
    assert planner.advance(ev.BlockStarted(25, first, ("n7",), 600.0)) == []
    assert planner.advance(seen(26)) == []
    left = planner.advance(ev.BlockEnded(30, first))
    assert [action.trainer for action in only(ev.Stop, left)] == ["t"]


def test_a_start_that_a_survey_shows_first(planner: Planner) -> None:
    planner.advance(ev.TrainerSubmitted(0, trainer("t", most=2)))
    first, _ = queued(planner.advance(seen(1)))
    assert planner.advance(seen(15), ev.BlockStarted(15, first, ("n7",), 600.0)) == [], "one is awaited, one waits"
    assert only(ev.Assign, planner.advance(joined(20, first, "n7", closes=600.0)))


def test_an_idle_node_is_left_to_a_block_that_waits(planner: Planner) -> None:
    """Else two blocks would be requested for it."""
    planner.advance(ev.TrainerSubmitted(0, trainer("t")))
    planner.advance(seen(1))
    assert planner.advance(seen(15, "a")) == []
    (request,) = only(ev.RequestBlock, planner.advance(seen(30, "a", "b", "c")))
    assert len(request.nodes) == 1


def test_a_hole_before_a_planned_job_is_requested_nevertheless(planner: Planner) -> None:
    """The batch system does not start a block there that would end too late."""
    planner.advance(ev.TrainerSubmitted(0, trainer("t")))
    planner.advance(seen(1))
    (request,) = only(ev.RequestBlock, planner.advance(seen(15, "a", closes=200.0)))
    assert (request.nodes, request.seconds) == (("a",), 180.0)


def test_those_that_are_not_needed_leave_the_queue_after_a_while(planner: Planner) -> None:
    planner.advance(ev.TrainerSubmitted(0, trainer("t")), ev.TrainerSubmitted(0, trainer("u")))
    waiting = queued(planner.advance(seen(1)))
    planner.advance(ev.TrainerFinished(10, "u"))
    assert planner.advance(ev.TrainerFinished(10, "t")) == []
    assert planner.advance(ev.Tick(39)) == []
    assert planner.advance(ev.Tick(40)) == [ev.ReleaseBlock(name) for name in waiting]


def test_those_that_are_needed_again_stay(planner: Planner) -> None:
    planner.advance(ev.TrainerSubmitted(0, trainer("t")))
    planner.advance(seen(1))
    planner.advance(ev.TrainerFinished(10, "t"))
    assert planner.advance(ev.TrainerSubmitted(30, trainer("u"))) == []
    assert planner.advance(ev.Tick(100)) == []


def test_a_partition_that_is_not_preemptible_any_longer_ends_the_waiting(planner: Planner) -> None:
    planner.advance(ev.TrainerSubmitted(0, trainer("t")))
    waiting = queued(planner.advance(seen(1)))
    now_without = replace(PREEMPTIBLE, may_wait=False)
    planner.advance(seen(10, terms=now_without))
    assert planner.advance(seen(40, terms=now_without)) == [ev.ReleaseBlock(name) for name in waiting]


def test_blocks_whose_nodes_somebody_took_do_not_wait_beside_those_that_may() -> None:
    """They have the walltime of their window, and there may be many of them."""
    planner = Planner(MilpPolicy(), replace(ON_STANDBY, max_pending_blocks=8))
    planner.advance(ev.TrainerSubmitted(0, trainer("t", most=8)))
    actions = planner.advance(seen(1, *"abcdef"))
    requested = [ev.ReleaseBlock(request.block) for request in only(ev.RequestBlock, actions)]
    assert (len(requested), len(queued(actions))) == (3, 2)
    assert planner.advance(seen(5)) == requested


def test_a_block_that_was_preempted_before_anybody_saw_it_start_is_replaced_at_once(planner: Planner) -> None:
    planner.advance(ev.TrainerSubmitted(0, trainer("t")))
    first, _ = queued(planner.advance(seen(1)))
    assert len(queued(planner.advance(ev.BlockEnded(15, first)))) == 1


def test_where_the_batch_system_accepts_no_more_they_are_tried_ever_less_often(planner: Planner) -> None:
    """A limit on a user's pending jobs, for example: each refusal is a submission that was of no use."""
    planner.advance(ev.TrainerSubmitted(0, trainer("t")))
    now, tried = 1.0, []
    actions = planner.advance(seen(now))
    while now < 3000.0:
        if blocks := queued(actions):
            tried.append(now)
            actions = planner.advance(*(ev.BlockEnded(now, block, refused=True) for block in blocks))
            assert queued(actions) == []
        now = planner.wake_at(now)
        actions = planner.advance(ev.Tick(now))
    pauses = [after - before for before, after in pairwise(tried)]
    assert pauses[:3] == [40.0, 160.0, 320.0], "two were refused at first"
    assert set(pauses[3:]) == {320.0}


def test_a_start_ends_the_pause(planner: Planner) -> None:
    planner.advance(ev.TrainerSubmitted(0, trainer("t")))
    first, second = queued(planner.advance(seen(1)))
    assert queued(planner.advance(ev.BlockEnded(2, second, refused=True))) == []
    assert len(queued(planner.advance(joined(5, first, "n7", closes=600.0)))) == 2


def test_pending_blocks_are_limited_together() -> None:
    planner = Planner(MilpPolicy(), replace(ON_STANDBY, max_pending_blocks=2))
    planner.advance(ev.TrainerSubmitted(0, trainer("t")))
    actions = planner.advance(seen(1, "a"))
    assert (len(only(ev.RequestBlock, actions)), len(queued(actions))) == (1, 1)


def test_ordinary_tasks_do_not_make_blocks_wait(planner: Planner) -> None:
    """They are short: a node that becomes idle at some time is of no use to them."""
    planner.advance(ev.TasksWaiting(0, 3))
    assert planner.advance(seen(1)) == []


def test_nodes_that_jobs_share() -> None:
    planner = Planner(MilpPolicy(), ON_STANDBY, slots_per_node=2)
    planner.advance(ev.TrainerSubmitted(0, trainer("t", most=1)))
    assert len(queued(planner.advance(seen(1)))) == 1
    assert len(queued(planner.advance(ev.TrainerSubmitted(2, trainer("u", most=2))))) == 1


def test_none_waits_while_the_batch_system_takes_nodes_back(planner: Planner) -> None:
    """A job that needs several of them would find the first ones taken when it gets the last."""
    terms = replace(PREEMPTIBLE, start_delay=10.0)
    planner.advance(ev.TrainerSubmitted(0, trainer("t", most=4)))
    (first, second) = queued(planner.advance(seen(1, terms=terms)))
    planner.advance(joined(5, first, "a", closes=600.0))
    third, *_ = queued(planner.advance(joined(6, second, "b", closes=600.0)))
    actions = planner.advance(ev.NodesClosing(100, ("a",), 110.0))
    assert ev.ReleaseBlock(third) in actions
    assert queued(actions) == []
    actions = planner.advance(ev.NodesClosing(104, ("b",), 114.0), ev.BlockEnded(105, first), ev.NodesLeft(105, ("a",)))
    assert queued(actions) == []
    actions = planner.advance(seen(106, "a", "c", terms=terms))
    assert [(each.nodes, each.avoided) for each in only(ev.RequestBlock, actions)] == [(("c",), {"a", "b"})]
    assert planner.wake_at(107) <= 114
    again = only(ev.QueueBlock, planner.advance(ev.Tick(114)))
    assert again
    assert all(each.avoided == {"a", "b"} for each in again)
    assert planner.wake_at(120) <= 124
    actions = planner.advance(ev.Tick(124))
    assert {each.block for each in only(ev.ReleaseBlock, actions)} >= {each.block for each in again}
    assert [each.avoided for each in only(ev.QueueBlock, actions)] == [frozenset()] * len(again), "for any node again"


@given(steps=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4), st.integers(1, 60)), max_size=25))
def test_never_more_than_allowed_whatever_happens(steps: list[tuple[int, int, int]]) -> None:
    """Trainers come and end, nodes become idle, blocks start: the numbers of blocks stay within their limits."""
    planner = Planner(MilpPolicy(), ON_STANDBY)
    pending: dict[str, bool] = {}  # block -> whether it waits for any node
    now, trainers, started = 0.0, 0, 0
    for what, idle, seconds in steps:
        now += seconds
        events: list[ev.Event] = [seen(now, *"abcd"[:idle])]
        if what == 0:
            trainers += 1
            events.append(ev.TrainerSubmitted(now, trainer(f"t{trainers}", most=3)))
        elif what == 1 and trainers:
            events.append(ev.TrainerFinished(now, f"t{trainers}"))
            trainers -= 1
        elif what == 2 and any(pending.values()):
            name = next(name for name, waits in pending.items() if waits)
            del pending[name]
            started += 1
            events.append(joined(now, name, f"n{started}", closes=now + 600.0))
        for action in planner.advance(*events):
            if isinstance(action, ev.QueueBlock):
                pending[action.block] = True
            elif isinstance(action, ev.RequestBlock):
                pending[action.block] = False
            elif isinstance(action, ev.ReleaseBlock):
                pending.pop(action.block, None)
        assert len(pending) <= ON_STANDBY.max_pending_blocks
        assert sum(pending.values()) <= ON_STANDBY.standby_blocks
