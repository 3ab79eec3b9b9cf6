"""The configuration of a Slurm on one machine's loopback, as text; pure functions.

Several nodes on one machine, without root, systemd or cgroups, need: one ``slurmd -N NAME`` per node, each with its own
port; ``config_overrides``, so that a node has the hardware given in the configuration; a process tracker without kernel
support; a private munged.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from freetrain_parsl.errors import InvalidSettings

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

__all__ = ["PARTITIONS", "ClusterPlan", "LoopbackPartition", "node_names", "slurm_conf", "slurmdbd_conf"]


@dataclass(frozen=True)
class LoopbackPartition:
    """A partition of a `LoopbackSlurm`.

    Parameters
    ----------
    name
        Name.
    nodes
        A host list; ``ALL`` for all.
    tier
        Jobs of a partition with a larger tier have priority.
    preempt
        How its jobs are preempted by jobs of a larger tier: ``off``, ``cancel`` or ``requeue``.
    grace
        Seconds between the first signal to a preempted job and its end.
    default
        Whether it is the default partition.
    extra
        Additional options in its line of ``slurm.conf``, e.g. ``MaxTime=30``.
    """

    name: str
    nodes: str = "ALL"
    tier: int = 1
    preempt: str = "off"
    grace: int = 0
    default: bool = False
    extra: str = ""

    def __post_init__(self) -> None:
        if self.preempt not in ("off", "cancel", "requeue"):
            raise InvalidSettings(
                f"partition {self.name!r}: preempt must be off, cancel or requeue, not {self.preempt!r}"
            )


PARTITIONS = (
    LoopbackPartition("main", tier=100, default=True),
    LoopbackPartition("backfill"),
    LoopbackPartition("preemptible", preempt="cancel", grace=10),
    LoopbackPartition("requeue", preempt="requeue", grace=10),
)
"""A main queue, and lower-tier partitions whose jobs are not preempted, cancelled, and requeued, respectively."""


@dataclass(frozen=True)
class ClusterPlan:
    """Parameters of a cluster's configuration files; see also `LoopbackSlurm`.

    Parameters
    ----------
    name, directory, user
        Name and directory of the cluster, and user of its daemons.
    version
        Version of the installed Slurm: ``(22, 5)``.
    ports
        Daemon -> port; ``slurmd`` is the port of the first node, the others follow.
    loopback_only
        Whether the daemons can listen on the loopback only, which requires that the machine's own name resolves to a
        loopback address.
    controller
        Hostname and address of slurmctld: ``NAME(ADDRESS)``.
    addresses
        Node -> its address, for nodes on a host of that name; the others are on the loopback.
    """

    name: str
    directory: Path
    user: str
    version: tuple[int, int]
    ports: Mapping[str, int]
    loopback_only: bool
    nodes: int
    cpus: int
    memory: int
    gpus: int
    features: Mapping[str, str] = field(default_factory=dict)
    partitions: Sequence[LoopbackPartition] = PARTITIONS
    bf_interval: int = 2
    bf_resolution: int = 1
    kill_wait: int = 5
    slurmd_timeout: int = 10
    accounting: bool = False
    warn_preempted: bool = True
    scheduler_parameters: Sequence[str] = ()
    extra: Sequence[str] = ()
    controller: str = "localhost(127.0.0.1)"
    addresses: Mapping[str, str] = field(default_factory=dict)


def node_names(count: int) -> list[str]:
    """Return the node names of a cluster: node01, node02 and so on."""
    digits = max(2, len(str(count)))
    return [f"node{number:0{digits}d}" for number in range(1, count + 1)]


def slurm_conf(plan: ClusterPlan) -> str:
    """Format ``slurm.conf``."""
    home = plan.directory
    lines = [
        f"ClusterName={plan.name}",
        f"SlurmctldHost={plan.controller}",
        f"SlurmctldPort={plan.ports['slurmctld']}",
        f"SlurmUser={plan.user}",
        f"SlurmdUser={plan.user}",
        "AuthType=auth/munge",
        # A requeued job waits until the credential of its previous start has expired, 120 s by default.
        f"AuthInfo=socket={home}/run/munge.sock,cred_expire=5",
        "CredType=cred/munge",
        f"StateSaveLocation={home}/state",
        f"SlurmdSpoolDir={home}/spool/%n",
        f"SlurmctldPidFile={home}/run/slurmctld.pid",
        f"SlurmdPidFile={home}/run/%n.pid",
        "MailProg=/bin/true",
        "MpiDefault=none",
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none",
        f"JobAcctGatherType=jobacct_gather/{'linux' if plan.accounting else 'none'}",
        "SwitchType=switch/none",
        "ReturnToService=2",
        f"SlurmdTimeout={plan.slurmd_timeout}",
        "MessageTimeout=5",
        "InactiveLimit=0",
        f"KillWait={plan.kill_wait}",
        "UnkillableStepTimeout=60",
        "JobRequeue=1",
        "SlurmdParameters=config_overrides",
        "SchedulerType=sched/backfill",
        f"SchedulerParameters={','.join(_scheduling(plan))}",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_Core",
        "PriorityType=priority/basic",
        *_preemption(plan),
        *_accounting(plan),
    ]
    if plan.loopback_only:
        lines.append("CommunicationParameters=NoCtldInAddrAny,NoInAddrAny")
    if plan.gpus:
        lines.append("GresTypes=gpu")
    return "\n".join([*lines, *plan.extra, *_nodes(plan), *map(_partition, plan.partitions), ""])


def _scheduling(plan: ClusterPlan) -> list[str]:
    return [
        f"bf_interval={plan.bf_interval}",
        f"bf_resolution={plan.bf_resolution}",
        f"sched_interval={max(1, plan.bf_interval)}",
        "bf_window=1440",
        "bf_continue",
        "bf_max_job_test=1000",
        "batch_sched_delay=0",
        *plan.scheduler_parameters,
    ]


def _preemption(plan: ClusterPlan) -> list[str]:
    modes = {partition.preempt for partition in plan.partitions} - {"off"}
    if not modes:
        return []
    lines = ["PreemptType=preempt/partition_prio", f"PreemptMode={min(modes).upper()}"]
    if plan.warn_preempted:
        newer = plan.version >= (23, 2)
        lines.append("PreemptParameters=send_user_signal" if newer else "SlurmctldParameters=preempt_send_user_signal")
    return lines


def _accounting(plan: ClusterPlan) -> list[str]:
    if not plan.accounting:
        return ["AccountingStorageType=accounting_storage/none"]
    return [
        "AccountingStorageType=accounting_storage/slurmdbd",
        "AccountingStorageHost=localhost",
        f"AccountingStoragePort={plan.ports['slurmdbd']}",
        f"AccountingStoragePass={plan.directory}/run/munge.sock",
        "AccountingStorageEnforce=associations,limits,qos",
    ]


def _nodes(plan: ClusterPlan) -> list[str]:
    hardware = (
        f"CPUs={plan.cpus} Boards=1 SocketsPerBoard=1 CoresPerSocket={plan.cpus} ThreadsPerCore=1"
        f" RealMemory={plan.memory}{f' Gres=gpu:{plan.gpus}' if plan.gpus else ''} State=UNKNOWN"
    )
    lines = [f"NodeName=DEFAULT {hardware}"]
    names = node_names(plan.nodes)
    unknown = plan.features.keys() - set(names)
    if unknown:
        raise InvalidSettings(f"features of nodes that the cluster does not have: {', '.join(sorted(unknown))}")
    for port, name in enumerate(names, plan.ports["slurmd"]):
        words = f" Feature={plan.features[name]}" if name in plan.features else ""
        host, address = (name, plan.addresses[name]) if name in plan.addresses else ("localhost", "127.0.0.1")
        lines.append(f"NodeName={name} NodeHostname={host} NodeAddr={address} Port={port}{words}")
    return lines


def _partition(partition: LoopbackPartition) -> str:
    words = [
        f"PartitionName={partition.name}",
        f"Nodes={partition.nodes}",
        f"PriorityTier={partition.tier}",
        f"PreemptMode={partition.preempt.upper()}",
        f"GraceTime={partition.grace}",
        f"Default={'YES' if partition.default else 'NO'}",
        "OverSubscribe=NO",
        "DefaultTime=10",
        "State=UP",
        partition.extra,
    ]
    return " ".join(words)


def slurmdbd_conf(plan: ClusterPlan) -> str:
    """Format ``slurmdbd.conf``; it contains a password of a database that is reachable only on the loopback."""
    lines = [
        "AuthType=auth/munge",
        f"AuthInfo=socket={plan.directory}/run/munge.sock",
        "DbdHost=localhost",
        "DbdAddr=127.0.0.1",
        f"DbdPort={plan.ports['slurmdbd']}",
        f"SlurmUser={plan.user}",
        f"PidFile={plan.directory}/run/slurmdbd.pid",
        "CommitDelay=1",
        "StorageType=accounting_storage/mysql",
        "StorageHost=127.0.0.1",
        f"StoragePort={plan.ports['database']}",
        "StorageLoc=slurm_acct",
        "StorageUser=slurm",
        "StoragePass=slurm",
    ]
    if plan.loopback_only:
        lines.append("CommunicationParameters=NoInAddrAny")
    return "\n".join([*lines, ""])
