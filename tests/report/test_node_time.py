"""What the node time that a run held was used for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freetrain_parsl.extensions.pages.run_view import RunView
from freetrain_parsl.protocol import journal as record
from freetrain_parsl.report.projection.node_time import NodePhase, NodeTime
from freetrain_parsl.report.projection.projection import Projection


def account(*timed, ended=True, end=None, now=None):
    """Account for a driver; if it has ended, then at `end` or with its last entry."""
    run = Projection()
    run.take(timed)
    if ended:
        run.end_driver(timed[-1][0] if timed and end is None else end or 0.0, "finished")
    elif now is None:
        run.end_driver(None, "killed")
    else:
        run.pass_time(now)
    return run.node_time()


def fragment(training, generation, *nodes):
    return record.FragmentStarted(training, generation, list(nodes), in_place=False, paused=0.0)


def fragment_end(training, generation, *nodes, failure=False):
    return record.FragmentEnded(training, generation, list(nodes), failure)


BLOCK = (
    (0.0, record.BlockRequested("b1", ["n1", "n2"], 100.0, None)),
    (10.0, record.BlockStarted("b1", ["n1", "n2"], 110.0)),
    (13.0, record.SlotJoined("s1", "n1", "b1", 1)),
    (13.0, record.NodeJoined("n1", "b1", 110.0)),
    (15.0, record.NodeJoined("n2", "b1", 110.0)),
    (16.0, fragment("t", 1, "n1")),
    (26.0, fragment_end("t", 1, "n1")),
    (26.0, fragment("t", 2, "n1", "n2")),
    (46.0, fragment_end("t", 2, "n1", "n2")),
    (47.0, record.NodeLeft("n1", "its block ends")),
    (48.0, record.NodeLeft("n2", "its block ends")),
    (50.0, record.BlockEnded("b1", ["n1", "n2"], "preempted")),
)


def test_each_second_of_a_node_has_one_cause():
    found = account(*BLOCK)
    assert found.phases == {
        NodePhase.STARTING: 3 + 5,
        NodePhase.TRAINING: 10 + 2 * 20,
        NodePhase.BETWEEN: 3 + 11 + 1 + 2,
        NodePhase.LEAVING: 3 + 2,
    }
    assert found.held == 2 * 40
    assert (found.returned, found.cut_short) == (0, 2 * 60)
    assert (found.requested, found.started, dict(found.endings)) == (1, 1, {"preempted": 1})


def test_members_of_an_array_share_their_node():
    found = account(
        *BLOCK[:5],
        (20.0, fragment("t", 1, "n1")),
        (22.0, fragment("u", 1, "n1")),
        (30.0, fragment_end("t", 1, "n1")),
        (40.0, fragment_end("u", 1, "n1", failure=True)),
    )
    assert found.phases[NodePhase.TRAINING] == 20
    assert found.lost_fragments == 1


def test_a_node_that_joins_before_its_block_is_seen_to_start_is_held_from_then_on():
    found = account(
        BLOCK[0],
        (13.0, record.NodeJoined("n1", "b1", 110.0)),
        (14.0, fragment("t", 1, "n1")),
        (20.0, record.BlockStarted("b1", ["n1", "n2"], 110.0)),
        (21.0, record.NodeJoined("n2", "b1", 110.0)),
        (24.0, fragment_end("t", 1, "n1")),
        (30.0, record.BlockEnded("b1", ["n1", "n2"], "preempted")),
    )
    assert found.phases == {
        NodePhase.STARTING: 1,
        NodePhase.TRAINING: 10,
        NodePhase.BETWEEN: (1 + 6) + 9,
        NodePhase.LEAVING: 0,
    }
    assert (found.started, found.cut_short) == (1, 2 * 80)


def test_nodes_are_held_since_their_job_started_and_not_since_this_was_seen():
    """Slurm is asked every 30 s: all nodes had joined before, and `report` showed no time in which they started."""
    found = account(
        BLOCK[0],
        (13.0, record.NodeJoined("n1", "b1", 110.0)),
        (20.0, record.BlockStarted("b1", ["n1", "n2"], 104.0, since=4.0)),
        (21.0, record.NodeJoined("n2", "b1", 110.0)),
        (30.0, record.BlockEnded("b1", ["n1", "n2"], "ended")),
    )
    assert found.phases[NodePhase.STARTING] == (13 - 4) + (21 - 4)
    assert found.held == 2 * (30 - 4)


def test_nodes_are_held_until_they_left_and_not_until_this_was_seen():
    """Slurm is asked every 15 s: a preempted block of two nodes counted for up to half a minute more than it held."""
    late = (60.0, record.BlockEnded("b1", ["n1", "n2"], "preempted", held=40.0))
    found = account(*BLOCK[:-1], late)
    assert found.phases[NodePhase.LEAVING] == 1
    assert (found.held, found.cut_short) == (2 * (48 - 10), 2 * (110 - 48))


def test_a_block_that_a_survey_has_shown_after_its_nodes_left_was_held():
    late = (60.0, record.BlockEnded("b1", ["n1", "n2"], "preempted", held=55.0))
    assert account(*BLOCK[:-1], late).held == 2 * (55 - 10)


def test_a_block_with_a_node_that_has_not_left_is_held_until_its_end_is_seen():
    late = (60.0, record.BlockEnded("b1", ["n1", "n2"], "node failure", held=40.0))
    assert account(*BLOCK[:-2], late).held == 2 * (60 - 10)


def test_a_node_is_not_held_twice_at_a_time():
    """A job can have started before its request was recorded, and before the end of the block before it was seen."""
    found = account(
        BLOCK[0],
        BLOCK[1],
        (40.0, record.BlockEnded("b1", ["n1", "n2"], "ended")),
        (40.0, record.BlockRequested("b2", ["n1", "n2"], 100.0, None)),
        (50.0, record.NodeJoined("n1", "b2", 140.0)),
        (60.0, record.BlockStarted("b2", ["n1", "n2"], 130.0, since=30.0)),
        (70.0, record.BlockEnded("b2", ["n1", "n2"], "ended")),
    )
    assert found.held == 2 * (70 - 10)


def test_a_block_that_ends_before_it_is_seen_to_start_counts_if_a_node_joined():
    found = account(
        BLOCK[0],
        (13.0, record.NodeJoined("n1", "b1", 110.0)),
        (19.0, record.BlockEnded("b1", ["n1", "n2"], "preempted")),
        (21.0, record.NodeJoined("n1", "b1", 110.0)),
    )
    assert (found.held, found.started, dict(found.endings)) == (6, 1, {"preempted": 1})


def test_a_block_that_never_started_holds_nothing():
    found = account(BLOCK[0], (5.0, record.BlockEnded("b1", [], "cancelled")))
    assert (found.held, found.returned, found.requested, found.started) == (0, 0, 1, 0)


@pytest.mark.parametrize("ended", [True, False])
def test_blocks_end_with_their_driver_but_not_with_a_killed_one(ended):
    found = account(*BLOCK[:6], ended=ended)
    assert found.held == 2 * 6
    assert found.unfinished == (not ended)
    assert found.returned == (2 * 94 if ended else 0)


def test_nodes_are_held_until_the_driver_has_ended_not_only_until_its_last_entry():
    """And those of a driver that runs until now."""
    running = account(*BLOCK[:6], ended=False, now=20.0)
    assert account(*BLOCK[:6], end=20.0).held == running.held == 2 * 10
    assert (running.unfinished, running.begin, running.end) == (1, 0.0, 20.0)


@pytest.mark.parametrize("ended", [53.0, None])
def test_the_page_has_the_node_time_of_the_report(ended):
    """Both count a driver that has ended to its end, and a killed one to its last entry."""
    view = RunView("demo")
    view.take(BLOCK[:6])
    view.end_driver(ended, "finished" if ended else "killed")
    seconds = view.since()["run"]["node_seconds"]
    assert sum(seconds.values()) == account(*BLOCK[:6], ended=ended is not None, end=ended).held


def test_drivers_of_one_run_add_up():
    whole = NodeTime()
    for _ in range(2):
        whole.add(account(*BLOCK))
    assert whole.held == 2 * account(*BLOCK).held
    assert (whole.begin, whole.end, whole.endings["preempted"]) == (0.0, 50.0, 2)


NODES = ("n1", "n2", "n3")
RECORDS = st.one_of(
    st.builds(record.BlockStarted, st.just("b1"), st.just(list(NODES)), st.just(1e6), st.none() | st.floats(0, 3000)),
    st.builds(record.BlockEnded, st.just("b1"), st.just(list(NODES)), st.just("ended")),
    st.builds(record.NodeJoined, st.sampled_from(NODES), st.just("b1"), st.just(1e6)),
    st.builds(record.NodeLeft, st.sampled_from(NODES), st.just("left")),
    st.builds(
        lambda training, generation, nodes: fragment(training, generation, *nodes),
        st.sampled_from("tu"),
        st.integers(0, 2),
        st.lists(st.sampled_from(NODES), unique=True),
    ),
    st.builds(fragment_end, st.sampled_from("tu"), st.integers(0, 2)),
)


def account_of_all_held(steps):
    """Account for records, each with the seconds since the one before; the causes add up to the time held."""
    now, held, since = 0.0, 0.0, None
    timed = []
    for pause, written in steps:
        now += pause
        timed.append((now, written))
        if isinstance(written, record.BlockStarted):
            since = now if since is None else since
        elif isinstance(written, record.BlockEnded) and since is not None:
            held, since = held + len(NODES) * (now - since), None
    held += 0.0 if since is None else len(NODES) * (now - since)
    found = account(*timed)
    assert found.held == pytest.approx(held)
    assert all(seconds >= 0 for seconds in found.phases.values())
    return found


@given(st.lists(st.tuples(st.floats(0, 100), RECORDS), max_size=30))
def test_causes_add_up_to_the_time_held_whatever_the_journal_holds(steps):
    account_of_all_held(steps)


@pytest.mark.parametrize(
    ("released", "reason", "given_back"),
    [
        ("was released", "was released", True),
        (None, "ended by itself", True),
        (None, "failed (exit code 1)", False),
        (None, "had a node failure", False),
        ("was preempted for another job", "was preempted for another job", False),
    ],
)
def test_only_what_we_release_is_given_back(released, reason, given_back):
    release = [] if released is None else [(49.0, record.BlockReleased("b1", released))]
    found = account(*BLOCK[:-1], *release, (50.0, record.BlockEnded("b1", ["n1", "n2"], reason)))
    assert (found.returned, found.cut_short) == ((120, 0) if given_back else (0, 120))


@pytest.mark.parametrize("lead", [3600.0, -3600.0])
@pytest.mark.parametrize("ended", [True, False])
def test_a_wall_clock_that_was_set_changes_no_node_time(lead, ended):
    """The end of a driver and the present are by the wall clock, which leads the journal's since then."""
    entries = (*BLOCK[:6], (17.0, record.ClockStepped("", lead, lead)))
    time = {"end": 20.0 + lead} if ended else {"now": 20.0 + lead}
    assert account(*entries, ended=ended, **time).held == 2 * 10
    view = RunView("demo")
    view.take(entries)
    if ended:
        view.end_driver(20.0 + lead, "finished")
    else:
        view.pass_time(20.0 + lead)
    run = view.since()["run"]
    assert (sum(run["node_seconds"].values()), run["now"]) == (2 * 10, 20.0)


def test_a_driver_that_began_after_the_clock_was_set_back_holds_its_nodes_from_then():
    """The time of the view never falls, that of the next driver does."""
    view = RunView("demo")
    view.take([(time + 3600.0, written) for time, written in BLOCK])
    view.end_driver(3660.0, "stopped")
    view.begin_driver()
    view.take(BLOCK[:6])
    view.pass_time(20.0)
    assert sum(view.since()["run"]["node_seconds"].values()) == account(*BLOCK).held + 2 * 10
    view.end_driver(20.0, "stopped")
    spans = view.since()["spans"]
    assert spans["end"][-1] - spans["begin"][-1] == 10


def test_a_page_that_was_open_when_the_driver_was_killed_has_the_node_time_of_the_report():
    view = RunView("demo")
    view.take(BLOCK[:6])
    view.pass_time(500.0)
    view.since()
    view.end_driver(None, "killed")
    delta = view.since()
    assert sum(delta["run"]["node_seconds"].values()) == account(*BLOCK[:6], ended=False).held


def slots(node, *numbers, time=13.0):
    return [(time, record.SlotJoined(f"{node}-{number}", node, "b1", number)) for number in numbers]


def test_slots_per_node_are_those_of_the_nodes_that_train():
    """Of several kinds, in proportion to the time; one that replaces a lost one, or continues, is none more."""
    again = [(14.0, record.SlotLost("n1-1", "n1", "its process ended")), *slots("n1", 3, time=14.0)]
    entries = sorted([*BLOCK, *slots("n1", 1, 2), *again, *slots("n2", 1, 2, 3, 4)], key=lambda each: each[0])
    entries = [each for each in entries if each[1] != record.SlotJoined("s1", "n1", "b1", 1)]
    entries += slots("n2", 1, 2, 3, 4, time=entries[-1][0])  # their next processes
    found = account(*entries)
    assert found.slots_per_node == pytest.approx((30 * 2 + 20 * 4) / 50)
    assert account(*BLOCK).slots_per_node == 1


# Nodes that jobs share: the planner's events name their slots, records of blocks the nodes.


def sharing(slots):
    return record.PlannerStarted("", "milp", {}, slots)


def ready(*places):
    return record.PlannerStep("", [{"type": "nodes_joined", "nodes": [{"name": place} for place in places]}], [])


def gone(*places):
    return record.PlannerStep("", [{"type": "nodes_left", "nodes": list(places)}], [])


SHARED = (
    (0.0, sharing(4)),
    (0.0, record.BlockRequested("b1", ["n1", "n2"], 100.0, None)),
    (10.0, record.BlockStarted("b1", ["n1", "n2"], 110.0)),
    (12.0, record.NodeJoined("n1", "b1", 110.0)),
    (12.0, ready("n1/0")),
    (14.0, ready("n1/1", "n1/2", "n1/3")),
    (14.0, record.NodeJoined("n2", "b1", 110.0)),
    (14.0, ready(*[f"n2/{lane}" for lane in range(4)])),
    (20.0, fragment("small", 1, "n1/2")),
    (20.0, fragment("large", 1, *[f"n2/{lane}" for lane in range(4)])),
    (40.0, fragment_end("small", 1, "n1/2")),
    (40.0, fragment_end("large", 1, *[f"n2/{lane}" for lane in range(4)])),
    (45.0, gone("n1/3")),
    (50.0, record.BlockEnded("b1", ["n1", "n2"], "preempted")),
)


def test_a_slot_of_a_shared_node_counts_as_its_share_of_the_node():
    found = account(*SHARED)
    assert found.phases == {
        NodePhase.STARTING: (2 + 3 * 4) / 4 + 4,
        NodePhase.TRAINING: 20 / 4 + 20,
        NodePhase.BETWEEN: (38 + 2 * 36 + 31 - 20) / 4 + (36 - 20),
        NodePhase.LEAVING: 5 / 4,
    }
    assert (found.held, found.cut_short, found.started) == (2 * 40, 2 * 60, 1)
    assert (found.shared_slots, found.slots_per_node, found.slot_seconds) == (4, 4, 20 + 4 * 20)


def test_of_drivers_with_whole_and_with_shared_nodes_node_times_add_up():
    whole = account(*BLOCK)
    whole.add(account(*SHARED))
    assert whole.held == account(*BLOCK).held + account(*SHARED).held
    assert whole.shared_slots == 4


@given(st.sampled_from([2, 4, 6]), st.data())
def test_the_phases_of_all_slots_add_up_to_the_time_that_their_nodes_are_held(slots, data):
    """Whatever the journal holds: slots come and go by themselves, jobs are on some, all, or more than are held."""
    places = [f"{node}/{lane}" for node in NODES for lane in range(slots)]
    some = st.lists(st.sampled_from(places), unique=True, max_size=2 * slots)
    records = st.one_of(
        st.builds(record.BlockStarted, st.just("b1"), st.just(list(NODES)), st.just(1e6)),
        st.builds(record.BlockEnded, st.just("b1"), st.just(list(NODES)), st.just("ended")),
        st.builds(record.NodeJoined, st.sampled_from(NODES), st.just("b1"), st.just(1e6)),
        st.builds(record.NodeLeft, st.sampled_from(NODES), st.just("left")),
        st.builds(lambda names: ready(*names), some),
        st.builds(lambda names: gone(*names), some),
        st.builds(
            lambda training, generation, names: fragment(training, generation, *names),
            st.sampled_from("tu"),
            st.integers(0, 2),
            some,
        ),
        st.builds(fragment_end, st.sampled_from("tu"), st.integers(0, 2)),
    )
    steps = data.draw(st.lists(st.tuples(st.floats(0, 100), records), max_size=30))
    found = account_of_all_held([(0.0, sharing(slots)), *steps])
    assert found.slot_seconds == pytest.approx(slots * found.phases[NodePhase.TRAINING])
