"""The job submitter: the only component that talks to the batch system, in a separate thread.

It limits the load on the batch system: at most one round of queries per interval, fewer if a round takes long or no
answer is needed; a rate limit for submissions; exponential back-off when the batch system does not answer or refuses,
or when blocks end before a worker connects; and no further submissions after repeated refusals or failed starts. If
the batch system is down, the executor only loses time.
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

from freetrain_parsl.errors import ClusterGone, DriverSuperseded, FreeTrainError
from freetrain_parsl.executor.batch.providers import complaint_of
from freetrain_parsl.protocol import journal as record
from freetrain_parsl.windows.base import BlockState

if TYPE_CHECKING:
    from collections.abc import Callable

    from freetrain_parsl.windows.base import Survey, WindowSource
    from freetrain_parsl.windows.system import BlockSpec

logger = logging.getLogger(__name__)

# Errors of this host or its file systems, not of the batch system; they may be temporary.
_OF_THIS_HOST = frozenset(
    (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)
)

__all__ = [
    "BatchSystemEnded",
    "BlockRefused",
    "JobSubmitter",
    "StartsFailed",
    "SubmissionsEnded",
    "SubmitterMessage",
]


@dataclass(frozen=True)
class BlockRefused:
    """The batch system refused a block, for `reason`."""

    block: str
    reason: str


@dataclass(frozen=True)
class SubmissionsEnded:
    """No further block is submitted, for `reason`: too many consecutive refusals or failed starts."""

    reason: str


@dataclass(frozen=True)
class BatchSystemEnded:
    """The batch system, and with it every job, is gone, for `reason`."""

    reason: str


@dataclass(frozen=True)
class StartsFailed:
    """The last `count` of at most `most` attempts in a row to start a block failed; zero: a block has started again.

    The next attempt is in `pause` seconds; `reason` says how the last one ended.
    """

    count: int
    most: int
    pause: float = 0.0
    reason: str = ""


@dataclass(frozen=True)
class _Job:
    """The batch job of a block, until the driver forgets it."""

    id: str
    submitted: float


SubmitterMessage: TypeAlias = (
    "Survey | record.BlockSubmitted | BlockRefused | SubmissionsEnded | StartsFailed | BatchSystemEnded"
)


class JobSubmitter:
    """A thread that queries, submits and cancels, and passes the results to `post`.

    Parameters
    ----------
    launch
        Submits a block and returns its job id.
    post
        Called with each `SubmitterMessage`; must not block.
    interval
        Minimum seconds between rounds of queries.
    submissions_per_minute, max_refusals, max_failed_blocks
        See `RateLimits`. Blocks that were submitted at the same time count as one attempt to start.
    job_prefix
        Prefix of this executor's job names; finds jobs whose submission had an unknown outcome.
    last_words
        Describes the output of a job that has ended; may read files.
    require
        Raises an exception unless this driver may still submit and cancel jobs: another one may have replaced it, whose
        jobs have the same prefix; may block.
    """

    _LONGEST_PAUSE = 300.0
    _DARKNESS = 600.0  # seconds for which a submission with unknown outcome may still become a job
    _SHARE_OF_TIME = 0.1  # maximum share of time for which queries keep the batch system busy

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
        require: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._thread = threading.Thread(target=self._run, name="freetrain-job-submitter", daemon=True)
        self._source = source
        self._launch = launch
        self._post = post
        self._interval = interval
        self._limit = submissions_per_minute
        self._max_refusals = max_refusals
        self._job_prefix = job_prefix
        self._max_failed_blocks = max_failed_blocks
        self._last_words = last_words
        self._require = require
        self._clock = clock
        self._condition = threading.Condition()
        self._requests: deque[BlockSpec] = deque()
        self._withdrawn: set[str] = set()
        self._jobs: dict[str, _Job] = {}  # by block
        self._submitted_at: deque[float] = deque()
        self._failures = 0
        self._pauses = 0
        self._refusals = 0
        self._failed: tuple[str, str, str] | None = None  # block, job, how; the last one that is not counted yet
        self._failed_starts = 0
        self._retry_after = 0.0
        self._last_failed = -math.inf  # when the last of them was counted
        self._probe: str | None = None  # the single block that is tried after failed starts
        self._submit_after = 0.0
        self._survey_at = 0.0
        self._cancel_after = 0.0
        self._resting = False
        self._closed = False
        self._unknown_outcome_until = -math.inf
        self._stopping = False

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def is_alive(self) -> bool:
        """Return whether the thread runs."""
        return self._thread.is_alive()

    def request(self, spec: BlockSpec) -> None:
        """Queue a block for submission."""
        with self._condition:
            self._requests.append(spec)
            self._condition.notify()

    def withdraw(self, block: str) -> None:
        """Cancel a block, whether or not it has been submitted."""
        with self._condition:
            self._withdrawn.add(block)
            self._condition.notify()

    def reject(self, block: str, reason: str) -> None:
        """Cancel a block that the batch system accepted but will never start, and count it as refused."""
        with self._condition:
            self._withdrawn.add(block)
            self._count_refusal(reason, passing=False)
            self._condition.notify()

    def forget(self, block: str) -> None:
        """Stop querying the state of a block's job, which has ended."""
        with self._condition:
            self._jobs.pop(block, None)
            if block == self._probe:
                self._probe = None
                self._condition.notify()

    def failed_to_start(self, block: str, how: str) -> None:
        """Count a block that ended, as `how` describes, before any of its workers connected; call before `forget`."""
        with self._condition:
            job = self._jobs.get(block)
            if job is not None and job.submitted >= self._last_failed:
                self._failed = (block, job.id, how)
                self._condition.notify()

    def works(self) -> None:
        """Reset the count of failed starts: a block has workers that stay alive."""
        with self._condition:
            self._probe = None
            if self._failed_starts and not self._closed:
                self._failed_starts, self._retry_after = 0, 0.0
                self._post(StartsFailed(0, self._max_failed_blocks))
            self._condition.notify()

    def stop_submitting(self) -> None:
        """Submit no further block; submitted ones are kept."""
        with self._condition:
            self._closed = True
            self._submit_after = math.inf

    def rest(self, resting: bool) -> None:  # noqa: FBT001 - the state itself
        """Suspend the queries while no training job or task needs nodes and no block exists, or resume them."""
        with self._condition:
            if resting != self._resting:
                self._resting = resting
                self._condition.notify()

    def close(self, timeout: float = 30.0) -> None:
        """Cancel all jobs of this executor and end the thread."""
        with self._condition:
            self._stopping = True
            self._condition.notify()
        if self.is_alive():
            self._thread.join(timeout)
        if self.is_alive():  # it submits a block that is not known yet
            self._unknown_outcome_until = self._clock() + self._DARKNESS
        jobs, self._jobs = {job.id for job in self._jobs.values()}, {}
        try:
            if self._clock() < self._unknown_outcome_until and self._may_act():
                jobs.update(self._source.find_jobs(self._job_prefix))
            if jobs:
                self._source.cancel(sorted(jobs))
        except FreeTrainError as error:
            logger.error(  # noqa: TRY400 - its one line is enough
                "could not cancel the jobs named %s*: %s; 'freetrain clean' cancels them, or they time out",
                self._job_prefix,
                error,
            )

    def _may_act(self) -> bool:
        """Return whether jobs with the prefix of the run are this driver's."""
        try:
            self._require()
        except (DriverSuperseded, OSError) as error:
            logger.warning("jobs named %s* are left alone: %s", self._job_prefix, error)
            return False
        return True

    def _run(self) -> None:
        """Submit blocks and query the batch system until closed."""
        while True:
            with self._condition:
                while not self._stopping and (wait := self._next_due() - self._clock()) > 0:
                    self._condition.wait(None if math.isinf(wait) else wait)
                if self._stopping:
                    return
            try:
                self.step()
            except Exception:  # without this thread nothing would be queried, submitted or cancelled any more
                logger.exception("the job submitter failed, and continues")
                with self._condition:
                    self._condition.wait(self._interval)

    def step(self) -> bool:
        """Carry out everything that is due now, without waiting; return whether anything was due.

        Only the thread calls this, once it is started.
        """
        with self._condition:
            if self._next_due() > self._clock():
                return False
            failed, self._failed = self._failed, None
            withdrawn, self._withdrawn = self._withdrawn, set()
            dropped = [spec for spec in self._requests if spec.block in withdrawn]
            self._requests = deque(spec for spec in self._requests if spec.block not in withdrawn)
            allowance = 0 if failed is not None else self._allowance()
            requests = [self._requests.popleft() for _ in range(min(len(self._requests), allowance))]
        for spec in dropped:
            self._post(BlockRefused(spec.block, "withdrawn before it was submitted"))
        self._cancel_blocks(withdrawn)
        if failed is not None:
            self._count_failed_start(*failed)
        for spec in requests:
            if self._stopping:
                return True
            self._submit(spec)
        if self._clock() >= self._survey_at and not (self._resting and not self._jobs):
            self._survey()
        return True

    def _next_due(self) -> float:
        if self._failed is not None:
            return 0.0
        if self._withdrawn:
            return self._cancel_after
        if self._requests and self._allowance():
            return 0.0
        survey_at = math.inf if self._resting and not self._jobs else self._survey_at
        if not self._requests or self._probe is not None:
            return survey_at
        full_until = self._submitted_at[0] + 60.0 if len(self._submitted_at) >= self._limit else 0.0
        return min(survey_at, max(full_until, self._submit_after, self._retry_after))

    def _allowance(self) -> int:
        """Return how many blocks may be submitted now: none for some time after a refusal, else within the rate limit.

        After a failed start, blocks are tried one at a time.
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
            self._require()
            job = self._launch(spec)
        except Exception as error:  # noqa: BLE001 - a provider may raise any exception: the training jobs continue
            self._refused(spec, error)
            return
        with self._condition:
            self._jobs[spec.block] = _Job(job, self._clock())
            if self._failed_starts:
                self._probe = spec.block
            stopping = self._stopping
        if stopping:  # `close` may no longer wait
            self._cancel_blocks({spec.block})
        self._post(record.BlockSubmitted(spec.block, job))

    def _end(self, error: ClusterGone) -> None:
        """Stop querying and submitting: the batch system is gone."""
        with self._condition:
            posted, self._submit_after = math.isinf(self._survey_at), math.inf
            self._survey_at = math.inf
            self._jobs.clear()
        if not posted:
            self._post(BatchSystemEnded(str(error)))

    def _refused(self, spec: BlockSpec, error: Exception) -> None:
        if isinstance(error, ClusterGone):
            self._end(error)
            return
        refusal = self._source.explain_refusal(complaint_of(error))
        if isinstance(error, TimeoutExpired) or refusal.uncertain:
            self._unknown_outcome_until = self._clock() + self._DARKNESS
        self._post(BlockRefused(spec.block, refusal.reason))
        with self._condition:
            self._count_refusal(refusal.reason, passing=refusal.passing or _is_of_this_host(error))

    def _count_refusal(self, reason: str, *, passing: bool) -> None:
        """Reduce the submission rate, or, after repeated permanent rejections, stop submitting."""
        self._pauses += 1
        pause = min(self._interval * 2**self._pauses, self._LONGEST_PAUSE)
        self._submit_after = max(self._submit_after, self._clock() + pause)
        logger.warning("a block was refused: %s; no further submission for %.0f s", reason, pause)
        if not passing:
            self._refusals += 1
        if self._refusals == self._max_refusals:
            self._close_for_good(f"the batch system refused {self._refusals} blocks in a row: {reason}")

    def _count_failed_start(self, block: str, job: str, how: str) -> None:
        """Reduce the submission rate, or, after repeated failed starts, stop. Blocks of one attempt count once."""
        words = self._last_words(job)
        reason = f"block {block} (job {job}) {how}" + (f"; {words}" if words else "")
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
            f"no further attempt for {pause:.0f} s" if count < most else "no further attempt is made",
        )
        self._post(StartsFailed(count, most, pause, reason))
        if count == most:
            attempts = "an attempt" if count == 1 else f"{count} attempts in a row"
            self._close_for_good(f"{attempts} to start a block failed; the last, {reason}")

    def _close_for_good(self, reason: str) -> None:
        self.stop_submitting()
        self._post(SubmissionsEnded(reason))

    def _cancel_blocks(self, blocks: set[str]) -> None:
        with self._condition:
            jobs = [job.id for block, job in self._jobs.items() if block in blocks]
        if not jobs:
            return
        try:
            self._source.cancel(jobs)
        except Exception as error:  # noqa: BLE001 - a source may raise any exception: it is tried again
            with self._condition:
                self._withdrawn |= blocks
                self._cancel_after = self._clock() + self._interval
            logger.warning("could not cancel %s: %s", ", ".join(jobs), error)

    def _survey(self) -> None:
        with self._condition:
            jobs = {job.id: block for block, job in self._jobs.items()}
        begin = self._clock()
        try:
            survey = self._source.survey(list(jobs))
            if lingering := [job for job, status in survey.blocks.items() if status.lingers]:
                self._source.cancel(lingering)
            if (
                begin < self._unknown_outcome_until
                and self._may_act()
                and (strays := self._source.find_jobs(self._job_prefix).keys() - jobs.keys())
            ):
                logger.info("cancelling %s: submitted by a command that timed out", ", ".join(sorted(strays)))
                self._source.cancel(sorted(strays))
        except ClusterGone as error:
            pause = math.inf
            self._end(error)
        except Exception as error:  # noqa: BLE001 - a source may raise any exception: it is queried again
            self._failures += 1
            pause = min(self._interval * 2**self._failures, self._LONGEST_PAUSE)
            logger.warning("the batch system did not answer (%s); next query in %.0f s", error, pause)
        else:
            if self._failures:
                logger.info("the batch system answers again")
            self._failures = 0
            if any(status.state is BlockState.RUNNING for status in survey.blocks.values()):
                self._pauses = self._refusals = 0
            took = self._clock() - begin
            pause = max(self._interval * survey.effort, took / self._SHARE_OF_TIME)
            blocks = {jobs[job]: status for job, status in survey.blocks.items()}
            self._post(replace(survey, blocks=blocks, took=took))
        with self._condition:
            self._survey_at = self._clock() + pause


def _is_of_this_host(error: BaseException | None) -> bool:
    """Return whether a submission failed for a temporary lack of descriptors, memory, processes or disk space."""
    while error is not None:
        if getattr(error, "errno", None) in _OF_THIS_HOST:
            return True
        error = error.__cause__ or error.__context__
    return False
