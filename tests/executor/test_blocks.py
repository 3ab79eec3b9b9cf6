"""The job submitter's limits on the batch system's load, with a fake clock and a batch system that is a list."""

from __future__ import annotations

import errno
import subprocess
import threading
import time
from typing import TYPE_CHECKING

import pytest

from freetrain_parsl.errors import BatchSystemError, ClusterGone
from freetrain_parsl.executor.batch.providers import BlockSpec
from freetrain_parsl.executor.batch.submitter import (
    BatchSystemEnded,
    BlockRefused,
    BlockSubmitted,
    JobSubmitter,
    SubmissionsEnded,
)
from freetrain_parsl.windows.base import BlockState, BlockStatus, Refusal, Survey, WindowSource

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class _FakeBatchSystem(WindowSource):
    """Accepts every block, or refuses or fails as set by the test; records the times of its calls."""

    def __init__(self) -> None:
        self.surveys: list[tuple[str, ...]] = []
        self.launched: list[str] = []
        self.cancelled: list[str] = []
        self.answers = True
        self.ended = False
        self.refusal: Exception | None = None
        self.passing = False
        self.takes_seconds: Callable[[], None] = lambda: None
        self.cancels = True
        self.named: dict[str, str] = {}
        self.statuses: dict[str, BlockStatus] = {}

    def survey(self, job_ids=()) -> Survey:
        self.surveys.append(tuple(job_ids))
        self.takes_seconds()
        if self.ended:
            raise ClusterGone("it has ended")
        if not self.answers:
            raise BatchSystemError("no answer")
        return Survey(0.0, blocks={job: self.statuses.get(job, BlockStatus(BlockState.RUNNING)) for job in job_ids})

    def launch(self, spec: BlockSpec) -> str:
        if self.refusal is not None:
            raise self.refusal
        self.launched.append(spec.block)
        return f"job-{spec.block}"

    def cancel(self, jobs) -> None:
        if not self.cancels:
            raise BatchSystemError("no answer")
        self.cancelled += jobs

    def find_jobs(self, prefix: str) -> dict[str, str]:
        return {job: name for job, name in self.named.items() if name.startswith(prefix)}

    def explain_refusal(self, complaint: str) -> Refusal:
        return Refusal(complaint, self.passing)


class _Bench:
    def __init__(self, *, interval: float, limit: int) -> None:
        self.now = 0.0
        self.batch = _FakeBatchSystem()
        self.posts: list = []
        self.submitter = JobSubmitter(
            self.batch,
            self.batch.launch,
            self.posts.append,
            interval=interval,
            submissions_per_minute=limit,
            max_refusals=3,
            job_prefix="freetrain.test.",
            clock=lambda: self.now,
        )
        self.submitter.start()

    def at(self, now: float) -> None:
        """Move the clock and wake the submitter."""
        self.now = now
        with self.submitter._condition:
            self.submitter._condition.notify()

    def surveyed(self, count: int) -> bool:
        """Wait until the submitter has made that many queries and handled the last answer; it then reads the clock."""
        return self.until(lambda: len(self.batch.surveys) == count and self.submitter._survey_at > self.now)

    def until(self, condition: Callable[[], bool]) -> bool:
        """Wait for the submitter's thread."""
        end = time.monotonic() + 60.0
        while time.monotonic() < end:
            if condition():
                return True
            time.sleep(0.001)
        return False


@pytest.fixture
def make_bench() -> Iterator[Callable[..., _Bench]]:
    benches: list[_Bench] = []

    def make(*, interval: float = 10.0, limit: int = 2) -> _Bench:
        benches.append(_Bench(interval=interval, limit=limit))
        return benches[-1]

    yield make
    for bench in benches:
        bench.submitter.close(5)
        assert not bench.submitter.is_alive()


def spec(block: str) -> BlockSpec:
    return BlockSpec(block, ("n1",), 60.0, 30.0)


def test_there_is_one_round_of_queries_an_interval(make_bench) -> None:
    bench = make_bench()
    assert bench.surveyed(1)
    bench.at(9.9)
    time.sleep(0.05)
    assert len(bench.batch.surveys) == 1
    bench.at(10.0)
    assert bench.surveyed(2)


def test_a_slow_batch_system_is_asked_less_often(make_bench) -> None:
    """A round that took 3 s is followed by a pause of 30 s, not 10 s."""
    bench = make_bench(interval=10.0)
    assert bench.surveyed(1)

    def three_seconds() -> None:
        bench.now += 3.0

    bench.batch.takes_seconds = three_seconds
    bench.at(10.0)
    assert bench.surveyed(2)
    bench.at(42.0)
    time.sleep(0.05)
    assert len(bench.batch.surveys) == 2
    bench.at(43.0)
    assert bench.surveyed(3)


def test_nothing_is_asked_while_nobody_waits_for_the_answer(make_bench) -> None:
    bench = make_bench(interval=10.0)
    assert bench.surveyed(1)
    bench.submitter.rest(True)
    bench.at(100.0)
    time.sleep(0.05)
    assert len(bench.batch.surveys) == 1
    bench.submitter.rest(False)
    assert bench.surveyed(2)


def test_a_cancellation_that_fails_is_tried_again(make_bench) -> None:
    bench = make_bench(interval=10.0)
    bench.submitter.order(spec("a"))
    assert bench.until(lambda: bench.batch.launched == ["a"])
    bench.batch.cancels = False
    bench.submitter.withdraw("a")
    assert bench.until(lambda: bench.submitter._cancel_after == 10.0)
    bench.batch.cancels = True
    bench.at(10.0)
    assert bench.until(lambda: bench.batch.cancelled == ["job-a"])


def test_submissions_beyond_the_rate_limit_wait_for_their_minute(make_bench) -> None:
    bench = make_bench(limit=2)
    for block in "abc":
        bench.submitter.order(spec(block))
    assert bench.until(lambda: bench.batch.launched == ["a", "b"])
    bench.at(59.0)
    time.sleep(0.05)
    assert bench.batch.launched == ["a", "b"]
    bench.at(60.0)
    assert bench.until(lambda: bench.batch.launched == ["a", "b", "c"])
    assert [post for post in bench.posts if isinstance(post, BlockSubmitted)][-1] == BlockSubmitted("c", "job-c")


def test_a_batch_system_that_does_not_answer_is_asked_ever_less(make_bench, caplog) -> None:
    bench = make_bench(interval=10.0)
    bench.batch.answers = False
    assert bench.surveyed(1)
    bench.at(10.0)
    assert bench.surveyed(2)
    bench.at(29.0)  # 20 s after the first failure
    time.sleep(0.05)
    assert len(bench.batch.surveys) == 2
    bench.at(30.0)
    assert bench.surveyed(3)
    assert "next query in" in caplog.text


REFUSED = RuntimeError("account without rights")


@pytest.mark.parametrize("when", ["survey", "submission"])
def test_that_there_is_no_batch_system_any_more_is_told_once_and_nothing_is_asked_any_more(make_bench, when) -> None:
    bench = make_bench(interval=10.0)
    assert bench.surveyed(1)
    bench.batch.ended, bench.batch.refusal = True, ClusterGone("it has ended")
    if when == "submission":
        bench.submitter.order(spec("0"))
    else:
        bench.at(10.0)
    assert bench.until(lambda: BatchSystemEnded("it has ended") in bench.posts)
    asked = len(bench.batch.surveys)
    bench.submitter.order(spec("1"))
    for now in (100.0, 10_000.0):
        bench.at(now)
        time.sleep(0.02)
    assert len(bench.batch.surveys) == asked
    assert sum(isinstance(post, BatchSystemEnded) for post in bench.posts) == 1


def test_a_refusal_is_told_with_its_reason(make_bench) -> None:
    bench = make_bench()
    bench.batch.refusal = REFUSED
    bench.submitter.order(spec("a"))
    assert bench.until(lambda: BlockRefused("a", "account without rights") in bench.posts)


def test_after_a_refusal_submissions_come_one_by_one_and_ever_less_until_one_is_taken(make_bench) -> None:
    bench = make_bench(interval=10.0, limit=100)
    bench.batch.refusal = REFUSED
    bench.submitter.order(spec("a"))
    assert bench.until(lambda: len(bench.posts) >= 1 and bench.submitter._refusals == 1)
    for block in "bcd":
        bench.submitter.order(spec(block))
    bench.at(19.0)
    time.sleep(0.05)
    assert bench.submitter._refusals == 1
    bench.at(20.0)
    assert bench.until(lambda: bench.submitter._refusals == 2)
    bench.batch.refusal = None
    bench.at(59.0)
    time.sleep(0.05)
    assert bench.batch.launched == []
    bench.at(60.0)
    assert bench.until(lambda: bench.batch.launched == ["c", "d"])


def refuse(bench: _Bench, times: int) -> list[BlockRefused]:
    """Request blocks that are refused, each as soon as the submitter submits again."""

    def told() -> list[BlockRefused]:
        return [post for post in bench.posts if isinstance(post, BlockRefused)]

    for number in range(times):
        bench.submitter.order(spec(f"r{number}"))
        bench.at(bench.now + 301.0)
        assert bench.until(lambda number=number: len(told()) > number)
    return told()


def test_repeated_refusals_end_with_a_clear_message(make_bench) -> None:
    bench = make_bench()
    bench.batch.refusal = REFUSED
    refuse(bench, 3)
    closed = SubmissionsEnded("the batch system refused 3 blocks in a row: account without rights")
    assert bench.until(lambda: closed in bench.posts)
    bench.batch.refusal = None
    bench.submitter.order(spec("late"))
    bench.at(bench.now + 10_000.0)
    time.sleep(0.05)
    assert bench.batch.launched == [], "no further block is submitted"


@pytest.mark.parametrize("wrapped", [False, True], ids=["itself", "as a cause"])
def test_a_host_without_descriptors_memory_or_space_is_no_refusal(make_bench, wrapped: bool) -> None:
    """Blocks are submitted less and less often until resources are available again; the trainings continue."""
    bench = make_bench()
    lack = OSError(errno.EMFILE, "Too many open files")
    bench.batch.refusal = lack
    if wrapped:
        bench.batch.refusal = RuntimeError("could not submit")
        bench.batch.refusal.__cause__ = lack
    assert len(refuse(bench, 6)) == 6
    assert not any(isinstance(post, SubmissionsEnded) for post in bench.posts)


def test_blocks_that_are_taken_but_would_never_start_count_as_refused(make_bench) -> None:
    """Some limits hold a job in the queue forever instead of refusing it; only a running block resets the count."""
    bench = make_bench(limit=100)
    for number in range(3):
        block = f"h{number}"
        bench.batch.statuses[f"job-{block}"] = BlockStatus(BlockState.HELD)
        bench.submitter.order(spec(block))
        bench.at(bench.now + 301.0)
        assert bench.until(lambda block=block: block in bench.batch.launched)
        bench.submitter.reject(block, "held: more time than the partition gives")
    assert bench.until(lambda: bench.batch.cancelled == ["job-h0", "job-h1", "job-h2"])
    assert any(isinstance(post, SubmissionsEnded) and "more time" in post.reason for post in bench.posts)


def test_a_full_queue_costs_nothing_but_time(make_bench) -> None:
    bench = make_bench()
    bench.batch.refusal, bench.batch.passing = RuntimeError("the queue is full"), True
    assert len(refuse(bench, 6)) == 6
    bench.batch.refusal = None
    bench.submitter.order(spec("late"))
    bench.at(bench.now + 301.0)
    assert bench.until(lambda: bench.batch.launched == ["late"])
    assert not any(isinstance(post, SubmissionsEnded) for post in bench.posts)


def test_a_job_whose_submission_ended_in_the_dark_is_found_by_its_name_at_the_end(make_bench) -> None:
    bench = make_bench()
    bench.batch.refusal = subprocess.TimeoutExpired("sbatch", 10)
    bench.submitter.order(spec("a"))
    assert bench.until(lambda: any(isinstance(post, BlockRefused) for post in bench.posts))
    bench.batch.named = {"17": "freetrain.test.block-a.123", "18": "somebody's"}
    bench.submitter.close(5)
    assert bench.batch.cancelled == ["17"]


def test_a_job_whose_submission_ended_in_the_dark_is_cancelled_when_it_comes_to_light(make_bench) -> None:
    """Known blocks are kept."""
    bench = make_bench(interval=10.0, limit=100)
    bench.submitter.order(spec("known"))
    assert bench.until(lambda: bench.batch.launched == ["known"])
    bench.batch.refusal = subprocess.TimeoutExpired("sbatch", 10)
    bench.submitter.order(spec("a"))
    assert bench.until(lambda: any(isinstance(post, BlockRefused) for post in bench.posts))
    bench.batch.named = {"17": "freetrain.test.block-a.123", "job-known": "freetrain.test.block-known.122"}
    bench.at(10.0)
    assert bench.until(lambda: bench.batch.cancelled == ["17"])


def test_a_block_withdrawn_before_its_submission_is_never_submitted(make_bench) -> None:
    bench = make_bench(limit=1)
    bench.submitter.order(spec("a"))
    assert bench.until(lambda: bench.batch.launched == ["a"])
    bench.submitter.order(spec("b"))
    bench.submitter.withdraw("b")
    assert bench.until(lambda: any(isinstance(post, BlockRefused) for post in bench.posts))
    bench.at(120.0)
    time.sleep(0.05)
    assert bench.batch.launched == ["a"]


def test_a_job_that_was_put_back_into_the_queue_is_cancelled(make_bench) -> None:
    """It would start again with no driver waiting for it."""
    bench = make_bench(interval=10.0)
    bench.submitter.order(spec("a"))
    assert bench.until(lambda: bench.batch.launched == ["a"])
    bench.batch.statuses["job-a"] = BlockStatus(BlockState.PREEMPTED, lingers=True)
    bench.at(10.0)
    assert bench.until(lambda: bench.batch.cancelled == ["job-a"])


def test_closing_cancels_every_job_that_is_not_known_to_have_ended(make_bench) -> None:
    bench = make_bench()
    for block in "ab":
        bench.submitter.order(spec(block))
    assert bench.until(lambda: bench.batch.launched == ["a", "b"])
    bench.submitter.forget("job-a")
    bench.submitter.close(5)
    assert bench.batch.cancelled == ["job-b"]
    assert not any(thread is bench.submitter for thread in threading.enumerate())
