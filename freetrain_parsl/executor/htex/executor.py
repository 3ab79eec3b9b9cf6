"""Parsl's `HighThroughputExecutor`, with blocks that a planner requests and an interchange that is watched."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from parsl.executors.errors import ScalingFailed
from parsl.executors.high_throughput.executor import HighThroughputExecutor
from parsl.jobs.error_handlers import noop_error_handler
from parsl.jobs.states import JobState, JobStatus

from freetrain_parsl.executor.addresses import driver_addresses
from freetrain_parsl.executor.batch.providers import last_words, provider_for, window_source_for
from freetrain_parsl.executor.batch.submitter import BlockRefused
from freetrain_parsl.executor.htex.interchange_watch import guard_sockets
from freetrain_parsl.executor.htex.launch import EXEC
from freetrain_parsl.interpreters import module_command
from freetrain_parsl.windows.base import OUR_JOBS, Survey
from freetrain_parsl.windows.node_kinds import WindowsByKind

if TYPE_CHECKING:
    from collections.abc import Mapping

    from freetrain_parsl.executor.htex.node_start import NodeStart
    from freetrain_parsl.executor.node_kinds import NodeKind
    from freetrain_parsl.windows.base import WindowSource
    from freetrain_parsl.windows.system import BlockSpec

__all__ = ["INTERCHANGE_COMMAND", "PlannedHtex"]

INTERCHANGE_COMMAND = tuple(module_command("freetrain_parsl.executor.htex.interchange"))
_HEARTBEAT = 2  # seconds; also the time in which HTEX detects a worker process that died
_HEARTBEAT_TIMEOUT = 30  # seconds

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


class _Addresses(set[str]):
    """Addresses that HTEX joins by commas for its launch command, or formats: Parsl before June 2026."""

    def __str__(self) -> str:
        return ",".join(sorted(self))

    def __format__(self, specification: str) -> str:
        return format(str(self), specification)


class PlannedHtex(HighThroughputExecutor):
    """HTEX whose blocks are launched one by one, each with a size and a walltime of its own.

    Parameters
    ----------
    kinds
        The kinds of nodes, by name; the first one is HTEX's own.
    address
        Where workers reach this host; ``None``: at the first of its addresses that answers.
    job_tag
        Part of the names of this run's batch jobs.
    node_start
        How nodes start; ``None``: by the launch command alone.
    settings
        Other arguments of HTEX.
    """

    def __init__(
        self,
        kinds: Mapping[str, NodeKind],
        address: str | None,
        job_tag: str,
        node_start: NodeStart | None,
        **settings: Any,
    ) -> None:
        self._kinds = kinds
        self.job_tag = job_tag
        self.node_start = node_start
        self._commands: dict[str, str] = {}
        super().__init__(
            provider=next(iter(kinds.values())).provider,
            interchange_launch_cmd=INTERCHANGE_COMMAND,
            address=address or "127.0.0.1",  # else HTEX searches for addresses, partly on the internet
            cores_per_worker=1e-3,  # the number of slots is ours, not derived by HTEX from the cores
            heartbeat_period=_HEARTBEAT,
            heartbeat_threshold=_HEARTBEAT_TIMEOUT,
            block_error_handler=noop_error_handler,
            **settings,
        )
        self.address = address
        self.all_addresses = _Addresses(driver_addresses() if address is None else {address})
        # HTEX fails the whole executor if one node has another Python; the driver checks each slot's `Hello` instead.
        self._check_python_mismatch = False

    @property
    def status_polling_interval(self) -> int:
        """Zero, to disable Parsl's poller and strategies: this executor manages its blocks itself."""
        return 0

    def monitor_resources(self) -> bool:
        """Return false: Parsl's resource monitoring forks inside the worker, which torch's threads do not survive."""
        return False

    def scale_out_facade(self, n: int) -> list[str]:  # noqa: ARG002 - Parsl's signature
        """Do nothing: the planner requests blocks."""
        return []

    def scale_in_facade(self, n: int, max_idletime: float | None = None) -> list[str]:  # noqa: ARG002 - Parsl's signature
        """Do nothing: the planner releases blocks, and `shutdown` ends the remaining ones."""
        return []

    def start(self) -> None:
        """Start the providers and HTEX's interchange."""
        script_dir = getattr(self.provider, "script_dir", None)  # set by Parsl
        for provider in self._providers:
            if hasattr(provider, "script_dir"):
                provider.script_dir = script_dir
            if hasattr(provider, "ensure_started"):
                provider.ensure_started()
        super().start()  # type: ignore[no-untyped-call]  # Parsl's

    def shutdown(self, timeout: float = 10.0) -> None:
        """Stop HTEX's interchange and threads, and the providers."""
        super().shutdown(timeout)
        for provider in self._providers:
            if hasattr(provider, "close"):
                provider.close()

    def window_source(self) -> WindowSource:
        """Return the source of the windows of all kinds of nodes; available once the executor has started."""
        sources = {name: kind.windows or window_source_for(kind.provider) for name, kind in self._kinds.items()}
        return sources[""] if "" in sources else WindowsByKind(sources)

    @property
    def _providers(self) -> list[Any]:
        return [kind.provider for kind in self._kinds.values()]

    def _start_result_queue_thread(self) -> None:
        """Start HTEX's thread; called by HTEX once it has made its sockets."""
        guard_sockets(self)
        super()._start_result_queue_thread()  # type: ignore[no-untyped-call]  # Parsl's

    def initialize_scaling(self) -> None:
        """Compose the launch command of each kind of node, which starts as many workers as the kind has slots."""
        template = self.launch_cmd
        for name, kind in reversed(list(self._kinds.items())):
            self.max_workers_per_node, self.available_accelerators = kind.slots_per_node, kind.accelerators
            self.launch_cmd = template
            super().initialize_scaling()  # type: ignore[no-untyped-call]  # Parsl's
            self._commands[name] = self.launch_cmd

    # The job submitter's thread.

    @property
    def job_prefix(self) -> str:
        """Prefix of the names of this run's batch jobs."""
        return f"{OUR_JOBS}{self.label}.{self.job_tag}."

    def _launch(self, spec: BlockSpec) -> str:
        """Submit a block through a copy of the user's provider with this block's size and walltime; return its job."""
        command = self._commands[spec.node_kind].format(block_id=spec.block)  # as HTEX's own scaling does
        provider = self._kinds[spec.node_kind].provider
        ready = provider_for(provider, spec)
        if (start := self.node_start) is not None and (words := start.words(spec.size)):
            command = command.replace(f"{EXEC} ", f"{EXEC} {' '.join(words)} ", 1)
            if preparation := start.preparation(spec.size, str(getattr(provider, "label", ""))):
                ready.worker_init = f"{ready.worker_init}\n{preparation}"
        job = ready.submit(command, 1, f"{self.job_prefix}block-{spec.block}")
        if not job:
            raise ScalingFailed(self, "the provider did not return a job id")
        self._inform_monitoring(spec.block, JobState.PENDING)
        return str(job)

    def _last_words(self, job: str) -> str:
        """Return the end of a job's error output, if the provider keeps it."""
        kept: list[dict[object, Any]] = [getattr(provider, "resources", {}) for provider in self._providers]
        return last_words(next((resources[job] for resources in kept if job in resources), None))

    def _follow(self, message: object) -> None:
        """Report the block states in a survey or a refusal to Parsl's monitoring; other messages are ignored."""
        if isinstance(message, Survey):
            for block, status in message.blocks.items():
                self._inform_monitoring(block, _JOB_STATES[status.state.name])
        elif isinstance(message, BlockRefused):
            self._inform_monitoring(message.block, JobState.FAILED, message.reason)

    def _inform_monitoring(self, block: str, state: JobState, text: str | None = None) -> None:
        known = self._status  # HTEX's scaling, which would write it, is disabled
        if block in known and known[block].state == state:
            return
        known[block] = JobStatus(state, text)
        self.send_monitoring_info({block: known[block]})
