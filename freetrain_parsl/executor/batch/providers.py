"""Submission of blocks through the user's Parsl provider, with one case for each batch system.

A provider submits blocks of one size. A shallow copy with other attributes submits a block of another size, which
the original's ``cancel`` and the batch system's commands can manage.
"""

from __future__ import annotations

import copy
import re
import shlex
import subprocess
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from parsl.launchers import SimpleLauncher, SingleNodeLauncher
from parsl.providers import PBSProProvider, SlurmProvider
from parsl.providers.errors import SubmitException
from parsl.providers.pbspro.template import template_string

from freetrain_parsl.errors import InvalidSettings
from freetrain_parsl.executor.batch.error_tail import TELL_EXIT_CODE
from freetrain_parsl.extensions.pbs.source import PbsWindowSource, pbs_walltime_request
from freetrain_parsl.windows.commands import COMMAND_COUNTS
from freetrain_parsl.windows.slurm.source import SlurmWindowSource

if TYPE_CHECKING:
    from parsl.providers.base import ExecutionProvider

    from freetrain_parsl.windows.base import WindowSource

__all__ = ["NODE_KIND", "BlockSpec", "complaint_of", "provider_for", "refuse_provider", "window_source_for"]

NODE_KIND = "FREETRAIN_NODE_KIND"
"""Environment variable with the kind of the node, where there are several kinds."""

_WARNING = "USR1@1"  # early warning of preemption for the slots, if the site sends one
_SHRINKS_TO_FIT = template_string.replace("walltime=$walltime", "$walltime")
_NODE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class BlockSpec:
    """The batch job of one block.

    Parameters
    ----------
    block
        Parsl's block id.
    nodes
        Names of the nodes that it is meant for.
    seconds
        Its walltime.
    least_seconds
        Shortest useful walltime, if the batch system may shorten it to fit.
    pinned
        Whether it must run on exactly these nodes, because others of the partition close too early.
    node_kind
        Kind of the nodes; empty where there is one kind only.
    avoided
        Nodes that are free but must not be used: slots could not start there. PBS cannot exclude nodes.
    """

    block: str
    nodes: tuple[str, ...]
    seconds: float
    least_seconds: float
    pinned: bool = True
    node_kind: str = ""
    avoided: tuple[str, ...] = ()


def provider_for(provider: Any, spec: BlockSpec) -> Any:
    """Copy a provider so that it submits this block."""
    changed: Any = copy.copy(provider)
    changed.nodes_per_block = len(spec.nodes)
    changed.walltime = _hours_minutes_seconds(spec.seconds)
    if hasattr(provider, "worker_init"):
        named = f"export {NODE_KIND}={spec.node_kind}\n" if spec.node_kind else ""
        changed.worker_init = f"{TELL_EXIT_CODE}\n{named}{provider.worker_init}"
    if hasattr(provider, "execute_wait"):
        changed.execute_wait = partial(_run, provider.cmd_timeout)
    if isinstance(provider, SlurmProvider):
        # If Slurm requeued it, it would start again with no driver waiting for it.
        lines = ["", "#SBATCH --no-requeue", f"#SBATCH --signal={_WARNING}"]
        if spec.pinned:
            lines.append(f"#SBATCH --nodelist={','.join(_checked(spec.nodes))}")
        elif spec.avoided:
            lines.append(f"#SBATCH --exclude={','.join(_checked(spec.avoided))}")
        changed.scheduler_options = provider.scheduler_options + "\n".join([*lines, ""])
    elif isinstance(provider, PBSProProvider):
        changed.walltime = pbs_walltime_request(min(spec.least_seconds, spec.seconds), spec.seconds)
        changed.template_string = _SHRINKS_TO_FIT
        # The job's shell must survive SIGTERM while the slots save, or PBS kills them with it. Launchers leave files in
        # their working directory, which would be the user's home.
        changed.worker_init = f"{changed.worker_init}\ntrap : TERM\ncd {shlex.quote(str(provider.script_dir))}"
        if "place=" not in provider.scheduler_options:
            changed.scheduler_options = f"{provider.scheduler_options}\n#PBS -l place=scatter\n"
    else:
        changed.nodelist = spec.nodes if spec.pinned or spec.avoided else None
    return changed


def window_source_for(provider: Any) -> WindowSource:
    """Return the window source of the provider's batch system."""
    if isinstance(provider, SlurmProvider):
        memory = None if provider.mem_per_node is None else int(provider.mem_per_node * 1024)
        return SlurmWindowSource(
            partition=provider.partition,
            account=provider.account,
            qos=provider.qos,
            constraint=provider.constraint,
            exclusive=provider.exclusive,
            cpus_per_node=provider.cores_per_node,
            gpus_per_node=provider.gpus_per_node,
            memory_per_node=memory,
        )
    if isinstance(provider, PBSProProvider):
        return PbsWindowSource(
            queue=provider.queue,
            account=provider.account,
            select_options=provider.select_options,
            cpus_per_node=provider.cpus_per_node,
        )
    source: WindowSource = provider.window_source()
    return source


def refuse_provider(provider: ExecutionProvider, windows: WindowSource | None, most_nodes: int | None) -> None:
    """Check that a provider can start slots on every node of a block, and that it can be queried for windows.

    Raises
    ------
    InvalidSettings
        It cannot; the message states the remedy.
    """
    known = isinstance(provider, (SlurmProvider, PBSProProvider))
    if windows is None and not known and not hasattr(provider, "window_source"):
        raise InvalidSettings(
            f"FreeTrainExecutor cannot query {type(provider).__name__} for windows; pass windows=a WindowSource"
        )
    launcher = getattr(provider, "launcher", None)
    if known and isinstance(launcher, (SimpleLauncher, SingleNodeLauncher)) and most_nodes != 1:
        better = "SrunLauncher()" if isinstance(provider, SlurmProvider) else "MpiExecLauncher()"
        raise InvalidSettings(
            f"{type(provider).__name__} with {type(launcher).__name__} starts workers on the first node of a block "
            f"only; pass launcher={better}, or set max_nodes_per_block=1 in the planner settings"
        )


def complaint_of(error: BaseException) -> str:
    """Return the batch system's own error message for a failed submission."""
    said = (
        [getattr(error, "stderr", None), getattr(error, "stdout", None)] if isinstance(error, SubmitException) else []
    )
    if isinstance(error, subprocess.TimeoutExpired):
        return f"{' '.join(error.cmd[:1])} did not end within {error.timeout:g} s{_last_words(error)}"
    lines = [line.strip() for text in said if text for line in str(text).splitlines() if line.strip()]
    return "; ".join(lines) if lines else f"{error}" or type(error).__name__


def _last_words(error: subprocess.TimeoutExpired) -> str:
    said = error.stderr or ""
    lines = (said.decode(errors="replace") if isinstance(said, bytes) else said).strip().splitlines()
    return f": {lines[-1].strip()}" if lines else ""


def _run(limit: float, command: str, timeout: float | None = None) -> tuple[int, str, str]:
    """Run a provider's submit command without the shell that the provider would use, and kill it on timeout.

    The provider's shell survives the timeout (``sbatch`` waits for minutes when the queue is full), and would later
    submit a block that the executor no longer expects.
    """
    arguments = shlex.split(command)
    COMMAND_COUNTS.add(arguments[0])
    done = subprocess.run(
        arguments,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout or limit,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def _checked(nodes: tuple[str, ...]) -> tuple[str, ...]:
    """Return `nodes`, checked to be safe in a batch script."""
    for name in nodes:
        if not _NODE_NAME.fullmatch(name):
            raise InvalidSettings(f"node name {name!r} cannot be used in a batch script")
    return nodes


def _hours_minutes_seconds(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    return f"{minutes // 60:02}:{minutes % 60:02}:{seconds:02}"
