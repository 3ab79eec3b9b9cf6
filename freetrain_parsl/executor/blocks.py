"""The batch desk: the one place from which the batch system is asked anything, in a thread of its own.

Good manners live here: at most one round of queries an interval, submissions under a rate limit, exponential
back-off when the batch system does not answer or refuses.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from freetrain_parsl.errors import BatchSystemError

if TYPE_CHECKING:
    from collections.abc import Callable

    from freetrain_parsl.windows.base import Survey, WindowSource

logger = logging.getLogger(__name__)

__all__ = ["BatchDesk", "BlockRefused", "BlockSpec", "BlockSubmitted", "DeskPost"]


@dataclass(frozen=True)
class BlockSpec:
    """One batch job of ours.

    Parameters
    ----------
    block
        Parsl's block id.
    nodes
        The nodes that it is meant for, by name.
    seconds
        Its walltime.
    """

    block: str
    nodes: tuple[str, ...]
    seconds: float


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


DeskPost: TypeAlias = "Survey | BlockSubmitted | BlockRefused"


class BatchDesk(threading.Thread):
    """Asks, submits and cancels; answers arrive through `post`, in this thread.

    Parameters
    ----------
    source
        Finds windows and the states of our jobs.
    launch
        Submits a block and returns its job id.
    cancel
        Cancels jobs by id.
    post
        Takes what the desk has to tell; must not block.
    interval
        Seconds between rounds of queries.
    submissions_per_minute
        Rate limit of `launch`.
    """

    _LONGEST_PAUSE = 300.0

    def __init__(
        self,
        source: WindowSource,
        launch: Callable[[BlockSpec], str],
        cancel: Callable[[list[str]], object],
        post: Callable[[DeskPost], None],
        *,
        interval: float,
        submissions_per_minute: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(name="freetrain-batch-desk", daemon=True)
        self._source = source
        self._launch = launch
        self._cancel = cancel
        self._post = post
        self._interval = interval
        self._limit = submissions_per_minute
        self._clock = clock
        self._condition = threading.Condition()
        self._orders: deque[BlockSpec] = deque()
        self._withdrawn: set[str] = set()
        self._watched: dict[str, str] = {}  # job -> block
        self._submitted_at: deque[float] = deque()
        self._failures = 0
        self._refusals = 0
        self._submit_after = 0.0
        self._survey_at = 0.0
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

    def forget(self, job: str) -> None:
        """Stop asking about a job that has ended."""
        with self._condition:
            self._watched.pop(job, None)

    def survey_soon(self) -> None:
        """Ask as soon as manners allow, since something has changed."""
        with self._condition:
            self._survey_at = min(self._survey_at, self._clock() + self._interval / 4)
            self._condition.notify()

    def close(self, timeout: float = 30.0) -> None:
        """Cancel every job of ours and end the thread."""
        with self._condition:
            self._stopping = True
            self._condition.notify()
        if self.is_alive():
            self.join(timeout)
        jobs = list(self._watched)
        if jobs:
            try:
                self._cancel(jobs)
            except Exception:  # a provider may raise anything; the exit must go on to the next clean-up
                logger.exception("could not cancel the jobs %s: they end at their walltime", ", ".join(jobs))

    def run(self) -> None:
        """Serve orders and ask round by round until closed."""
        while True:
            with self._condition:
                while not self._stopping and (wait := self._next_due() - self._clock()) > 0:
                    self._condition.wait(wait)
                if self._stopping:
                    return
                withdrawn, self._withdrawn = self._withdrawn, set()
                dropped = [spec for spec in self._orders if spec.block in withdrawn]
                self._orders = deque(spec for spec in self._orders if spec.block not in withdrawn)
                orders = [self._orders.popleft() for _ in range(min(len(self._orders), self._allowance()))]
            for spec in dropped:
                self._post(BlockRefused(spec.block, "withdrawn before it was submitted"))
            self._cancel_blocks(withdrawn)
            for spec in orders:
                self._submit(spec)
            if self._clock() >= self._survey_at:
                self._survey()

    def _next_due(self) -> float:
        if self._withdrawn or (self._orders and self._allowance()):
            return 0.0
        if not self._orders:
            return self._survey_at
        full_until = self._submitted_at[0] + 60.0 if len(self._submitted_at) >= self._limit else 0.0
        return min(self._survey_at, max(full_until, self._submit_after))

    def _allowance(self) -> int:
        """How many blocks may be submitted now: none for a while after a refusal, else what the rate limit leaves."""
        now = self._clock()
        while self._submitted_at and self._submitted_at[0] <= now - 60.0:
            self._submitted_at.popleft()
        if now < self._submit_after:
            return 0
        return 1 if self._refusals else self._limit - len(self._submitted_at)

    def _submit(self, spec: BlockSpec) -> None:
        self._submitted_at.append(self._clock())
        try:
            job = self._launch(spec)
        except Exception as error:  # noqa: BLE001 - a provider may raise anything: the block is refused, the trainings go on
            self._refusals += 1
            pause = min(self._interval * 2**self._refusals, self._LONGEST_PAUSE)
            self._submit_after = self._clock() + pause
            logger.warning(
                "block %s (%d nodes) was refused: %s; no other for %.0f s", spec.block, len(spec.nodes), error, pause
            )
            self._post(BlockRefused(spec.block, str(error)))
            return
        self._refusals = 0
        with self._condition:
            self._watched[job] = spec.block
        self._post(BlockSubmitted(spec.block, job))
        self.survey_soon()

    def _cancel_blocks(self, blocks: set[str]) -> None:
        jobs = [job for job, block in self._watched.items() if block in blocks]
        if not jobs:
            return
        try:
            self._cancel(jobs)
        except Exception as error:  # noqa: BLE001 - a provider may raise anything: the next survey tells what became of them
            logger.warning("could not cancel %s: %s", ", ".join(jobs), error)
        self.survey_soon()

    def _survey(self) -> None:
        with self._condition:
            jobs = list(self._watched)
        try:
            survey = self._source.survey(jobs)
        except BatchSystemError as error:
            self._failures += 1
            pause = min(self._interval * 2**self._failures, self._LONGEST_PAUSE)
            logger.warning("the batch system did not answer (%s); asking again in %.0f s", error, pause)
        else:
            if self._failures:
                logger.info("the batch system answers again")
            self._failures = 0
            pause = self._interval
            self._post(survey)
        with self._condition:
            self._survey_at = self._clock() + pause
