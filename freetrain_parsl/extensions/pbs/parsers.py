"""Parsers of PBS nodes, queues, server and reservations, and their combination as a `BatchState`.

Pure functions of the output of ``pbsnodes -av -F json``, ``qstat -f``, ``qstat -Qf``, ``qstat -Bf`` (each
``-F json``) and ``pbs_rstat -f``. A node is a vnode; queues are partitions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from freetrain_parsl.errors import BatchSystemError
from freetrain_parsl.extensions.pbs.jobs import Capacity, constraints, jobs_of, pending_job, running_job
from freetrain_parsl.extensions.pbs.values import (
    as_date,
    as_duration,
    as_mebibytes,
    as_number,
    as_text,
    as_vnodes,
    mapping,
    read_answer,
)
from freetrain_parsl.extensions.pbs.vocabulary import unusable_reason
from freetrain_parsl.windows.state import BatchState, Node, Partition, Reservation, RunningJob, Scheduling

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from freetrain_parsl.extensions.pbs.values import Answer

__all__ = [
    "EXPRESS_PRIORITY",
    "PbsServer",
    "Vnode",
    "express_priority",
    "parse_nodes",
    "parse_queues",
    "parse_reservations",
    "parse_server",
    "parse_state",
    "partitions_of",
    "preempting_queue",
]

EXPRESS_PRIORITY = 150.0
"""PBS's default of ``preempt_queue_prio``: jobs of queues of at least this priority preempt those of other queues."""

_CYCLE = 60.0  # s; see PbsServer
_KILL_DELAY = 10.0  # s from SIGTERM to SIGKILL if the queue has no setting
_TAKEN = frozenset(("busy", "job-busy", "job-exclusive", "resv-exclusive"))
_DEFAULT_PARTITION = "pbs-default"
_NO_HOLD = frozenset(("RESV_UNCONFIRMED", "RESV_FINISHED", "RESV_DELETED", "RESV_DELETING_JOBS", "RESV_NONE"))


@dataclass(frozen=True)
class Vnode:
    """A vnode and the attributes that determine which queues it serves."""

    node: Node  # without its queues
    queue: str  # the only one that it serves; empty for all
    partition: str  # of its scheduler
    jobs: tuple[str, ...]  # ids of the jobs on it
    changed: float | None  # when its state last did, seconds since the epoch


@dataclass(frozen=True)
class PbsServer:
    """Attributes of the server."""

    version: str
    default_queue: str  # of jobs submitted without one; empty if there is none
    cycle: float
    """How long a start may take, s. A submission triggers a scheduling cycle, so this is how long the preceding cycle
    may last on a large machine, not ``scheduler_iteration``, unless that is less."""
    shows_others: bool  # whether an ordinary user sees other users' jobs
    limits: Mapping[str, Any]  # ``resources_max`` for jobs of all queues


def parse_nodes(answer: Answer) -> dict[str, Vnode]:
    """Parse ``pbsnodes -av -F json``. Vnodes that have neither CPUs nor GPUs cannot run jobs and are omitted.

    Raises
    ------
    BatchSystemError
        The output is invalid.
    """
    found = {}
    for name, raw in mapping(answer.content.get("nodes", {}), "pbsnodes").items():
        attributes = mapping(raw, f"pbsnodes, node {name}")
        has = mapping(attributes.get("resources_available", {}), f"pbsnodes, node {name}")
        used = mapping(attributes.get("resources_assigned", {}), f"pbsnodes, node {name}")
        cpus, gpus = int(as_number(has.get("ncpus"))), int(as_number(has.get("ngpus")))
        if not cpus and not gpus:
            continue
        states = as_text(attributes.get("state"))
        listed = attributes.get("jobs", [])
        ids = (as_text(job).partition("/")[0] for job in (listed if isinstance(listed, list) else [listed]))
        jobs = tuple(dict.fromkeys(ids))
        # An exclusively allocated node counts as fully used, whatever the job requested.
        whole = not _TAKEN.isdisjoint(word.strip().lower() for word in states.split(","))
        memory = as_mebibytes(has.get("mem"))
        idle = not jobs and not whole
        last_used = as_date(attributes.get("last_used_time"))
        node = Node(
            name=name,
            idle=idle,
            unusable=unusable_reason(states, as_text(attributes.get("comment"))),
            cpus=cpus,
            cpus_free=0 if whole else max(0, cpus - int(as_number(used.get("ncpus")))),
            gpus=gpus,
            gpus_free=0 if whole else max(0, gpus - int(as_number(used.get("ngpus")))),
            memory=memory,
            memory_free=0 if whole else max(0, memory - as_mebibytes(used.get("mem"))),
            features=constraints({key: as_text(value) for key, value in has.items()}),
            idle_since=last_used if idle else None,
        )
        found[name] = Vnode(
            node,
            as_text(attributes.get("queue")),
            as_text(attributes.get("partition")) or _DEFAULT_PARTITION,
            jobs,
            as_date(attributes.get("last_state_change_time")),
        )
    return found


def parse_queues(answer: Answer) -> dict[str, Mapping[str, Any]]:
    """Parse ``qstat -Qf -F json``: queue -> attributes."""
    queues = mapping(answer.content.get("Queue", {}), "qstat -Qf")
    return {name: mapping(attributes, f"qstat -Qf, queue {name}") for name, attributes in queues.items()}


def parse_server(answer: Answer) -> PbsServer:
    """Parse ``qstat -Bf -F json``.

    Raises
    ------
    BatchSystemError
        The output contains no server.
    """
    servers = mapping(answer.content.get("Server", {}), "qstat -Bf")
    if not servers:
        raise BatchSystemError("qstat -Bf returned invalid output: it contains no server")
    attributes = mapping(next(iter(servers.values())), "qstat -Bf")
    return PbsServer(
        version=as_text(attributes.get("pbs_version") or answer.content.get("pbs_version")),
        default_queue=as_text(attributes.get("default_queue")),
        cycle=min(_CYCLE, as_number(attributes.get("scheduler_iteration"), 600.0)),
        shows_others=as_text(attributes.get("query_other_jobs")).lower() == "true",
        limits=mapping(attributes.get("resources_max", {}), "qstat -Bf"),
    )


def parse_reservations(text: str) -> tuple[Reservation, ...]:
    """Parse ``pbs_rstat -f``: the reservations that have or will have nodes.

    For a standing reservation, PBS reports the next occurrence.

    Raises
    ------
    BatchSystemError
        A reservation has no times.
    """
    found = []
    for record in _records(text):
        nodes = as_vnodes(record.get("resv_nodes", ""))
        if not nodes or record.get("reserve_state") in _NO_HOLD:
            continue
        start, end = as_date(record.get("reserve_start")), as_date(record.get("reserve_end"))
        name = record["Resv ID"].partition(".")[0]
        if start is None or end is None:
            raise BatchSystemError(f"pbs_rstat returned invalid output: reservation {name} has no times")
        given = record.get("Reserve_Name", "NULL")
        found.append(Reservation(name if given == "NULL" else given, nodes, start, end))
    return tuple(found)


def _records(text: str) -> list[dict[str, str]]:
    records: list[dict[str, str]] = []
    last = ""
    for line in text.splitlines():
        if line.startswith("Resv ID:"):
            records.append({"Resv ID": line.partition(":")[2].strip()})
            last = "Resv ID"
        elif records and line.startswith("\t"):
            records[-1][last] += line.strip()  # continuation of a long value
        elif records and " = " in line:
            last, _, value = line.strip().partition(" = ")
            records[-1][last] = value
    if text.strip() and not records and "Resv ID" not in text:
        raise BatchSystemError(f"pbs_rstat returned invalid output: {text.strip()[:80]!r}")
    return records


def express_priority(text: str) -> float:
    """Parse ``preempt_queue_prio`` from the output of ``qmgr -c 'list sched'``."""
    for line in text.splitlines():
        name, _, value = line.partition("=")
        if name.strip() == "preempt_queue_prio":
            return as_number(value.strip(), EXPRESS_PRIORITY)
    return EXPRESS_PRIORITY


def preempting_queue(queue: str, queues: Mapping[str, Mapping[str, Any]], express: float) -> str | None:
    """Return a queue whose jobs may preempt those of `queue`; ``None`` if there is none."""
    if as_number(queues[queue].get("Priority")) >= express:
        return None
    rivals = (name for name, other in queues.items() if as_number(other.get("Priority")) >= express)
    return next(rivals, None)


def partitions_of(
    queues: Mapping[str, Mapping[str, Any]],
    vnodes: Iterable[Vnode],
    server: PbsServer,
    preemptible: Collection[str] = (),
) -> dict[str, Partition]:
    """Convert queues to partitions with the nodes that they serve; a routing queue has those of its destinations."""
    vnodes = list(vnodes)
    found = {
        name: _partition(name, attributes, vnodes, server, preemptible)
        for name, attributes in queues.items()
        if not _is_routing(attributes)
    }
    for name, attributes in queues.items():
        if _is_routing(attributes):
            words = as_text(attributes.get("route_destinations")).split(",")
            behind = [found[word] for word in (word.partition("@")[0].strip() for word in words) if word in found]
            found[name] = _routing_partition(name, attributes, behind, server, preemptible)
    return found


def _is_routing(attributes: Mapping[str, Any]) -> bool:
    return as_text(attributes.get("queue_type")).lower().startswith("r")


def _partition(
    name: str, attributes: Mapping[str, Any], vnodes: list[Vnode], server: PbsServer, preemptible: Collection[str]
) -> Partition:
    chunk = mapping(attributes.get("default_chunk", {}), f"queue {name}")
    needed = constraints({key: as_text(value) for key, value in chunk.items()})
    scheduler = as_text(attributes.get("partition")) or _DEFAULT_PARTITION
    nodes = tuple(
        vnode.node.name
        for vnode in vnodes
        if vnode.queue in ("", name) and vnode.partition == scheduler and needed <= vnode.node.features
    )
    most = {**server.limits, **mapping(attributes.get("resources_max", {}), f"queue {name}")}
    least = mapping(attributes.get("resources_min", {}), f"queue {name}")
    max_nodes = as_number(most.get("nodect"))
    max_walltime = as_duration(most.get("walltime"))
    return Partition(
        name,
        nodes,
        up=as_text(attributes.get("started")).lower() == "true",
        max_walltime=math.inf if max_walltime is None else max_walltime,
        min_nodes=max(1, int(as_number(least.get("nodect"), 1.0))),
        max_nodes=int(max_nodes) if max_nodes else None,
        tier=as_number(attributes.get("Priority")),
        preemptible=name in preemptible,
        grace=as_number(attributes.get("kill_delay"), _KILL_DELAY) if name in preemptible else 0.0,
        default=name == server.default_queue,
    )


def _routing_partition(
    name: str, attributes: Mapping[str, Any], behind: list[Partition], server: PbsServer, preemptible: Collection[str]
) -> Partition:
    max_nodes = [partition.max_nodes for partition in behind]
    return Partition(
        name,
        tuple(dict.fromkeys(node for partition in behind for node in partition.nodes)),
        up=as_text(attributes.get("started")).lower() == "true" and any(partition.up for partition in behind),
        max_walltime=max((partition.max_walltime for partition in behind), default=math.inf),
        min_nodes=min((partition.min_nodes for partition in behind), default=1),
        max_nodes=max((count for count in max_nodes if count is not None), default=None) if all(max_nodes) else None,
        tier=max((partition.tier for partition in behind), default=0.0),
        preemptible=name in preemptible or (bool(behind) and all(partition.preemptible for partition in behind)),
        grace=min((partition.grace for partition in behind), default=0.0),
        default=name == server.default_queue,
    )


def parse_state(
    jobs_text: str,
    nodes_text: str,
    queues: Mapping[str, Mapping[str, Any]],
    server: PbsServer,
    reservations: tuple[Reservation, ...] = (),
    *,
    preemptible: Collection[str] = (),
) -> tuple[BatchState, dict[str, Mapping[str, Any]], tuple[str, ...]]:
    """Combine the output of ``qstat -f -F json`` and ``pbsnodes -av -F json`` with results of earlier queries.

    Return the state; the jobs' attributes by id; repairs and assumptions, one line each.

    Raises
    ------
    BatchSystemError
        The output of a command is invalid.
    """
    answer, nodes_answer = read_answer(jobs_text, "qstat -f"), read_answer(nodes_text, "pbsnodes")
    now = answer.time
    jobs = jobs_of(answer.content, "qstat -f")
    vnodes = parse_nodes(nodes_answer)
    partitions = partitions_of(queues, vnodes.values(), server, preemptible)
    serves: dict[str, list[str]] = {name: [] for name in vnodes}
    for partition in partitions.values():
        for name in partition.nodes:
            serves[name].append(partition.name)
    every = [vnode.node for vnode in vnodes.values()]
    capacity = Capacity(
        max((node.cpus for node in every), default=0),
        max((node.gpus for node in every), default=0),
        max((node.memory for node in every), default=0),
    )
    stopped = {name for name, partition in partitions.items() if not partition.up}
    running = [found for job, attributes in jobs.items() if (found := running_job(job, attributes)) is not None]
    subjobs = _unlisted(vnodes, jobs, now)
    pending = [pending_job(job, attributes, now, capacity, stopped) for job, attributes in jobs.items()]
    notes = [*answer.notes, *nodes_answer.notes]
    dedicated = [job for job, attributes in jobs.items() if "edicated time" in as_text(attributes.get("comment"))]
    if dedicated:
        notes.append(f"the site has upcoming dedicated time, which PBS does not show: job {dedicated[0]} waits for it")
    state = BatchState(
        time=now,
        scheduling=Scheduling("pbs", server.version, cycle=server.cycle),
        nodes={name: replace(vnode.node, partitions=tuple(serves[name])) for name, vnode in vnodes.items()},
        running=(*running, *subjobs),
        pending=tuple(job for job in pending if job is not None),
        reservations=reservations,
        partitions=partitions,
    )
    return state, jobs, tuple(notes)


def _unlisted(vnodes: Mapping[str, Vnode], jobs: Mapping[str, Mapping[str, Any]], now: float) -> list[RunningJob]:
    """Describe the jobs that are listed by nodes but not by ``qstat``: subjobs of arrays.

    Listing every subjob could mean tens of thousands. A running one has its array's walltime, counted from when its
    node's state changed.
    """
    holds: dict[str, list[Vnode]] = {}
    for vnode in vnodes.values():
        for job in vnode.jobs:
            if job not in jobs:
                holds.setdefault(job, []).append(vnode)
    found = []
    for job, on in holds.items():
        number, bracket, rest = job.partition("[")
        array = jobs.get(f"{number}[]{rest.partition(']')[2]}", {}) if bracket else {}
        walltime = as_duration(mapping(array.get("Resource_List", {}), f"job {job}").get("walltime"))
        began = max((vnode.changed for vnode in on if vnode.changed is not None), default=now)
        found.append(
            RunningJob(
                job=job,
                name=as_text(array.get("Job_Name")),
                user=as_text(array.get("euser")) or "another user",
                partition=as_text(array.get("queue")),
                nodes=tuple(vnode.node.name for vnode in on),
                ends=None if walltime is None else began + walltime,
            )
        )
    return found
