"""The job submitter's limits on the batch system's load, with a fake clock and a batch system that is a list."""

from __future__ import annotations

import errno
import subprocess
import threading
import time
from typing import Any

import pytest
from parsl.providers.errors import SubmitException

from freetrain_parsl.errors import BatchSystemError, ClusterGone, CommandNotFound
from freetrain_parsl.executor.batch.submitter import BatchSystemEnded, BlockRefused, SubmissionsEnded
from freetrain_parsl.extensions.pbs import vocabulary as pbs
from freetrain_parsl.protocol import journal as record
from freetrain_parsl.windows.base import BlockState, BlockStatus
from freetrain_parsl.windows.slurm import vocabulary as slurm
from tests.executor.driver.submitter_bench import SubmitterBench

REFUSED = RuntimeError("account without rights")


def test_there_is_one_round_of_queries_an_interval() -> None:
    bench = SubmitterBench()
    for now, surveys in ((0.0, 1), (9.9, 1), (10.0, 2)):
        bench.turn(now)
        assert len(bench.batch.surveys) == surveys


def test_a_slow_batch_system_is_asked_less_often() -> None:
    """A round that took 3 s is followed by a pause of 30 s, not 10 s."""
    bench = SubmitterBench(interval=10.0)
    bench.turn()

    def three_seconds() -> None:
        bench.now += 3.0

    bench.batch.takes_seconds = three_seconds
    for now, surveys in ((10.0, 2), (42.9, 2), (43.0, 3)):
        bench.turn(now)
        assert len(bench.batch.surveys) == surveys


def test_nothing_is_asked_while_nobody_waits_for_the_answer() -> None:
    bench = SubmitterBench(interval=10.0)
    bench.turn()
    bench.submitter.rest(True)
    bench.turn(100.0)
    assert len(bench.batch.surveys) == 1
    bench.submitter.rest(False)
    bench.turn()
    assert len(bench.batch.surveys) == 2


@pytest.mark.parametrize("error", [BatchSystemError("no answer"), CommandNotFound("scancel is not on PATH")])
def test_a_cancellation_that_fails_is_tried_again(error: Exception) -> None:
    bench = SubmitterBench(interval=10.0)
    bench.batch.fails_to_cancel = error
    bench.request("a")
    bench.turn()
    bench.batch.cancels = False
    bench.submitter.withdraw("a")
    bench.turn()
    bench.batch.cancels = True
    bench.turn(9.9)
    assert bench.batch.cancelled == []
    bench.turn(10.0)
    assert bench.batch.cancelled == ["job-a"]


def test_submissions_beyond_the_rate_limit_wait_for_their_minute() -> None:
    bench = SubmitterBench(limit=2)
    bench.request("a", "b", "c")
    assert bench.turn() == ["a", "b"]
    assert bench.turn(59.9) == []
    assert bench.turn(60.0) == ["c"]
    assert bench.told(record.BlockSubmitted)[-1] == record.BlockSubmitted("c", "job-c")


def test_a_batch_system_that_does_not_answer_is_asked_ever_less(caplog) -> None:
    bench = SubmitterBench(interval=10.0)
    bench.batch.answers = False
    for now, surveys in ((0.0, 1), (19.9, 1), (20.0, 2), (59.9, 2), (60.0, 3)):
        bench.turn(now)
        assert len(bench.batch.surveys) == surveys
    assert "next query in" in caplog.text


@pytest.mark.parametrize("when", ["survey", "submission"])
def test_that_there_is_no_batch_system_any_more_is_told_once_and_nothing_is_asked_any_more(when) -> None:
    bench = SubmitterBench(interval=10.0)
    bench.turn()
    bench.batch.ended, bench.batch.refusal = True, ClusterGone("it has ended")
    if when == "submission":
        bench.request("0")
        bench.turn()
    else:
        bench.turn(10.0)
    assert bench.told(BatchSystemEnded) == [BatchSystemEnded("it has ended")]
    asked = len(bench.batch.surveys)
    bench.request("1")
    for now in (100.0, 10_000.0):
        bench.turn(now)
    assert len(bench.batch.surveys) == asked
    assert len(bench.told(BatchSystemEnded)) == 1


def test_a_refusal_is_told_with_its_reason() -> None:
    bench = SubmitterBench()
    bench.batch.refusal = REFUSED
    bench.request("a")
    bench.turn()
    assert bench.told(BlockRefused) == [BlockRefused("a", "account without rights")]


def test_after_a_refusal_submissions_come_one_by_one_and_ever_less_until_one_is_taken() -> None:
    bench = SubmitterBench(interval=10.0)
    bench.batch.refusal = REFUSED
    bench.request("a")
    bench.turn()
    bench.request("b", "c", "d")
    bench.turn(19.9)
    assert [told.block for told in bench.told(BlockRefused)] == ["a"]
    bench.turn(20.0)
    assert [told.block for told in bench.told(BlockRefused)] == ["a", "b"]
    bench.batch.refusal = None
    assert bench.turn(59.9) == []
    assert bench.turn(60.0) == ["c", "d"]


def refuse(bench: SubmitterBench, times: int) -> list[BlockRefused]:
    """Request blocks that are refused, each as soon as the submitter submits again."""
    for number in range(times):
        bench.request(f"r{number}")
        bench.turn(bench.now + 301.0)
    return bench.told(BlockRefused)


def test_repeated_refusals_end_with_a_clear_message() -> None:
    bench = SubmitterBench()
    bench.batch.refusal = REFUSED
    refuse(bench, 3)
    reason = "the batch system refused 3 blocks in a row: account without rights"
    assert bench.told(SubmissionsEnded) == [SubmissionsEnded(reason)]
    bench.batch.refusal = None
    bench.request("late")
    assert bench.turn(bench.now + 10_000.0) == [], "no further block is submitted"


@pytest.mark.parametrize("wrapped", [False, True], ids=["itself", "as a cause"])
def test_a_host_without_descriptors_memory_or_space_is_no_refusal(wrapped: bool) -> None:
    """Blocks are submitted less and less often until resources are available again; the training jobs continue."""
    bench = SubmitterBench()
    lack = OSError(errno.EMFILE, "Too many open files")
    bench.batch.refusal = lack
    if wrapped:
        bench.batch.refusal = RuntimeError("could not submit")
        bench.batch.refusal.__cause__ = lack
    assert len(refuse(bench, 6)) == 6
    assert not bench.told(SubmissionsEnded)


def test_blocks_that_are_taken_but_would_never_start_count_as_refused() -> None:
    """Some limits hold a job in the queue forever instead of refusing it; only a running block resets the count."""
    bench = SubmitterBench()
    for block in ("h0", "h1", "h2"):
        bench.batch.statuses[f"job-{block}"] = BlockStatus(BlockState.HELD)
        bench.request(block)
        assert bench.turn(bench.now + 301.0) == [block]
        bench.submitter.reject(block, "held: more time than the partition gives")
    bench.turn()
    assert bench.batch.cancelled == ["job-h0", "job-h1", "job-h2"]
    (ended,) = bench.told(SubmissionsEnded)
    assert "more time" in ended.reason


def test_a_full_queue_costs_nothing_but_time() -> None:
    bench = SubmitterBench()
    bench.batch.refusal, bench.batch.passing = RuntimeError("the queue is full"), True
    assert len(refuse(bench, 6)) == 6
    bench.batch.refusal = None
    bench.request("late")
    assert bench.turn(bench.now + 301.0) == ["late"]
    assert not bench.told(SubmissionsEnded)


def test_a_job_whose_submission_ended_in_the_dark_is_found_by_its_name_at_the_end() -> None:
    bench = SubmitterBench()
    bench.batch.refusal = subprocess.TimeoutExpired("sbatch", 10)
    bench.request("a")
    bench.turn()
    assert bench.told(BlockRefused)
    bench.batch.named = {"17": "freetrain.test.block-a.123", "18": "somebody's"}
    bench.submitter.close()
    assert bench.batch.cancelled == ["17"]


def test_a_job_whose_submission_ended_in_the_dark_is_cancelled_when_it_comes_to_light() -> None:
    """Known blocks are kept."""
    bench = SubmitterBench(interval=10.0)
    bench.request("known")
    assert bench.turn() == ["known"]
    bench.batch.refusal = subprocess.TimeoutExpired("sbatch", 10)
    bench.request("a")
    bench.turn()
    bench.batch.named = {"17": "freetrain.test.block-a.123", "job-known": "freetrain.test.block-known.122"}
    assert bench.batch.cancelled == []
    bench.turn(10.0)
    assert bench.batch.cancelled == ["17"]


def test_a_job_whose_answer_was_lost_is_cancelled_when_it_comes_to_light() -> None:
    """``sbatch: error: … Socket timed out on send/recv operation``: the controller may have taken it."""
    bench = SubmitterBench(interval=10.0)
    bench.batch.refusal, bench.batch.uncertain = SubmitException("a", "sbatch failed"), True
    bench.request("a")
    bench.turn()
    bench.batch.named = {"17": "freetrain.test.block-a.123"}
    bench.turn(10.0)
    assert bench.batch.cancelled == ["17"]


@pytest.mark.parametrize(
    ("explain", "complaint"),
    [
        (
            slurm.explain_complaint,
            "sbatch: error: Socket timed out on send/recv operation",
        ),
        (
            slurm.explain_complaint,
            "sbatch: error: Zero Bytes were transmitted or received",
        ),
        (pbs.explain_complaint, "qsub: End of File"),
    ],
)
def test_a_lost_answer_is_told_from_a_refusal(explain: Any, complaint: str) -> None:
    assert explain(complaint).uncertain
    assert explain(complaint).passing
    assert not explain("Connection refused").uncertain


def test_a_block_that_is_submitted_while_the_submitter_closes_is_cancelled_and_no_other_submitted() -> None:
    """Submissions take seconds at a busy controller, and `close` does not wait for all of them."""
    bench = SubmitterBench()
    bench.request("a", "b")
    bench.batch.on_launch = bench.submitter.close
    assert bench.turn() == ["a"]
    assert bench.batch.cancelled == ["job-a"]


def test_the_thread_survives_an_error_of_its_own(caplog) -> None:
    """Otherwise no block would be queried or cancelled any more, and nobody would notice."""
    surveyed = threading.Event()
    bench = SubmitterBench(interval=0.01)
    broken = [RuntimeError("a defect")]

    def post(_message) -> None:
        if broken:
            raise broken.pop()
        surveyed.set()

    bench.submitter._post = post
    bench.submitter._clock = time.monotonic
    bench.submitter.start()
    try:
        assert surveyed.wait(60.0)
    finally:
        bench.submitter.close()
    assert "the job submitter failed, and continues" in caplog.text


def test_a_block_withdrawn_before_its_submission_is_never_submitted() -> None:
    bench = SubmitterBench(limit=1)
    bench.request("a")
    assert bench.turn() == ["a"]
    bench.request("b")
    bench.submitter.withdraw("b")
    bench.turn()
    assert [told.block for told in bench.told(BlockRefused)] == ["b"]
    assert bench.turn(120.0) == []


def test_a_job_that_was_put_back_into_the_queue_is_cancelled() -> None:
    """It would start again with no driver waiting for it."""
    bench = SubmitterBench(interval=10.0)
    bench.request("a")
    bench.turn()
    bench.batch.statuses["job-a"] = BlockStatus(BlockState.PREEMPTED, lingers=True)
    bench.turn(10.0)
    assert bench.batch.cancelled == ["job-a"]


def test_closing_cancels_every_job_that_is_not_known_to_have_ended() -> None:
    bench = SubmitterBench()
    bench.request("a", "b")
    assert bench.turn() == ["a", "b"]
    bench.submitter.forget("a")
    bench.submitter.close()
    assert bench.batch.cancelled == ["job-b"]


def test_the_thread_carries_out_what_is_due_and_ends_when_closed() -> None:
    """It sleeps on a clock that stands still, so that only the order can wake it."""
    surveyed, submitted = threading.Event(), threading.Event()
    bench = SubmitterBench(interval=1000.0)
    bench.submitter._post = lambda message: (
        submitted if isinstance(message, record.BlockSubmitted) else surveyed
    ).set()
    bench.submitter.start()
    try:
        assert surveyed.wait(60.0)
        bench.request("a")
        assert submitted.wait(60.0)
    finally:
        bench.submitter.close()
    assert not bench.submitter.is_alive()
    assert bench.batch.launched == ["a"]
    assert bench.batch.cancelled == ["job-a"]
