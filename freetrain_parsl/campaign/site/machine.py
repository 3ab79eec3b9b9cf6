"""What a batch system offers to one user: its partitions or queues, their nodes, and which of them the user may use."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from freetrain_parsl.errors import BatchSystemError, CommandNotFound, InvalidSettings
from freetrain_parsl.extensions.pbs.source import PbsWindowSource
from freetrain_parsl.windows.commands import Commands
from freetrain_parsl.windows.slurm.queries import SlurmQueries
from freetrain_parsl.windows.slurm.source import SlurmWindowSource, user_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from freetrain_parsl.windows.base import WindowSource
    from freetrain_parsl.windows.commands import Runner
    from freetrain_parsl.windows.state import Node, Partition

__all__ = ["Machine", "NodeType", "Queue", "describe_pbs", "describe_slurm"]

_SHORTEST_BLOCK = 60.0  # s; a queue that does not allow even this is of no use


_NO_ACCOUNTING = ("accounting_storage/none", "(null)")  # the second: of newer versions


@dataclass(frozen=True)
class NodeType:
    """Resources of a node; memory in MiB."""

    cpus: int
    gpus: int
    memory: int


@dataclass(frozen=True)
class Queue:
    """A partition of Slurm or a queue of PBS, as one user sees it.

    Parameters
    ----------
    partition
        Its limits.
    node_types
        Number of its nodes of each type, the most frequent first.
    refusal
        Why the user cannot run blocks in it; empty if they can.
    qos
        QOS with which jobs in it may be preempted, if it is not the partition itself that allows it.
    """

    partition: Partition
    node_types: tuple[tuple[NodeType, int], ...]
    refusal: str = ""
    qos: str = ""

    @property
    def name(self) -> str:
        """Its name."""
        return self.partition.name


@dataclass(frozen=True)
class Machine:
    """A batch system.

    Parameters
    ----------
    system
        ``slurm`` or ``pbs``.
    queues
        All partitions or queues, the most suitable for blocks first.
    name
        Name of the cluster; empty if unknown.
    accounts
        Those that the user may charge; empty if unknown or if there are none.
    has_accounts
        Whether jobs may have an account, and a QOS: without an accounting database there are none.
    """

    system: str
    queues: tuple[Queue, ...]
    name: str = ""
    accounts: tuple[str, ...] = ()
    has_accounts: bool = True


def describe_slurm(*, user: str | None = None, run: Runner | None = None) -> Machine:
    """Query a Slurm cluster, each command once.

    Parameters
    ----------
    user
        Owner of the jobs; ``None`` for the calling user.
    run
        Runs commands; ``None`` for this machine's.

    Raises
    ------
    CommandNotFound, BatchSystemError
        Slurm is not available.
    """
    user, run, now = user or user_name(), _each_once(run or Commands()), time.time()
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
        queues.append(Queue(partition, _node_types(partition, nodes), _refusal(source), qos))
    accounts = dict.fromkeys(row[0] for row in associations)
    return Machine(
        "slurm",
        _by_suitability(queues),
        config.get("ClusterName", ""),
        tuple(accounts),
        config.get("AccountingStorageType") not in _NO_ACCOUNTING,
    )


def describe_pbs(*, user: str | None = None, run: Runner | None = None) -> Machine:
    """Query a PBS server, each command once; parameters and errors as `describe_slurm`."""
    run, now = _each_once(run or Commands()), time.time()

    def source_of(queue: str | None) -> PbsWindowSource:
        return PbsWindowSource(queue=queue, user=user or user_name(), run=run, clock=lambda: now)

    state = source_of(None).state()
    queues = []
    for name in state.partitions:
        source = source_of(name)
        partition = source.state().partitions[name]  # a source knows of its own queue whether it is preemptible
        queues.append(Queue(partition, _node_types(partition, state.nodes), _refusal(source)))
    return Machine("pbs", _by_suitability(queues))


def _each_once(run: Runner) -> Runner:
    """Run each command once, and return its output again whenever it is repeated."""
    outcomes: dict[tuple[str, ...], str | BatchSystemError | CommandNotFound] = {}

    def once(*arguments: str) -> str:
        if arguments not in outcomes:
            try:
                outcomes[arguments] = run(*arguments)
            except (BatchSystemError, CommandNotFound) as error:
                outcomes[arguments] = error
        outcome = outcomes[arguments]
        if isinstance(outcome, str):
            return outcome
        raise outcome

    return once


def _refusal(source: WindowSource) -> str:
    try:
        source.check(_SHORTEST_BLOCK)
    except (InvalidSettings, BatchSystemError, CommandNotFound) as error:
        return str(error)
    return ""


def _node_types(partition: Partition, nodes: Mapping[str, Node]) -> tuple[tuple[NodeType, int], ...]:
    known = (nodes[name] for name in partition.nodes if name in nodes)
    return tuple(Counter(NodeType(node.cpus, node.gpus, node.memory) for node in known).most_common())


def _by_suitability(queues: Iterable[Queue]) -> tuple[Queue, ...]:
    """Sort: first those that the user may use, preemptible, with GPUs, a longer grace, the default, more nodes."""

    def rank(queue: Queue) -> tuple[bool, bool, bool, bool, float, bool, int, str]:
        partition = queue.partition
        gpus = any(kind.gpus for kind, _ in queue.node_types)
        return (
            bool(queue.refusal),
            not queue.node_types,
            not partition.preemptible,
            not gpus,
            -partition.grace,
            not partition.default,
            -len(partition.nodes),
            queue.name,
        )

    return tuple(sorted(queues, key=rank))
