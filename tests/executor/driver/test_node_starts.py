"""Slots that cannot start are a problem of their node, and of the run only if there is no other node."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
from parsl.executors.high_throughput.errors import WorkerLost

from freetrain_parsl.errors import BatchSystemError
from freetrain_parsl.executor.driver.block_cycle import BlockCycle
from freetrain_parsl.executor.driver.slot_cycle import NodeStarts, SlotTaskEnded
from freetrain_parsl.executor.slot.slot import SlotNotStarted, run_slot
from freetrain_parsl.planning.model import Window
from freetrain_parsl.planning.settings import PlannerSettings
from freetrain_parsl.windows.base import BlockState, BlockStatus, Survey, without_nodes
from tests.executor.slot.slot_bench import SlotBench

NO_FILES = "OSError: [Errno 24] Too many open files"


def refused_on(node: str) -> SlotNotStarted:
    return SlotNotStarted(node, NO_FILES)


def test_failures_within_a_pause_are_one_problem_and_the_pause_doubles() -> None:
    starts = NodeStarts()
    assert [starts.failed("n0", "e", time) for time in (0.0, 0.004, 9.9, 10.0, 29.0, 30.0)] == [
        10.0,
        None,
        None,
        20.0,
        None,
        40.0,
    ]
    assert starts.failed("n1", "e", 0.0) == 10.0
    starts.joined("n0")
    assert starts.failed("n0", "e", 31.0) == 10.0


def test_problems_on_one_node_of_many_are_never_the_end() -> None:
    starts = NodeStarts()
    for time in (0.0, 10.0, 30.0, 70.0, 150.0, 310.0):
        assert starts.failed("n0", "e", time)
    assert starts.hopeless(1000.0, nodes_there_are=100) is None
    assert starts.hopeless(1000.0, nodes_there_are=None) is None
    reason = starts.hopeless(1000.0, nodes_there_are=1)
    assert reason is not None
    assert "n0: e" in reason


def test_problems_on_several_nodes_at_one_moment_are_not_the_end_unless_they_last() -> None:
    starts = NodeStarts()
    for number in range(10):
        starts.failed(f"n{number}", "e", 0.0)
    assert starts.hopeless(5.0, nodes_there_are=100) is None
    assert starts.hopeless(61.0, nodes_there_are=100) is not None
    starts.joined("n99")
    assert starts.hopeless(61.0, nodes_there_are=100) is None


def test_a_node_that_fails_every_start_within_milliseconds_neither_ends_the_run_nor_is_flooded() -> None:
    """Five failures in 16 ms ended the run."""
    driver = SlotBench(("n0",), ("n1",))
    driver.cycle.nodes_there_are = 2
    first, second = driver.open_tasks()
    assert driver.cycle.on_task_ended(SlotTaskEnded(first, refused_on("n0"))) is None
    driver.join(second, "n1", "1")
    tries: list[float] = []

    def fate(now: float, _token: str) -> BaseException:
        tries.append(now)
        return refused_on("n0")

    assert driver.run(fate, 200.0) is None
    assert driver.aside() == [("n0", 10.0), ("n0", 20.0), ("n0", 40.0), ("n0", 80.0), ("n0", 160.0)]
    assert tries == [10.0, 30.0, 70.0, 150.0]


def test_the_tasks_that_a_bad_node_takes_from_a_good_one_are_sent_again() -> None:
    driver = SlotBench(("n0", "n1"))
    attempts = 0

    def fate(_now: float, _token: str) -> BaseException | str:
        nonlocal attempts
        attempts += 1
        return refused_on("n0") if attempts < 5 else "n1"

    assert driver.run(fate, 5.0) is None
    assert [slot.node for slot in driver.registry.slots.values()] == ["n1"]


@pytest.mark.parametrize(("nodes", "until"), [(1, 75.0), (2, 75.0), (4, 75.0)])
def test_starts_that_fail_on_all_nodes_end_the_run_within_a_minute_or_so(nodes: int, until: float) -> None:
    names = tuple(f"n{number}" for number in range(nodes))
    driver = SlotBench(names)
    driver.cycle.nodes_there_are = nodes
    count = 0

    def fate(_now: float, _token: str) -> BaseException:
        nonlocal count
        count += 1
        return refused_on(names[count % nodes])

    error = driver.run(fate, 600.0)
    assert isinstance(error, BatchSystemError)
    assert 60.0 <= driver.now <= until
    assert NO_FILES in str(error)
    assert "\n" not in str(error)
    assert count <= 4 * nodes + 60


def test_a_pool_with_a_node_that_works_does_not_end() -> None:
    driver = SlotBench(("n0",), ("n1",), ("n2",), ("n3",))
    driver.cycle.nodes_there_are = 4
    driver.join(driver.open_tasks()[0], "n3", "3")
    count = 0

    def fate(_now: float, _token: str) -> BaseException:
        nonlocal count
        count += 1
        return refused_on(f"n{count % 3}")

    assert driver.run(fate, 600.0) is None


def test_failures_on_a_node_that_is_not_known_slow_the_requests_down() -> None:
    """HTEX's own errors name the host, which need not be the batch system's node."""
    driver = SlotBench(("n0",))
    count = 0

    def fate(_now: float, _token: str) -> BaseException:
        nonlocal count
        count += 1
        return WorkerLost(0, "login") if count % 2 else ValueError("cannot be unpickled")

    assert driver.run(fate, 300.0) is None
    assert count < 12


def test_a_node_of_which_one_worker_place_always_fails_gets_longer_and_longer_pauses() -> None:
    """The slots that do start there say nothing about the one that does not."""
    driver = SlotBench(("n0",), slots_per_node=2)
    driver.cycle.nodes_there_are = 1
    joined = 0

    def fate(_now: float, _token: str) -> BaseException | str:
        nonlocal joined
        joined += 1
        return "n0" if joined == 1 else refused_on("n0")

    assert driver.run(fate, 65.0) is None
    assert driver.aside() == [("n0", 10.0), ("n0", 20.0), ("n0", 40.0)]


def test_the_report_about_a_failed_block_says_why_no_slot_has_started() -> None:
    driver = SlotBench(("n0",))
    cycle = BlockCycle(
        driver.registry,
        driver,  # type: ignore[arg-type] - the bench is also the job submitter
        settings=PlannerSettings().in_seconds(),
        emit=driver.events.append,
        write=driver.records.append,
        lose=lambda _slot, _reason: None,
        clock=lambda: driver.now,
    )
    driver.run(lambda _now, _token: refused_on("n0"), 61.0)
    cycle.on_survey(Survey(driver.now, blocks={"0": BlockStatus(BlockState.FAILED)}))
    assert driver.failed_blocks == [f"failed; a slot could not start on n0: {NO_FILES}"]


def test_nodes_set_aside_are_in_no_window() -> None:
    windows = (Window(("n0", "n1"), 0.0, 10.0), Window(("n2",), 0.0, 10.0))
    assert [window.nodes for window in without_nodes(windows, {"n1", "n2"})] == [("n0",)]
    assert without_nodes(windows, ()) == windows


def test_what_fails_in_a_slot_names_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(_work: object, _pulse: object, **_options: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("freetrain_parsl.executor.slot.slot.occupy", no_memory)
    monkeypatch.setattr("freetrain_parsl.executor.slot.slot.gc.freeze", lambda: None)
    monkeypatch.setenv("SLURMD_NODENAME", "n7")
    settings: Any = SimpleNamespace(heartbeat_timeout=30.0, bind_cores=False)
    with pytest.raises(SlotNotStarted) as caught:
        run_slot(settings, "slot-1")
    copied = pickle.loads(pickle.dumps(caught.value))
    assert copied.hostname == "n7"
    assert str(copied) == "BlockingIOError: [Errno 11] Resource temporarily unavailable"
