"""PBS jobs: ``qstat -f -F json`` as running and pending jobs, and as states of our own jobs."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from freetrain_parsl.extensions.pbs.values import (
    as_date,
    as_duration,
    as_mebibytes,
    as_number,
    as_text,
    as_vnodes,
    mapping,
)
from freetrain_parsl.extensions.pbs.vocabulary import HOLDS_NODES, WAITS, describe_end, describe_hold, explain_comment
from freetrain_parsl.windows.base import BlockState, BlockStatus
from freetrain_parsl.windows.state import PendingJob, RunningJob

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

__all__ = ["Capacity", "block_status", "constraints", "jobs_of", "least_nodes", "pending_job", "running_job"]

_TOP_JOB = 4096.0  # above any Priority: the scheduler puts its top jobs first, whatever their priority
_COUNTED = re.compile(r"-?[\d.]+([kmgtp]?[bw])?|\d+(:\d+)+", re.IGNORECASE)
_PLACES = frozenset(("host", "vnode"))


class Capacity(NamedTuple):
    """Resources of the largest node; memory in MiB."""

    cpus: int
    gpus: int
    memory: int


def jobs_of(content: Mapping[str, Any], command: str) -> dict[str, Mapping[str, Any]]:
    """Return the jobs of an answer, id -> attributes; empty if the queue is empty."""
    jobs = mapping(content.get("Jobs", {}), command)
    return {job: mapping(attributes, f"{command}, job {job}") for job, attributes in jobs.items()}


def constraints(resources: Mapping[str, str]) -> frozenset[str]:
    """Convert the resources of a chunk, node or queue to constraints: ``name=value`` of non-countable resources.

    A resource with several values, such as ``Qlist=main,debug``, becomes several constraints. Of the countable
    resources, only the presence of GPUs is included.
    """
    words = set()
    for name, value in resources.items():
        if name == "ngpus" and as_number(value) > 0:
            words.add("ngpus")
        elif name not in _PLACES and value and not _COUNTED.fullmatch(value):
            words.update(f"{name}={part.strip().lower()}" for part in value.split(","))
    return frozenset(words)


def pending_job(
    job: str, attributes: Mapping[str, Any], now: float, capacity: Capacity, stopped: Collection[str]
) -> PendingJob | None:
    """Describe a pending job, at `now` in seconds since the epoch; ``None`` for other jobs.

    ``qstat`` reports an array as one job for all of its pending subjobs. Jobs of `stopped` queues do not start.
    """
    state = as_text(attributes.get("job_state"))
    if state == "B" and _waiting_subjobs(attributes):
        state = "Q"
    if state not in WAITS:
        return None
    resources = mapping(attributes.get("Resource_List", {}), f"resources of job {job}")
    queue = as_text(attributes.get("queue"))
    comment = as_text(attributes.get("comment"))
    could_start, reason = explain_comment(comment)
    suspended = state in "SU"
    eligible = (suspended or (state == "Q" and could_start)) and queue not in stopped
    chunks = _chunks(attributes, resources)
    start, planned = _plan(attributes, now) if state == "Q" else (None, ())
    asked = [constraints(chunk) for _, chunk in chunks]
    named = tuple(dict.fromkeys(chunk["vnode"] for _, chunk in chunks if "vnode" in chunk))
    return PendingJob(
        job=job,
        name=as_text(attributes.get("Job_Name")),
        user=_user(attributes),
        partition=queue,
        node_count=least_nodes(chunks, as_text(resources.get("place")), capacity),
        walltime=_walltime_left(attributes, resources),
        priority=as_number(attributes.get("Priority")) + (_TOP_JOB if start is not None else 0.0),
        eligible=eligible,
        start=start,
        planned_nodes=planned,
        named_nodes=as_vnodes(as_text(attributes.get("exec_vnode"))) if suspended else named,
        features=frozenset.intersection(*asked) if asked else frozenset(),
        reason=describe_hold(as_text(attributes.get("Hold_Types")), comment) if state == "H" else reason,
    )


def running_job(job: str, attributes: Mapping[str, Any]) -> RunningJob | None:
    """Describe a job that holds nodes; ``None`` for other jobs."""
    if as_text(attributes.get("job_state")) not in HOLDS_NODES:
        return None
    return RunningJob(
        job=job,
        name=as_text(attributes.get("Job_Name")),
        user=_user(attributes),
        partition=as_text(attributes.get("queue")),
        nodes=as_vnodes(as_text(attributes.get("exec_vnode"))),
        ends=_ends(attributes),
    )


def block_status(attributes: Mapping[str, Any]) -> BlockStatus:
    """Return the status of one of our jobs."""
    state = as_text(attributes.get("job_state"))
    comment = as_text(attributes.get("comment"))
    runs = as_number(attributes.get("run_count"))
    if state in HOLDS_NODES:
        if runs > 1:
            return BlockStatus(BlockState.PREEMPTED, reason="was requeued and started again", lingers=True)
        return BlockStatus(BlockState.RUNNING, as_vnodes(as_text(attributes.get("exec_vnode"))), _ends(attributes))
    if state in ("F", "X"):
        return _finished(attributes, comment)
    if state in ("S", "U"):
        # Suspended to let others run: its processes are stopped and cannot save.
        return BlockStatus(BlockState.PREEMPTED, reason="was suspended for another job", lingers=True)
    if runs > 0 and state in WAITS:
        return BlockStatus(BlockState.PREEMPTED, reason="was requeued", lingers=True)
    if state == "H":
        return BlockStatus(BlockState.HELD, reason=describe_hold(as_text(attributes.get("Hold_Types")), comment))
    if state in WAITS:
        return BlockStatus(BlockState.PENDING, reason=explain_comment(comment)[1])
    if state == "M":
        return BlockStatus(BlockState.CANCELLED, reason="was moved to another PBS server")
    return BlockStatus(BlockState.UNKNOWN, reason=f"has PBS state {state!r}")


def least_nodes(chunks: list[tuple[int, dict[str, str]]], place: str, capacity: Capacity) -> int:
    """Return the minimum number of nodes of a job: chunks share nodes unless they must be scattered."""
    if "scatter" in place:
        return max(1, sum(count for count, _ in chunks))
    if place.startswith("pack"):
        return 1
    nodes = 0
    for count, chunk in chunks:
        asked = (as_number(chunk.get("ncpus")), as_number(chunk.get("ngpus")), as_mebibytes(chunk.get("mem")))
        fit = [has // need for need, has in zip(asked, capacity, strict=True) if need > 0]
        nodes += math.ceil(count / max(1.0, min(fit, default=1.0)))
    return max(1, nodes)


def _chunks(attributes: Mapping[str, Any], resources: Mapping[str, Any]) -> list[tuple[int, dict[str, str]]]:
    """Parse a select statement, ``2:ncpus=4:ngpus=1+1:ncpus=2``: number of chunks and resources of each."""
    # schedselect includes the defaults of queue and server.
    select = as_text(attributes.get("schedselect")) or as_text(resources.get("select"))
    chunks = []
    for chunk in filter(None, select.split("+")):
        first, *rest = chunk.split(":")
        if not re.fullmatch(r"[0-9]{1,9}", first):
            first, rest = "1", [first, *rest]
        pairs = (part.partition("=") for part in rest)
        chunks.append((int(first), {name: value.strip("\"'") for name, _, value in pairs}))
    return chunks or [(max(1, int(as_number(resources.get("nodect"), 1.0))), {})]


def _plan(attributes: Mapping[str, Any], now: float) -> tuple[float | None, tuple[str, ...]]:
    """Return when and where the scheduler plans to start a job.

    PBS keeps the estimate of a job that is no longer a top job unless configured to clear it; estimates in the past
    are therefore ignored.
    """
    estimated = mapping(attributes.get("estimated", {}), "estimated")
    start = as_date(estimated.get("start_time"))
    if start is None or (start <= now and as_text(attributes.get("topjob")).lower() != "true"):
        return None, ()
    return start, as_vnodes(as_text(estimated.get("exec_vnode")))


def _walltime_left(attributes: Mapping[str, Any], resources: Mapping[str, Any]) -> float:
    # A shrink-to-fit job may start with its minimum walltime.
    walltime = as_duration(resources.get("min_walltime"))
    if walltime is None:
        walltime = as_duration(resources.get("walltime"))
    if walltime is None:
        return math.inf
    used = as_duration(mapping(attributes.get("resources_used", {}), "resources_used").get("walltime"))
    return max(1.0, walltime - (used or 0.0))


def _ends(attributes: Mapping[str, Any]) -> float | None:
    start = as_date(attributes.get("stime"))
    walltime = as_duration(mapping(attributes.get("Resource_List", {}), "Resource_List").get("walltime"))
    return None if start is None or walltime is None else start + walltime


def _finished(attributes: Mapping[str, Any], comment: str) -> BlockStatus:
    start, end = as_date(attributes.get("stime")), as_date(attributes.get("obittime"))
    code = attributes.get("Exit_status")
    return describe_end(
        None if code is None else int(as_number(code)),
        int(as_number(attributes.get("substate"))),
        comment,
        None if start is None or end is None else end - start,
        as_duration(mapping(attributes.get("Resource_List", {}), "Resource_List").get("walltime")),
    )


def _user(attributes: Mapping[str, Any]) -> str:
    return as_text(attributes.get("euser")) or as_text(attributes.get("Job_Owner")).partition("@")[0]


def _waiting_subjobs(attributes: Mapping[str, Any]) -> int:
    match = re.search(r"Queued:(\d+)", as_text(attributes.get("array_state_count")))
    return int(match[1]) if match else 0
