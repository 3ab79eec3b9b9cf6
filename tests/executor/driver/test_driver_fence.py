"""A driver that was suspended learns that it was replaced before it does anything; others are not slowed down."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from freetrain_parsl.errors import DriverSuperseded
from freetrain_parsl.executor.driver.driver_fence import DriverFence
from freetrain_parsl.executor.driver.slot_registry import Slot
from freetrain_parsl.executor.training_logs import LEFT_BEHIND, LogWriter, leave_behind
from freetrain_parsl.planning.settings import PlannerSettings
from freetrain_parsl.protocol.messages import Exit, Output
from tests.executor.driver.simulated_site import SimulatedSite
from tests.executor.driver.submitter_bench import SubmitterBench

if TYPE_CHECKING:
    from pathlib import Path

    from freetrain_parsl.protocol.messages import ToSlot


class Store:
    """Answers a fence, on clocks of its own."""

    def __init__(self) -> None:
        self.awake = self.wall = 0.0
        self.asked = 0
        self.problem: Exception | None = None
        self.fence = DriverFence(self.ask, lambda: (self.awake, self.wall))

    def ask(self) -> None:
        self.asked += 1
        if self.problem is not None:
            raise self.problem

    def pass_time(self, seconds: float) -> None:
        self.awake += seconds
        self.wall += seconds

    def replace_driver(self) -> None:
        self.problem = DriverSuperseded("replaced by process 2")


@pytest.fixture
def store() -> Store:
    return Store()


def test_a_driver_that_is_not_suspended_does_not_ask(store: Store) -> None:
    """A file system that hangs would otherwise cost the heartbeats of all slots."""
    for _ in range(1000):
        store.pass_time(0.25)
        store.fence.check()
    assert store.asked == 0


@pytest.mark.parametrize("jump", ["suspended", "clock set forward", "clock set back"])
def test_after_a_jump_of_a_clock_nothing_is_done_before_the_store_has_answered(store: Store, jump: str) -> None:
    store.replace_driver()
    store.fence.check()
    if jump == "suspended":
        store.pass_time(60.0)
    else:
        store.wall += 60.0 if jump == "clock set forward" else -60.0
    for _ in range(3):
        with pytest.raises(DriverSuperseded, match="replaced by process 2"):
            store.fence.check()
        with pytest.raises(DriverSuperseded, match="replaced by process 2"):
            store.fence.require()
    assert store.asked == 1
    assert not store.fence.allows()


def test_a_store_that_cannot_be_read_is_asked_again_and_blocks_are_not_requested_meanwhile(store: Store) -> None:
    store.problem = RuntimeError("disk I/O error")
    store.pass_time(60.0)
    store.fence.check()
    store.fence.check()
    assert store.asked == 1
    with pytest.raises(OSError, match="the state of the run cannot be read: disk I/O error"):
        store.fence.require()
    store.pass_time(3.0)
    store.replace_driver()
    with pytest.raises(DriverSuperseded):
        store.fence.check()


def test_blocks_are_requested_without_a_question_for_seconds_after_a_heartbeat(store: Store) -> None:
    for _ in range(10):
        since = store.fence.now()
        store.pass_time(2.0)
        store.fence.confirm(since)
        store.fence.require()
    assert store.asked == 0
    store.pass_time(6.0)
    store.fence.require()
    assert store.asked == 1


def test_the_loop_of_a_replaced_driver_ends_before_it_reads_a_message(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = SimulatedSite(tmp_path, (), (), PlannerSettings().in_seconds(), start_delay=1.0)
    failures: list[Exception] = []
    printed: list[tuple[str, str, bytes]] = []
    sent: list[tuple[str, ToSlot]] = []
    monkeypatch.setattr(site.loop, "_fail_all", failures.append)
    monkeypatch.setattr(site.loop, "_take_output", lambda *output: printed.append(output))
    monkeypatch.setattr(site.loop, "_check_driver", store.fence.check)
    monkeypatch.setattr(site, "send", lambda slot, message: sent.append((slot, message)))
    site.loop._registry.slots["n1/0"] = Slot("n1/0", "token", "n1", "block-0", heard=0.0)
    site.inbox.append(("n1/0", Output("t", "0", b"1\n")))
    site.loop._turn()
    assert len(printed) == 1

    def receive(_timeout: float) -> list[tuple[str, Output]]:
        store.pass_time(60.0)  # suspended while it waits
        return [("n1/0", Output("t", "0", b"2\n"))]

    monkeypatch.setattr(site, "receive", receive)
    store.replace_driver()
    sent.clear()
    site.loop.run()
    assert [type(failure) for failure in failures] == [DriverSuperseded]
    assert len(printed) == 1
    assert sent == [("n1/0", Exit(now=True))]


def test_a_replaced_driver_neither_submits_nor_cancels_jobs_of_the_other(store: Store) -> None:
    """Both have jobs with the prefix of the run."""
    bench = SubmitterBench(require=store.fence.require)
    bench.request("block-0")
    assert bench.turn() == ["block-0"]
    bench.submitter._unknown_outcome_until = 1e9
    bench.batch.named = {"job-block-0": "freetrain.test.block-0", "7": "freetrain.test.block-0"}
    store.pass_time(60.0)
    store.replace_driver()
    bench.request("block-1")
    assert bench.turn(60.0) == []
    bench.submitter.close()
    assert bench.batch.cancelled == ["job-block-0"]


def test_a_replaced_driver_leaves_the_logs_to_the_other(store: Store, tmp_path: Path) -> None:
    leave_behind(tmp_path, "t", "s", ["0 0 text\n"])
    store.pass_time(60.0)
    store.replace_driver()
    writer = LogWriter(tmp_path, allowed=store.fence.allows)
    writer.close()
    assert [path.name for path in (tmp_path / LEFT_BEHIND).iterdir()] == ["t@s.lines"]
    other = LogWriter(tmp_path)
    other.close()
    assert not list((tmp_path / LEFT_BEHIND).iterdir())
