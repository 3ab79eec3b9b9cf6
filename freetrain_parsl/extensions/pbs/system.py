"""PBS Professional and OpenPBS as a batch system."""

from __future__ import annotations

import math
import shlex
import time
from typing import TYPE_CHECKING, Any, ClassVar

from freetrain_parsl.executor.batch.systems import ScriptSystem
from freetrain_parsl.extensions.pbs.source import PbsWindowSource, pbs_walltime_request
from freetrain_parsl.windows.commands import Commands
from freetrain_parsl.windows.machine import DraftHints, Machine, by_suitability, each_once, queue_of
from freetrain_parsl.windows.system import given_values

if TYPE_CHECKING:
    from collections.abc import Mapping

    from parsl.providers.base import ExecutionProvider

    from freetrain_parsl.windows.base import WindowSource
    from freetrain_parsl.windows.commands import Runner
    from freetrain_parsl.windows.system import BlockSpec, Keys, NodeResources

__all__ = ["PbsSystem"]


class PbsSystem(ScriptSystem):
    """PBS Professional and OpenPBS."""

    name: ClassVar = "pbs"
    title: ClassVar = "PBS"
    command: ClassVar = "pbsnodes"
    queue: ClassVar = "queue"
    options: ClassVar = ("partition", "account")
    launcher: ClassVar = "mpiexec"
    words: ClassVar = ("queue", "account", "select_options", "scheduler_options", "windows_in")
    directive: ClassVar = "#PBS"
    hints: ClassVar = DraftHints(
        "`qstat -Qf`, `pbsnodes -a`",
        "select_options: RESOURCE=VALUE",
        ("launcher_overrides", "--ppn 1", "one process per node"),
    )

    def handles(self, provider: ExecutionProvider) -> bool:
        """Return whether it is a provider of PBS."""
        from parsl.providers import PBSProProvider

        return isinstance(provider, PBSProProvider)

    def shape(self, provider: Any, spec: BlockSpec) -> None:
        """Let the walltime shrink to fit, and the job's shell survive the signal while slots save."""
        from parsl.providers.pbspro.template import template_string

        provider.walltime = pbs_walltime_request(min(spec.least_seconds, spec.seconds), spec.seconds)
        provider.template_string = template_string.replace("walltime=$walltime", "$walltime")
        # On SIGTERM the shell would end, and PBS would kill the slots with it. Launchers leave files in their working
        # directory, which would be the user's home.
        provider.worker_init += f"\ntrap : TERM\ncd {shlex.quote(str(provider.script_dir))}"
        if "place=" not in provider.scheduler_options:
            provider.scheduler_options += "\n#PBS -l place=scatter\n"

    def source_for(self, provider: Any) -> WindowSource:
        """Return the source of the windows of what the provider requests."""
        return PbsWindowSource(
            queue=provider.queue,
            account=provider.account,
            select_options=provider.select_options,
            cpus_per_node=provider.cpus_per_node,
        )

    def read_block(self, keys: Keys) -> dict[str, Any]:
        """Read the request; the launcher may bind processes, and the file may state that the queue is preempted."""
        block = super().read_block(keys)
        block |= given_values(launcher_bind=keys.text("launcher_bind"), preemptible=keys.flag("preemptible"))
        if "launcher_bind" in block and block.get("launcher", self.launcher) != self.launcher:
            raise keys.refusal("requires the launcher mpiexec", "launcher_bind")
        return block

    def source(self, block: Mapping[str, Any], node: NodeResources) -> WindowSource:
        """Return the source of the windows of a request."""
        return PbsWindowSource(
            queue=block.get("windows_in", block.get("queue")),
            account=block.get("account"),
            select_options=_select_options(block, node),
            cpus_per_node=node.cores,
            preemptible=block.get("preemptible"),
        )

    def _provider(self, block: Mapping[str, Any], node: NodeResources, **common: Any) -> ExecutionProvider:
        from parsl.providers import PBSProProvider

        return PBSProProvider(  # type: ignore[no-untyped-call]  # Parsl's
            **{key: block[key] for key in ("account", "queue") if key in block},
            select_options=_select_options(block, node),
            cpus_per_node=node.cores or 1,
            **common,
        )

    def describe(self, *, user: str | None = None, run: Runner | None = None) -> Machine:
        """Query queues and nodes; see `BatchSystem.describe`."""
        run, now = each_once(run or Commands()), time.time()

        def source_of(queue: str | None) -> PbsWindowSource:
            return PbsWindowSource(queue=queue, user=user, run=run, clock=lambda: now)

        state = source_of(None).state()
        queues = []
        for name in state.partitions:
            source = source_of(name)  # which knows of its own queue only whether it is preemptible
            queues.append(queue_of(source.state().partitions[name], state.nodes, source))
        return Machine(self.name, by_suitability(queues))


def _select_options(block: Mapping[str, Any], node: NodeResources) -> str:
    """Request the node's GPUs and memory, unless the file's own select options do."""
    options = [str(block.get("select_options", ""))]
    if node.gpus and "ngpus=" not in options[0]:
        options.append(f"ngpus={node.gpus}")
    if node.memory and "mem=" not in options[0]:
        options.append(f"mem={math.ceil(node.memory / 2**20)}mb")
    return ":".join(filter(None, options))
