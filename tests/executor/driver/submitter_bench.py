"""A job submitter that a test steps on a clock of its own, and a batch system that is a list."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from freetrain_parsl.errors import BatchSystemError, ClusterGone
from freetrain_parsl.executor.batch.submitter import JobSubmitter
from freetrain_parsl.windows.base import BlockState, BlockStatus, Refusal, Survey, WindowSource
from freetrain_parsl.windows.system import BlockSpec

if TYPE_CHECKING:
    from collections.abc import Callable

_T = TypeVar("_T")


def spec(block: str) -> BlockSpec:
    return BlockSpec(block, ("n1",), 60.0, 30.0)


class FakeBatchSystem(WindowSource):
    """Accepts every block, or refuses or fails as set by the test; records the times of its calls."""

    def __init__(self) -> None:
        self.surveys: list[tuple[str, ...]] = []
        self.launched: list[str] = []
        self.cancelled: list[str] = []
        self.answers = True
        self.ended = False
        self.refusal: Exception | None = None
        self.passing = self.uncertain = False
        self.takes_seconds: Callable[[], None] = lambda: None
        self.on_launch: Callable[[], None] = lambda: None
        self.cancels = True
        self.fails_to_cancel: Exception = BatchSystemError("no answer")
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
        self.on_launch()
        return f"job-{spec.block}"

    def cancel(self, jobs) -> None:
        if not self.cancels:
            raise self.fails_to_cancel
        self.cancelled += jobs

    def find_jobs(self, prefix: str) -> dict[str, str]:
        return {job: name for job, name in self.named.items() if name.startswith(prefix)}

    def explain_refusal(self, complaint: str) -> Refusal:
        return Refusal(complaint, self.passing, self.uncertain)


class SubmitterBench:
    """A job submitter whose thread is not started: `turn` does the thread's work."""

    def __init__(self, *, interval: float = 10.0, limit: int = 100, **settings: Any) -> None:
        self.now = 0.0
        self.batch = FakeBatchSystem()
        self.posts: list[Any] = []
        self.submitter = JobSubmitter(
            self.batch,
            self.batch.launch,
            self.posts.append,
            interval=interval,
            submissions_per_minute=limit,
            max_refusals=3,
            job_prefix="freetrain.test.",
            clock=lambda: self.now,
            **settings,
        )

    def request(self, *blocks: str) -> None:
        for block in blocks:
            self.submitter.request(spec(block))

    def turn(self, now: float | None = None) -> list[str]:
        """Carry out what is due, at `now` if given; return the blocks that were submitted."""
        self.now = self.now if now is None else now
        before = len(self.batch.launched)
        for _ in range(100):
            if not self.submitter.step():
                return self.batch.launched[before:]
        raise AssertionError("something is always due: the thread would never rest")

    def told(self, kind: type[_T]) -> list[_T]:
        """Return the messages of one type."""
        return [post for post in self.posts if isinstance(post, kind)]
