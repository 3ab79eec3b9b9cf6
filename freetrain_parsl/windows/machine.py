"""What a batch system offers to one user, for ``freetrain init``: its partitions or queues, and their nodes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from freetrain_parsl.errors import BatchSystemError, CommandNotFound, InvalidSettings

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from freetrain_parsl.windows.base import WindowSource
    from freetrain_parsl.windows.commands import Runner
    from freetrain_parsl.windows.state import Node, Partition

__all__ = ["DraftHints", "Machine", "NodeType", "Queue", "by_suitability", "each_once", "queue_of"]

_SHORTEST_BLOCK = 60.0  # s; a queue that does not allow even this is of no use


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
    """What a batch system offers to one user.

    Parameters
    ----------
    system
        Name of the `BatchSystem`.
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


@dataclass(frozen=True)
class DraftHints:
    """What a drafted site file says about a batch system in comments and examples.

    Parameters
    ----------
    manual
        Commands that list partitions or queues and their nodes.
    narrowing
        Example of a key that narrows a request to some of the nodes, where they differ.
    launcher_overrides
        Line of the launcher's options: key, value with ``{cpus}``, comment.
    exclusive
        Whether jobs may share nodes, so that ``node.exclusive`` has a meaning.
    """

    manual: str
    narrowing: str
    launcher_overrides: tuple[str, str, str]
    exclusive: bool = False


def each_once(run: Runner) -> Runner:
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


def queue_of(partition: Partition, nodes: Mapping[str, Node], source: WindowSource, qos: str = "") -> Queue:
    """Describe a partition or queue; `source` is its window source for the user."""
    known = (nodes[name] for name in partition.nodes if name in nodes)
    types = tuple(Counter(NodeType(node.cpus, node.gpus, node.memory) for node in known).most_common())
    refusal = ""
    try:
        source.check(_SHORTEST_BLOCK)
    except (InvalidSettings, BatchSystemError, CommandNotFound) as error:
        refusal = str(error)
    return Queue(partition, types, refusal, qos)


def by_suitability(queues: Iterable[Queue]) -> tuple[Queue, ...]:
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
