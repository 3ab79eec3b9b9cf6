"""Submission of blocks through Parsl's provider, and their states for Parsl's monitoring."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from parsl.executors.errors import ScalingFailed
from parsl.executors.high_throughput.executor import HighThroughputExecutor
from parsl.jobs.states import JobState, JobStatus

from freetrain_parsl.executor.batch.error_tail import last_words
from freetrain_parsl.executor.batch.providers import provider_for
from freetrain_parsl.executor.batch.submitter import BlockRefused
from freetrain_parsl.windows.base import Survey

if TYPE_CHECKING:
    from collections.abc import Mapping

    from freetrain_parsl.executor.node_kinds import NodeKind
    from freetrain_parsl.windows.system import BlockSpec

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
    kinds
        The kinds of nodes, by name.
    """

    def __init__(self, executor: HighThroughputExecutor, job_prefix: str, kinds: Mapping[str, NodeKind]) -> None:
        self._executor: Any = executor  # Parsl's attributes have no types
        self._job_prefix = job_prefix
        self._kinds = kinds
        self._commands: dict[str, str] = {}

    def compose_commands(self) -> None:
        """Compose the launch command of each kind of node, which starts as many workers as the kind has slots."""
        executor = self._executor
        template = executor.launch_cmd
        for name, kind in reversed(list(self._kinds.items())):  # the first kind is HTEX's own
            executor.max_workers_per_node, executor.available_accelerators = kind.slots_per_node, kind.accelerators
            executor.launch_cmd = template
            HighThroughputExecutor.initialize_scaling(executor)  # type: ignore[no-untyped-call]  # Parsl's
            self._commands[name] = executor.launch_cmd

    def launch(self, spec: BlockSpec) -> str:
        """Submit a block through a copy of the user's provider with this block's size and walltime; return its job."""
        command = self._commands[spec.node_kind].format(block_id=spec.block)  # as HTEX's own scaling does
        provider = self._kinds[spec.node_kind].provider
        job = provider_for(provider, spec).submit(command, 1, f"{self._job_prefix}block-{spec.block}")
        if not job:
            raise ScalingFailed(self._executor, "the provider did not return a job id")
        self._inform_monitoring(spec.block, JobState.PENDING)
        return str(job)

    def last_words(self, job: str) -> str:
        """Return the end of a job's error output, if the provider keeps it."""
        kept: list[dict[object, Any]] = [getattr(kind.provider, "resources", {}) for kind in self._kinds.values()]
        return last_words(next((resources[job] for resources in kept if job in resources), None))

    def follow(self, message: object) -> None:
        """Report the block states in a survey or a refusal to Parsl's monitoring; other messages are ignored."""
        if isinstance(message, Survey):
            for block, status in message.blocks.items():
                self._inform_monitoring(block, _JOB_STATES[status.state.name])
        elif isinstance(message, BlockRefused):
            self._inform_monitoring(message.block, JobState.FAILED, message.reason)

    def _inform_monitoring(self, block: str, state: JobState, text: str | None = None) -> None:
        known = self._executor._status  # noqa: SLF001 - HTEX's scaling, which would write it, is disabled
        if block in known and known[block].state == state:
            return
        known[block] = JobStatus(state, text)
        self._executor.send_monitoring_info({block: known[block]})
