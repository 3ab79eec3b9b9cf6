"""Slurm as a batch system."""

from __future__ import annotations

import math
import re
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from freetrain_parsl.errors import InvalidSettings
from freetrain_parsl.executor.batch.systems import ScriptSystem
from freetrain_parsl.windows.machine import DraftHints, Machine, by_suitability, each_once, queue_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from parsl.providers.base import ExecutionProvider

    from freetrain_parsl.windows.base import WindowSource
    from freetrain_parsl.windows.commands import Runner
    from freetrain_parsl.windows.system import BlockSpec, NodeResources

__all__ = ["SlurmSystem"]

_WARNING = "USR1@1"  # early warning of preemption for the slots, if the site sends one
_NODE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_NO_ACCOUNTING = ("accounting_storage/none", "(null)")  # the second: of newer versions


class SlurmSystem(ScriptSystem):
    """Slurm."""

    name: ClassVar = "slurm"
    title: ClassVar = "Slurm"
    command: ClassVar = "sinfo"
    queue: ClassVar = "partition"
    options: ClassVar = ("partition", "account", "qos", "constraint")
    launcher: ClassVar = "srun"
    words: ClassVar = ("partition", "account", "qos", "constraint", "gres", "scheduler_options", "windows_in")
    directive: ClassVar = "#SBATCH"
    hints: ClassVar = DraftHints(
        "`sinfo`, `scontrol show partition`",
        "constraint: FEATURE",
        ("# launcher_overrides", "--cpus-per-task={cpus}", ""),
        exclusive=True,
    )

    def handles(self, provider: ExecutionProvider) -> bool:
        """Return whether it is a Slurm provider."""
        from parsl.providers import SlurmProvider

        return isinstance(provider, SlurmProvider)

    def shape(self, provider: Any, spec: BlockSpec) -> None:
        """Name the nodes, and let the job end for good: requeued, it would start with no driver waiting for it."""
        lines = ["", "#SBATCH --no-requeue", f"#SBATCH --signal={_WARNING}"]
        if spec.pinned:
            lines.append(f"#SBATCH --nodelist={','.join(_checked(spec.nodes))}")
        elif spec.avoided:
            lines.append(f"#SBATCH --exclude={','.join(_checked(spec.avoided))}")
        provider.scheduler_options += "\n".join([*lines, ""])

    def source_for(self, provider: Any) -> WindowSource:
        """Return the source of the windows of what the provider requests."""
        from freetrain_parsl.windows.slurm.source import SlurmWindowSource

        return SlurmWindowSource(
            partition=provider.partition,
            account=provider.account,
            qos=provider.qos,
            constraint=provider.constraint,
            exclusive=provider.exclusive,
            cpus_per_node=provider.cores_per_node,
            gpus_per_node=provider.gpus_per_node,
            memory_per_node=None if provider.mem_per_node is None else int(provider.mem_per_node * 1024),
        )

    def source(self, block: Mapping[str, Any], node: NodeResources) -> WindowSource:
        """Return the source of the windows of a request; the provider itself would run `sacct` when it is made."""
        from freetrain_parsl.windows.slurm.source import SlurmWindowSource

        memory = _gibibytes(node)
        return SlurmWindowSource(
            partition=block.get("windows_in", block.get("partition")),
            account=block.get("account"),
            qos=block.get("qos"),
            constraint=block.get("constraint"),
            exclusive=node.exclusive,
            cpus_per_node=node.cores,
            gpus_per_node=node.gpus or None,
            memory_per_node=None if memory is None else memory * 1024,  # MiB, Slurm's unit
        )

    def _provider(self, block: Mapping[str, Any], node: NodeResources, **common: Any) -> ExecutionProvider:
        from parsl.providers import SlurmProvider

        return SlurmProvider(
            **{key: block[key] for key in ("partition", "account", "qos", "constraint", "gres") if key in block},
            cores_per_node=node.cores,
            gpus_per_node=node.gpus or None,
            mem_per_node=_gibibytes(node),
            exclusive=node.exclusive,
            **common,
        )

    def describe(self, *, user: str | None = None, run: Runner | None = None) -> Machine:
        """Query partitions, nodes, and the user's associations; see `BatchSystem.describe`."""
        from freetrain_parsl.windows.commands import Commands
        from freetrain_parsl.windows.slurm.queries import SlurmQueries
        from freetrain_parsl.windows.slurm.source import SlurmWindowSource, user_name

        user, run, now = user or user_name(), each_once(run or Commands()), time.time()
        queries = SlurmQueries(run, lambda: now)
        partitions, nodes, config = queries.partitions(), queries.nodes(afresh=False), queries.config()
        associations = queries.associations_of(user) or ()
        names = {name for row in associations for name in row[1:] if name}
        by_qos = config.get("PreemptType") == "preempt/qos"
        grants = {name: queries.preemption_of(name) for name in sorted(names)} if by_qos else {}
        preemptible = {name: grant[1] for name, grant in grants.items() if grant is not None and grant[0]}
        queues = []
        for partition in partitions.values():
            source = SlurmWindowSource(partition=partition.name, user=user, run=run, clock=lambda: now)
            qos = next((name for name in preemptible if not partition.allow_qos or name in partition.allow_qos), "")
            if qos:
                partition = replace(partition, preemptible=True, grace=preemptible[qos])  # noqa: PLW2901
            queues.append(queue_of(partition, nodes, source, qos))
        accounts = dict.fromkeys(row[0] for row in associations)
        return Machine(
            self.name,
            by_suitability(queues),
            config.get("ClusterName", ""),
            tuple(accounts),
            config.get("AccountingStorageType") not in _NO_ACCOUNTING,
        )


def _gibibytes(node: NodeResources) -> int | None:
    """Return the memory as the provider requests it, in whole GiB."""
    return None if node.memory is None else math.ceil(node.memory / 2**30)


def _checked(nodes: tuple[str, ...]) -> tuple[str, ...]:
    """Return `nodes`, checked to be safe in a batch script."""
    for name in nodes:
        if not _NODE_NAME.fullmatch(name):
            raise InvalidSettings(f"node name {name!r} cannot be used in a batch script")
    return nodes
