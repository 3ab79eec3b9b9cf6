"""Submission of blocks through Parsl's provider, and their states for Parsl's monitoring."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from parsl.executors.errors import ScalingFailed
from parsl.jobs.states import JobState, JobStatus

from freetrain_parsl.executor.batch.error_tail import last_words
from freetrain_parsl.executor.batch.providers import BlockSpec, provider_for
from freetrain_parsl.executor.batch.submitter import BlockRefused
from freetrain_parsl.windows.base import Survey

if TYPE_CHECKING:
    from parsl.executors.high_throughput.executor import HighThroughputExecutor

__all__ = ["HtexBlocks"]

_JOB_STATES = {
    "PENDING": JobState.PENDING,
    "HELD": JobState.HELD,
    "RUNNING": JobState.RUNNING,
    "COMPLETED": JobState.COMPLETED,
    "TIMED_OUT": JobState.TIMEOUT,
    "PREEMPTED": JobState.CANCELLED,
    "CANCELLED": JobState.CANCELLED,
    "FAILED": JobState.FAILED,
    "NODE_FAILED": JobState.FAILED,
    "UNKNOWN": JobState.UNKNOWN,
}


class HtexBlocks:
    """The blocks of an executor, each a batch job. Owned by the job submitter's thread.

    Parameters
    ----------
    executor
        The executor that owns them.
    job_prefix
        Prefix of the jobs' names.
    """

    def __init__(self, executor: HighThroughputExecutor, job_prefix: str) -> None:
        self._executor: Any = executor  # Parsl's attributes have no types
        self._job_prefix = job_prefix

    def launch(self, spec: BlockSpec) -> str:
        """Submit a block through a copy of the user's provider with this block's size and walltime; return its job."""
        executor = self._executor
        command = executor._get_launch_command(spec.block)  # noqa: SLF001 - as HTEX's own scaling does
        job = provider_for(executor.provider, spec).submit(command, 1, f"{self._job_prefix}block-{spec.block}")
        if not job:
            raise ScalingFailed(executor, "the provider did not return a job id")
        executor.blocks_to_job_id[spec.block] = job
        executor.job_ids_to_block[job] = spec.block
        self._inform_monitoring(spec.block, JobState.PENDING)
        return str(job)

    def last_words(self, job: str) -> str:
        """Return the end of a job's error output, if the provider keeps it."""
        resources: dict[object, Any] = getattr(self._executor.provider, "resources", {})
        return last_words(resources.get(job))

    def follow(self, message: object) -> None:
        """Report the block states in a survey or a refusal to Parsl's monitoring; other messages are ignored."""
        if isinstance(message, Survey):
            for job, status in message.blocks.items():
                self._inform_monitoring(self._executor.job_ids_to_block[job], _JOB_STATES[status.state.name])
        elif isinstance(message, BlockRefused):
            self._inform_monitoring(message.block, JobState.FAILED, message.reason)

    def _inform_monitoring(self, block: str, state: JobState, text: str | None = None) -> None:
        known = self._executor._status  # noqa: SLF001 - HTEX's scaling, which would write it, is disabled
        if block in known and known[block].state == state:
            return
        known[block] = JobStatus(state, text)
        self._executor.send_monitoring_info({block: known[block]})
