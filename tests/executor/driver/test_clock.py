"""Steps of the wall clock and stopped processes cause no failures and no wrong decisions."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freetrain_parsl.executor.batch.submitter import JobSubmitter
from freetrain_parsl.executor.driver.clock import SteadyClock, SurveyTimes
from freetrain_parsl.executor.driver.slot_registry import Block
from freetrain_parsl.planning.model import Window
from freetrain_parsl.protocol.messages import Closing, Hello, SlotHeartbeat, StartRun, ToDriver
from freetrain_parsl.windows.base import BlockState, BlockStatus, Survey
from tests.executor.driver.driver_bench import DriverBench, a_driver, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from freetrain_parsl.executor.driver.loop import ControlLoop
    from freetrain_parsl.windows.system import BlockSpec

STEPS = (-7200.0, -30.0, -5.0, 3.0, 20.0, 60.0, 7200.0)


class _Hands:
    """Two clocks that the test controls."""

    def __init__(self) -> None:
        self.wall = 1.7e9
        self.steady = 100.0

    def pass_by(self, seconds: float) -> None:
        self.wall += seconds
        self.steady += seconds


@pytest.mark.parametrize("step", STEPS)
def test_a_step_of_the_wall_clock_is_no_time_that_passed(step: float) -> None:
    hands = _Hands()
    clock = SteadyClock(lambda: hands.wall, lambda: hands.steady)
    assert clock() == hands.wall
    hands.pass_by(10)
    hands.wall += step
    hands.pass_by(5)
    assert clock() == pytest.approx(1.7e9 + 15)
    assert clock.lead == pytest.approx(step)


def survey(time: float, *, closes: float = 300.0, took: float = 0.0) -> Survey:
    return Survey(
        time,
        (Window(("a",), time - 10, time + closes),),
        {"1": BlockStatus(BlockState.RUNNING, ("b",), time + 200), "2": BlockStatus(BlockState.PENDING)},
        wanted={"b": time + 50},
        took=took,
    )


@pytest.mark.parametrize("step", STEPS)
def test_times_of_a_survey_stay_as_far_away_as_the_batch_system_said(step: float) -> None:
    times = SurveyTimes()
    times.translate(survey(1000.0), 1000.2)
    seen = times.translate(survey(2000.0 + step), 2000.2)
    assert seen.time == pytest.approx(2000, abs=0.6)
    assert seen.windows[0].closes == pytest.approx(2300, abs=0.6)
    assert seen.blocks["1"].ends == pytest.approx(2200, abs=0.6)
    assert seen.wanted["b"] == pytest.approx(2050, abs=0.6)
    assert seen.blocks["2"].ends is None


def test_what_does_not_change_compares_equal_though_answers_come_sooner_or_later() -> None:
    """Otherwise each survey would be a change for the planner."""
    times = SurveyTimes()
    step = 40.0
    seen = [
        times.translate(Survey(at + step, (Window(("a",), step, step + 5000.0),), took=late), at + late).windows
        for at, late in ((100.0, 0.01), (200.0, 0.3), (300.0, 8.0), (400.0, 0.05))
    ]
    assert len(set(seen)) == 1


def test_a_slow_round_of_queries_is_not_taken_for_a_step() -> None:
    assert SurveyTimes().translate(survey(1000.0, took=60.0), 1059.0) == survey(1000.0, took=60.0)


@given(st.floats(-1e10, 1e10), st.floats(1e-9, 1e9), st.floats(-1e10, 1e10))
def test_a_window_stays_a_window_on_any_clock(opens: float, length: float, now: float) -> None:
    if opens + length > opens:
        shown = SurveyTimes().translate(Survey(opens, (Window(("a",), opens, opens + length),)), now)
        assert shown.windows[0].closes is not None


@pytest.mark.parametrize("steps", [(-30.0, 3.0, -5.0), (60.0, 20.0), (-7200.0,), (7200.0,)])
def test_trainings_go_on_and_their_times_are_right_though_the_wall_clock_is_stepped(
    tmp_path: Path, steps: tuple[float, ...]
) -> None:
    """The second node closes after a step back, which made the driver fail once; costs are measured across steps."""
    began = time.monotonic()
    with DriverBench(tmp_path) as bench:
        futures = [bench.train("one"), bench.train("two")]
        slots = [bench.slot(), bench.slot()]
        for slot in slots:
            slot.get(StartRun)
        wait_for(lambda: all(not block.releasing and block.started for block in bench.blocks()), "started blocks")
        for count, step in enumerate(steps, 1):
            bench.wall.lead += step
            for slot in slots:
                slot.progress(count)
            wait_for(lambda n=count: sum(e.kind == "clock_stepped" for e in bench.history()) == n, "the step's entry")
        slots[0].die()
        bench.entry("node_left")
        bench.slot().get(StartRun)
        bench.slots[-1].progress(len(steps) + 1)
        for slot in bench.slots:
            slot.finish("done")
        assert [future.result(60) for future in futures] == ["done", "done"]
        assert bench.failures == []
        times = [entry.time for entry in bench.history()]
        # Entries of different threads, each with the time of its event, may change places.
        assert all(later > earlier - 0.1 for earlier, later in pairwise(times))
        assert times[-1] - times[0] <= time.monotonic() - began
        stepped = [entry.detail["seconds"] for entry in bench.history() if entry.kind == "clock_stepped"]
        assert stepped == pytest.approx(list(steps), abs=0.5)


@pytest.mark.parametrize("ago", [20.0, None])
def test_the_journal_says_since_when_a_block_has_its_nodes(tmp_path: Path, ago: float | None) -> None:
    """It is seen up to a poll interval later; `None`: the batch system does not say when the job ends."""
    with DriverBench(tmp_path) as bench:
        start = bench.source.launch

        def started_before(spec: BlockSpec) -> str:
            job = start(spec)
            status = bench.source.jobs[job]
            assert status.ends is not None
            bench.source.jobs[job] = replace(status, ends=None if ago is None else status.ends - ago)
            return job

        bench.submitter._launch = started_before
        future = bench.train("one")
        entry = bench.entry("block_started")
        since = entry.detail["since"]
        assert since == (None if ago is None else pytest.approx(entry.time - ago, abs=5.0))
        slot = bench.slot()
        slot.get(StartRun)
        slot.finish("done")
        assert future.result(60) == "done"


def test_the_journal_says_until_when_a_block_was_seen_on_its_nodes(tmp_path: Path) -> None:
    with DriverBench(tmp_path) as bench:
        bench.train("one")
        started = bench.entry("block_started").time
        wait_for(lambda: any((block.held or 0.0) > started for block in bench.blocks()), "a later survey")
        (job,) = bench.source.jobs
        bench.source.jobs[job] = replace(bench.source.jobs[job], state=BlockState.PREEMPTED)
        ended = bench.entry("block_ended")
        assert started < ended.detail["held"] < ended.time


class _LateServer:
    """A control channel that yields one batch of messages per call, and lets time pass when there is none."""

    port = 1

    def __init__(self, hands: _Hands) -> None:
        self.hands = hands
        self.batches: list[list[tuple[str, ToDriver]]] = []

    def receive(self, timeout: float) -> list[tuple[str, ToDriver]]:
        if self.batches:
            self.hands.pass_by(0.001)
            return self.batches.pop(0)
        self.hands.pass_by(max(0.001, timeout))
        return []

    def send(self, *_: object) -> bool:
        return True

    wake = close = forget = send


@pytest.fixture
def stopped(tmp_path: Path) -> Iterator[tuple[ControlLoop, _LateServer, _Hands]]:
    """Create a driver with slots a and b, whose loop the test steps."""
    hands = _Hands()
    server = _LateServer(hands)
    driver = a_driver(tmp_path, server, JobSubmitter.__new__(_RestlessDesk), lambda: hands.wall, lambda: hands.steady)
    driver._registry.blocks["0"] = Block("0", ("a", "b"), 600.0, None)
    server.batches.append([(name, hello(name)) for name in "ab"])
    driver._turn()
    yield driver, server, hands
    driver._journal.close()


class _RestlessDesk(JobSubmitter):
    def rest(self, resting: bool) -> None:
        """Do nothing: it never queries."""

    def works(self) -> None:
        """Do nothing: it never submits."""


def hello(node: str) -> Hello:
    return Hello(node, node, "0", 0)


def test_a_driver_that_was_stopped_hears_all_its_slots_before_it_judges_them(stopped) -> None:
    """They send heartbeats all the time, which arrive in several batches when the process continues."""
    driver, server, hands = stopped
    hands.pass_by(9)
    server.batches += [[("a", SlotHeartbeat())], [], [("b", SlotHeartbeat())]]
    driver._turn()
    assert set(driver._registry.slots) == {"a", "b"}


def test_a_driver_that_was_stopped_between_hearing_and_judging_judges_by_what_it_had_heard(stopped) -> None:
    driver, _, hands = stopped
    hands.pass_by(9)
    driver._slots.kill_silent(driver._listened)
    assert set(driver._registry.slots) == {"a", "b"}


def test_a_slot_that_is_silent_while_the_driver_listens_is_lost(stopped) -> None:
    driver, server, _ = stopped
    for _ in range(20):
        server.batches.append([("a", SlotHeartbeat())])
        driver._turn()
        driver._turn()
    assert set(driver._registry.slots) == {"a"}


def test_heartbeats_are_no_reason_to_decide_again_and_the_end_of_a_node_is(stopped) -> None:
    """With a thousand slots, most of the driver's work would be to find out that nothing has changed."""
    driver, server, hands = stopped
    server.batches += [[("a", SlotHeartbeat())] for _ in range(20)]
    begun = hands.steady
    driver._turn()
    assert not server.batches
    assert hands.steady - begun == pytest.approx(driver._PASS, abs=0.05)
    beat = [("a", SlotHeartbeat())]
    server.batches += [beat, [("b", Closing(30.0, gone=False))], beat, beat]
    driver._turn()
    assert len(server.batches) == 1, "one batch of messages is handled between the planner and the training jobs"


def test_what_arrives_while_the_planner_decides_does_not_wait_for_the_next_iteration(stopped) -> None:
    driver, server, hands = stopped
    server.batches += [[("b", Closing(30.0, gone=False))], [("a", Closing(30.0, gone=False))]]
    driver._turn_seconds = 0.0  # else it listens for as long as the last iteration took
    driver._turn()
    assert not server.batches
    begun = hands.steady
    driver._turn()
    assert hands.steady == pytest.approx(begun, abs=0.05), "a message has arrived that may require a decision"
    driver._turn()
    assert hands.steady - begun == pytest.approx(driver._PASS, abs=0.05)


def test_slots_that_were_cut_off_together_are_lost_together(stopped) -> None:
    """Their last heartbeats are up to a beat apart; each on its own would be a failure of their training job."""
    driver, server, hands = stopped
    server.batches.append([("a", SlotHeartbeat())])
    driver._turn()
    hands.pass_by(driver._slots._heartbeat_timeout / 5)
    server.batches.append([("b", SlotHeartbeat())])
    driver._turn()
    while "a" in driver._registry.slots:
        driver._turn()
    assert not driver._registry.slots


def test_a_block_whose_end_is_near_when_it_is_first_seen_has_not_started_before_it_was_seen_to_wait(
    tmp_path: Path,
) -> None:
    """The batch system preempts it, so its end tells nothing about its start; it had waited in the queue."""
    with DriverBench(tmp_path) as bench:
        start = bench.source.launch

        def waiting(spec: BlockSpec) -> str:
            job = start(spec)
            bench.source.jobs[job] = BlockStatus(BlockState.PENDING)
            return job

        bench.submitter._launch = waiting
        bench.train("one")
        block = wait_for(bench.blocks, "a block")[0]
        wait_for(lambda: block.waited, "a survey that shows it in the queue")
        (job,) = bench.source.jobs
        seen = block.waited
        bench.source.jobs[job] = BlockStatus(BlockState.RUNNING, block.nodes, bench.source.clock() + 5.0)
        entry = bench.entry("block_started")
        assert seen <= entry.detail["since"] <= entry.time
