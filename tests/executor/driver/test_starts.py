"""Blocks that end before a worker connects are retried less and less often, then not at all; the reason is quoted."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from freetrain_parsl.executor.batch.providers import TELL_EXIT_CODE, last_words
from freetrain_parsl.executor.batch.submitter import StartsFailed, SubmissionsEnded
from freetrain_parsl.executor.driver.block_cycle import BlockCycle
from freetrain_parsl.executor.driver.slot_registry import Block, Slot, SlotRegistry
from freetrain_parsl.planning.settings import PlannerSettings
from freetrain_parsl.windows.base import BlockState, BlockStatus, Survey
from tests.executor.driver.submitter_bench import SubmitterBench

if TYPE_CHECKING:
    from pathlib import Path


class Bench(SubmitterBench):
    """Blocks that fail to start, with last words."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(last_words=lambda job: f"exit code 1 of {job}", **settings)

    def fail(self, *blocks: str) -> None:
        for block in blocks:
            self.submitter.failed_to_start(block, "failed")
            self.submitter.forget(block)

    @property
    def last(self) -> StartsFailed:
        return self.told(StartsFailed)[-1]


def test_the_pause_between_attempts_doubles_and_the_last_attempt_closes_the_desk() -> None:
    bench = Bench(max_failed_blocks=3)
    bench.request("a")
    assert bench.turn(0.0) == ["a"]
    bench.fail("a")
    bench.request("b")
    assert bench.turn(1.0) == []
    assert bench.last == StartsFailed(1, 3, 20.0, "block a (job job-a) failed; exit code 1 of job-a")
    assert bench.turn(20.9) == []
    assert bench.turn(21.0) == ["b"]
    bench.fail("b")
    bench.request("c")
    assert bench.turn(22.0) == []
    assert bench.last.pause == 40.0
    assert bench.turn(62.0) == ["c"]
    bench.fail("c")
    bench.request("d")
    assert bench.turn(10_000.0) == []
    (closed,) = bench.told(SubmissionsEnded)
    assert closed.reason.startswith("3 attempts in a row to start a block failed; the last, block c")


def test_after_a_failed_start_one_block_is_tried_at_a_time() -> None:
    bench = Bench()
    bench.request("a")
    bench.turn(0.0)
    bench.fail("a")
    bench.turn(0.0)
    bench.request("b", "c", "d")
    assert bench.turn(20.0) == ["b"]
    assert bench.turn(500.0) == [], "the outcome of b is not known yet"
    bench.submitter.works()
    assert bench.turn(500.0) == ["c", "d"]
    assert bench.last.count == 0


def test_a_probe_that_ends_without_saying_anything_makes_room_for_the_next() -> None:
    """It was preempted, for example."""
    bench = Bench()
    bench.request("a")
    bench.turn(0.0)
    bench.fail("a")
    bench.turn(0.0)
    bench.request("b", "c")
    assert bench.turn(20.0) == ["b"]
    bench.submitter.forget("b")
    assert bench.turn(20.0) == ["c"]
    assert bench.last.count == 1


def test_blocks_of_one_attempt_count_once() -> None:
    """Eight blocks that were submitted at the same time do not use up all attempts."""
    bench = Bench()
    bench.request(*"abcde")
    assert bench.turn(0.0) == list("abcde")
    bench.fail("a", "b")
    bench.turn(5.0)
    bench.fail("c", "d", "e")
    bench.turn(9.0)
    assert bench.last.count == 1


def test_attempts_count_from_one_again_after_a_block_that_works() -> None:
    bench = Bench(max_failed_blocks=2)
    for block, now in (("a", 0.0), ("b", 1000.0)):
        bench.request(block)
        bench.turn(now)
        bench.submitter.works()
        bench.fail(block)
        bench.turn(now + 1)
        assert bench.last.count == 1
    assert not bench.told(SubmissionsEnded)


class Watch:
    """A `BlockCycle` with one block that started at 0."""

    def __init__(self) -> None:
        self.now = 0.0
        self.failed: list[str] = []
        self.worked = 0
        self.registry = SlotRegistry(1)
        self.block = Block("b", ("n1",), 600.0, None)
        self.block.start(0.0, ("n1",), 600.0)
        self.registry.blocks["b"] = self.block
        settings = replace(PlannerSettings().in_seconds(), startup=30.0, join_timeout=180.0)
        self.cycle = BlockCycle(
            self.registry,
            self,  # type: ignore[arg-type] - the test's job submitter
            settings=settings,
            emit=lambda _event: None,
            write=lambda _record: None,
            lose=lambda _slot, _reason: None,
            clock=lambda: self.now,
        )

    def end(self, state: BlockState) -> None:
        self.cycle.on_survey(Survey(self.now, blocks={"b": BlockStatus(state)}))

    def failed_to_start(self, _block: str, how: str) -> None:
        self.failed.append(how)

    def forget(self, _block: str) -> None: ...
    def withdraw(self, _block: str) -> None: ...

    def works(self) -> None:
        self.worked += 1

    def join(self) -> None:
        self.block.joined = self.now
        self.registry.slots["s"] = Slot("s", "t", "n1", "b", heard=self.now)


@pytest.mark.parametrize(
    ("state", "now", "failed"),
    [
        (BlockState.FAILED, 1.0, True),
        (BlockState.COMPLETED, 1.0, True),
        (BlockState.TIMED_OUT, 31.0, True),
        (BlockState.TIMED_OUT, 29.0, False),
        (BlockState.PREEMPTED, 100.0, False),
        (BlockState.CANCELLED, 100.0, False),
        (BlockState.NODE_FAILED, 100.0, False),
        (BlockState.UNKNOWN, 100.0, False),
    ],
)
def test_a_block_without_slots_failed_if_it_ended_by_itself(state: BlockState, now: float, failed: bool) -> None:
    bench = Watch()
    bench.now = now
    bench.end(state)
    assert bool(bench.failed) == failed


@pytest.mark.parametrize(("now", "failed"), [(31.0, []), (180.0, ["ran for 3 min and no worker connected"])])
def test_a_block_that_we_give_back_did_not_fail_unless_it_ran_in_vain(now: float, failed: list[str]) -> None:
    bench = Watch()
    bench.now = now
    bench.cycle.release("b")
    assert bench.failed == failed
    bench.end(BlockState.COMPLETED)
    assert bench.failed == failed, "it counts once"


@pytest.mark.parametrize(("state", "failed"), [(BlockState.CANCELLED, []), (BlockState.FAILED, ["failed"])])
def test_a_block_that_failed_before_we_saw_it_start_counts_though_it_was_withdrawn(
    state: BlockState, failed: list[str]
) -> None:
    bench = Watch()
    bench.block.started = None
    bench.cycle.release("b")
    bench.end(state)
    assert bench.failed == failed


def test_slots_that_crash_at_once_are_no_start() -> None:
    bench = Watch()
    bench.join()
    bench.now = 9.0
    bench.cycle.look()
    bench.end(BlockState.FAILED)
    assert (bench.worked, bench.failed) == (0, ["failed"])


def test_a_block_whose_slots_stay_works() -> None:
    bench = Watch()
    bench.join()
    bench.now = 10.0
    bench.cycle.look()
    bench.cycle.look()
    bench.end(BlockState.FAILED)
    assert (bench.worked, bench.failed) == (1, [])


def test_the_last_words_of_a_job_are_bounded_and_plain(tmp_path: Path) -> None:
    stderr = tmp_path / "job.sh.err"
    lines = [f"line {number}" for number in range(5000)]
    lines += [f"{tmp_path}/job.sh: line 2: \x1b[31mmodule\x1b[0m: command\x07 not found", "", f"{_mark()} 127"]
    stderr.write_text("\n".join(lines))
    words = last_words({"job_stderr_path": str(stderr), "job_stdout_path": None})
    assert words == (
        "exit code 127; its stderr ends with 'line 4997 / line 4998 / line 4999 / line 2: module: command  not found'; "
        f"see {stderr}"
    )
    stderr.write_bytes(b"\xff" * 100_000)
    assert len(last_words({"job_stderr_path": str(stderr)})) < 1000


def test_of_a_traceback_only_the_exception_is_among_the_last_words(tmp_path: Path) -> None:
    """As of a worker pool that cannot reach the driver."""
    stderr = tmp_path / "job.err"
    stderr.write_text(
        "module load: done\n"
        "Traceback (most recent call last):\n"
        '  File "pool.py", line 1003, in <module>\n    manager = Manager(\n              ^^^^^^^^\n'
        "ConnectionError: No viable ZMQ url from: tcp://10.99.0.1:5000\n"
        f"  an indented line\n{_mark()} 1\n"
    )
    assert last_words({"job_stderr_path": str(stderr)}) == (
        "exit code 1; its stderr ends with 'module load: done / ConnectionError: No viable ZMQ url from: "
        f"tcp://10.99.0.1:5000 / an indented line'; see {stderr}"
    )


def test_a_job_without_output_says_so(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("hello\n")
    missing = tmp_path / "err"
    assert last_words({"job_stderr_path": missing, "job_stdout_path": tmp_path / "nothing"}).endswith(str(missing))
    assert "its stdout ends with 'hello'" in last_words(
        {"job_stderr_path": missing, "job_stdout_path": tmp_path / "out"}
    )
    assert last_words(None) == ""


def _mark() -> str:
    return TELL_EXIT_CODE.partition('"')[2].partition(" $?")[0]
