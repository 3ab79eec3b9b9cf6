"""The batch desk: the one place from which the batch system is asked anything, in a thread of its own.

Good manners live here: at most one round of queries an interval, fewer if a round takes the batch system long or
nobody waits for the answer, submissions under a rate limit, exponential back-off when it does not answer or refuses
or when blocks end before a worker connects, and an end after repeated refusals or failed starts. A batch system that
is down costs nothing but time.
"""

from __future__ import annotations

import errno
import logging
import math
import threading
import time
from collections import deque
from dataclasses import dataclass, replace
from subprocess import TimeoutExpired
from typing import TYPE_CHECKING, TypeAlias

from freetrain_parsl.errors import BatchSystemError, ClusterGone, FreeTrainError
from freetrain_parsl.executor.batch.providers import complaint_of
from freetrain_parsl.windows.base import BlockState

if TYPE_CHECKING:
    from collections.abc import Callable

    from freetrain_parsl.executor.batch.providers import BlockSpec
    from freetrain_parsl.windows.base import Survey, WindowSource

logger = logging.getLogger(__name__)

# This host or its file systems fail, not the batch system, and may recover.
_OF_THIS_HOST = frozenset(
    (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)
)

__all__ = [
    "BatchSystemEnded",
    "BlockRefused",
    "BlockSubmitted",
    "JobSubmitter",
    "StartsFailed",
    "SubmissionsEnded",
    "SubmitterMessage",
]


@dataclass(frozen=True)
class BlockSubmitted:
    """The batch system took a block."""

    block: str
    job: str


@dataclass(frozen=True)
class BlockRefused:
    """The batch system did not take a block, for `reason`."""

    block: str
    reason: str


@dataclass(frozen=True)
class SubmissionsEnded:
    """The desk submits nothing any more, for `reason`: refusals or failed starts came in a row."""

    reason: str


@dataclass(frozen=True)
class BatchSystemEnded:
    """There is no batch system any more, nor any job, for `reason`."""

    reason: str


@dataclass(frozen=True)
class StartsFailed:
    """The last `count` attempts to start a block failed; all is well again if it is zero.

    Parameters
    ----------
    count, most
        Attempts in a row; after `most` nothing is submitted any more.
    pause
        Seconds until the next attempt.
    reason
        How the last of them ended.
    """

    count: int
    most: int
    pause: float = 0.0
    reason: str = ""


@dataclass(frozen=True)
class _FailedStart:
    """A block that ended before a worker had been connected for some seconds."""

    block: str
    job: str
    how: str


SubmitterMessage: TypeAlias = (
    "Survey | BlockSubmitted | BlockRefused | SubmissionsEnded | StartsFailed | BatchSystemEnded"
)


class JobSubmitter(threading.Thread):
    """Asks, submits and cancels; answers arrive through `post`, in this thread.

    Parameters
    ----------
    source
        Finds windows and the states of our jobs.
    launch
        Submits a block and returns its job id.
    post
        Takes what the desk has to tell; must not block.
    interval
        Least seconds between rounds of queries.
    submissions_per_minute
        Rate limit of `launch`.
    max_refusals
        Refusals in a row that waiting does not mend, after which nothing is submitted any more.
    job_prefix
        How the names of our jobs begin, by which a job is found whose submission ended in the dark.
    max_failed_blocks
        Attempts in a row to start a block that end before a worker connects, after which nothing is submitted any
        more. Blocks that were submitted side by side are one attempt.
    last_words
        Describes the output of a job that has ended; may read files.
    """

    _LONGEST_PAUSE = 300.0
    _DARKNESS = 600.0  # seconds for which a submission whose outcome is not known may still become a job
    _SHARE_OF_TIME = 0.1  # a slow batch system is not kept busy with us for more than this

    def __init__(
        self,
        source: WindowSource,
        launch: Callable[[BlockSpec], str],
        post: Callable[[SubmitterMessage], None],
        *,
        interval: float,
        submissions_per_minute: int,
        max_refusals: int,
        job_prefix: str,
        max_failed_blocks: int = 5,
        last_words: Callable[[str], str] = lambda _: "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(name="freetrain-batch-desk", daemon=True)
        self._source = source
        self._launch = launch
        self._post = post
        self._interval = interval
        self._limit = submissions_per_minute
        self._max_refusals = max_refusals
        self._job_prefix = job_prefix
        self._max_failed_blocks = max_failed_blocks
        self._last_words = last_words
        self._clock = clock
        self._condition = threading.Condition()
        self._orders: deque[BlockSpec] = deque()
        self._withdrawn: set[str] = set()
        self._watched: dict[str, str] = {}  # job -> block
        self._submitted_at: deque[float] = deque()
        self._failures = 0
        self._pauses = 0
        self._refusals = 0
        self._failed: deque[_FailedStart] = deque()  # not counted yet
        self._failed_starts = 0
        self._retry_after = 0.0
        self._last_failed = -math.inf  # when the last of them was counted
        self._probe: str | None = None  # the one block that is tried after failed starts
        self._submitted: dict[str, float] = {}  # block -> when
        self._submit_after = 0.0
        self._survey_at = 0.0
        self._cancel_after = 0.0
        self._resting = False
        self._closed = False
        self._unknown_outcome_until = -math.inf
        self._stopping = False

    def order(self, spec: BlockSpec) -> None:
        """Submit a block, soon."""
        with self._condition:
            self._orders.append(spec)
            self._condition.notify()

    def withdraw(self, block: str) -> None:
        """Cancel a block, whether it was submitted already or not."""
        with self._condition:
            self._withdrawn.add(block)
            self._condition.notify()

    def reject(self, block: str, reason: str) -> None:
        """Cancel a block that the batch system took, but will never start: as good as refused."""
        with self._condition:
            self._withdrawn.add(block)
            self._count_refusal(reason, passing=False)
            self._condition.notify()

    def forget(self, job: str) -> None:
        """Stop asking about a job that has ended."""
        with self._condition:
            block = self._watched.pop(job, None)
            if block is not None:
                self._submitted.pop(block, None)
            if block is not None and block == self._probe:
                self._probe = None
                self._condition.notify()

    def failed_to_start(self, block: str, job: str, how: str) -> None:
        """Count a block that ended, as `how` says, before a worker of it connected; to be called before `forget`."""
        with self._condition:
            if self._submitted.get(block, math.inf) >= self._last_failed:
                self._failed.append(_FailedStart(block, job, how))
                self._condition.notify()

    def works(self) -> None:
        """Note that a block has workers which stay: the attempts before it do not count any more."""
        with self._condition:
            self._probe = None
            if self._failed_starts and not self._closed:
                self._failed_starts, self._retry_after = 0, 0.0
                self._post(StartsFailed(0, self._max_failed_blocks))
            self._condition.notify()

    def stop_submitting(self) -> None:
        """Submit nothing any more; what was submitted stays."""
        with self._condition:
            self._closed = True
            self._submit_after = math.inf

    def rest(self, resting: bool) -> None:  # noqa: FBT001 - the state itself
        """Stop asking while nobody waits for nodes or holds any, or go on."""
        with self._condition:
            if resting != self._resting:
                self._resting = resting
                self._condition.notify()

    def close(self, timeout: float = 30.0) -> None:
        """Cancel every job of ours and end the thread."""
        with self._condition:
            self._stopping = True
            self._condition.notify()
        if self.is_alive():
            self.join(timeout)
        jobs, self._watched = set(self._watched), {}
        try:
            if self._clock() < self._unknown_outcome_until:
                jobs.update(self._source.find_jobs(self._job_prefix))
            if jobs:
                self._source.cancel(sorted(jobs))
        except FreeTrainError as error:
            logger.error(  # noqa: TRY400 - its one line tells all
                "could not cancel the jobs named %s*: %s; 'freetrain clean' removes them, or they end by themselves",
                self._job_prefix,
                error,
            )

    def run(self) -> None:
        """Serve orders and ask round by round until closed."""
        while True:
            with self._condition:
                while not self._stopping and (wait := self._next_due() - self._clock()) > 0:
                    self._condition.wait(None if math.isinf(wait) else wait)
                if self._stopping:
                    return
            self.serve()

    def serve(self) -> None:
        """Do what is due now."""
        with self._condition:
            failed, self._failed = self._failed, deque()
            withdrawn, self._withdrawn = self._withdrawn, set()
            dropped = [spec for spec in self._orders if spec.block in withdrawn]
            self._orders = deque(spec for spec in self._orders if spec.block not in withdrawn)
            allowance = 0 if failed else self._allowance()
            orders = [self._orders.popleft() for _ in range(min(len(self._orders), allowance))]
        for spec in dropped:
            self._post(BlockRefused(spec.block, "withdrawn before it was submitted"))
        self._cancel_blocks(withdrawn)
        if failed:
            self._count_failed_start(failed[-1])
        for spec in orders:
            self._submit(spec)
        if self._clock() >= self._survey_at and not (self._resting and not self._watched):
            self._survey()

    def _next_due(self) -> float:
        if self._failed:
            return 0.0
        if self._withdrawn:
            return self._cancel_after
        if self._orders and self._allowance():
            return 0.0
        survey_at = math.inf if self._resting and not self._watched else self._survey_at
        if not self._orders or self._probe is not None:
            return survey_at
        full_until = self._submitted_at[0] + 60.0 if len(self._submitted_at) >= self._limit else 0.0
        return min(survey_at, max(full_until, self._submit_after, self._retry_after))

    def _allowance(self) -> int:
        """How many blocks may be submitted now: none for a while after a refusal, else what the rate limit leaves.

        After a failed start blocks are tried one at a time.
        """
        now = self._clock()
        while self._submitted_at and self._submitted_at[0] <= now - 60.0:
            self._submitted_at.popleft()
        if now < max(self._submit_after, self._retry_after) or self._probe is not None:
            return 0
        left = self._limit - len(self._submitted_at)
        return min(1, left) if self._pauses or self._failed_starts else left

    def _submit(self, spec: BlockSpec) -> None:
        self._submitted_at.append(self._clock())
        try:
            job = self._launch(spec)
        except Exception as error:  # noqa: BLE001 - a provider may raise anything: the trainings go on
            self._refused(spec, error)
            return
        with self._condition:
            self._watched[job] = spec.block
            self._submitted[spec.block] = self._clock()
            if self._failed_starts:
                self._probe = spec.block
        self._post(BlockSubmitted(spec.block, job))

    def _end(self, error: ClusterGone) -> None:
        """Ask and submit nothing any more: there is nobody to be asked."""
        with self._condition:
            told, self._submit_after = math.isinf(self._survey_at), math.inf
            self._survey_at = math.inf
            self._watched.clear()
        if not told:
            self._post(BatchSystemEnded(str(error)))

    def _refused(self, spec: BlockSpec, error: Exception) -> None:
        if isinstance(error, ClusterGone):
            self._end(error)
            return
        refusal = self._source.explain_refusal(complaint_of(error))
        if isinstance(error, TimeoutExpired):
            self._unknown_outcome_until = self._clock() + self._DARKNESS
        self._post(BlockRefused(spec.block, refusal.reason))
        with self._condition:
            self._count_refusal(refusal.reason, passing=refusal.passing or _is_of_this_host(error))

    def _count_refusal(self, reason: str, *, passing: bool) -> None:
        """Submit more slowly, or, after repeated refusals that waiting does not mend, no more."""
        self._pauses += 1
        pause = min(self._interval * 2**self._pauses, self._LONGEST_PAUSE)
        self._submit_after = max(self._submit_after, self._clock() + pause)
        logger.warning("a block was refused: %s; no other for %.0f s", reason, pause)
        if not passing:
            self._refusals += 1
        if self._refusals == self._max_refusals:
            self._close_for_good(f"the batch system refused {self._refusals} blocks in a row: {reason}")

    def _count_failed_start(self, failed: _FailedStart) -> None:
        """Submit more slowly, or, after repeated failed starts, no more. Blocks of one attempt count once."""
        words = self._last_words(failed.job)
        reason = f"block {failed.block} (job {failed.job}) {failed.how}" + (f"; {words}" if words else "")
        with self._condition:
            now = self._clock()
            self._failed_starts += 1
            self._last_failed = now
            self._probe = None
            count, most = self._failed_starts, self._max_failed_blocks
            pause = min(self._interval * 2**count, self._LONGEST_PAUSE) if count < most else math.inf
            self._retry_after = now + pause
        logger.warning(
            "%d of %d attempts to start a block failed; %s; %s",
            count,
            most,
            reason,
            f"no other for {pause:.0f} s" if count < most else "no other is made",
        )
        self._post(StartsFailed(count, most, pause, reason))
        if count == most:
            attempts = "an attempt" if count == 1 else f"{count} attempts in a row"
            self._close_for_good(f"{attempts} to start a block failed; the last, {reason}")

    def _close_for_good(self, reason: str) -> None:
        self.stop_submitting()
        self._post(SubmissionsEnded(reason))

    def _cancel_blocks(self, blocks: set[str]) -> None:
        jobs = [job for job, block in self._watched.items() if block in blocks]
        if not jobs:
            return
        try:
            self._source.cancel(jobs)
        except BatchSystemError as error:
            with self._condition:
                self._withdrawn |= blocks
                self._cancel_after = self._clock() + self._interval
            logger.warning("could not cancel %s: %s", ", ".join(jobs), error)

    def _survey(self) -> None:
        with self._condition:
            jobs = list(self._watched)
        begin = self._clock()
        try:
            survey = self._source.survey(jobs)
            if lingering := [job for job, status in survey.blocks.items() if status.lingers]:
                self._source.cancel(lingering)
            if begin < self._unknown_outcome_until and (
                strays := self._source.find_jobs(self._job_prefix).keys() - set(jobs)
            ):
                logger.info("cancelling %s, submitted though nobody could tell", ", ".join(sorted(strays)))
                self._source.cancel(sorted(strays))
        except ClusterGone as error:
            pause = math.inf
            self._end(error)
        except Exception as error:  # noqa: BLE001 - a source may be anybody's code: whatever it raises, it is asked again
            self._failures += 1
            pause = min(self._interval * 2**self._failures, self._LONGEST_PAUSE)
            logger.warning("the batch system did not answer (%s); asking again in %.0f s", error, pause)
        else:
            if self._failures:
                logger.info("the batch system answers again")
            self._failures = 0
            if any(status.state is BlockState.RUNNING for status in survey.blocks.values()):
                self._pauses = self._refusals = 0
            took = self._clock() - begin
            pause = max(self._interval * survey.effort, took / self._SHARE_OF_TIME)
            self._post(replace(survey, took=took))
        with self._condition:
            self._survey_at = self._clock() + pause


def _is_of_this_host(error: BaseException | None) -> bool:
    """Whether a submission failed for want of descriptors, memory, processes or space, which passes."""
    while error is not None:
        if getattr(error, "errno", None) in _OF_THIS_HOST:
            return True
        error = error.__cause__ or error.__context__
    return False
