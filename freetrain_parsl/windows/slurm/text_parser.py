"""Parsers of the text output of squeue and scontrol; pure functions of text.

Times may be seconds since the epoch (``SLURM_TIME_FORMAT=%s``) or in Slurm's usual format in local time.
"""

from __future__ import annotations

import functools
import math
import re
from datetime import datetime
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from freetrain_parsl.errors import UnreadableAnswer
from freetrain_parsl.windows.base import OUR_JOBS
from freetrain_parsl.windows.hostlist import expand_hosts
from freetrain_parsl.windows.slurm.jobs import SlurmJob
from freetrain_parsl.windows.slurm.vocabulary import UNUSABLE
from freetrain_parsl.windows.state import Node, Partition, Reservation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = [
    "JOB_FIELDS",
    "JOB_FORMAT",
    "count_gpus",
    "count_tasks",
    "make_node",
    "parse_config",
    "parse_jobs",
    "parse_nodes",
    "parse_partitions",
    "parse_reservations",
    "parse_seconds",
    "parse_time",
]

JOB_FIELDS = (
    "JobID",
    "Partition",
    "State",
    "UserName",
    "TimeLimit",
    "StartTime",
    "EndTime",
    "NumNodes",
    "NodeList",
    "SchedNodes",
    "ReqNodes",
    "PriorityLong",
    "Reason",
    "Feature",
    "ArrayTaskID",
    "Name",
)
_NAME_WIDTH = len(OUR_JOBS)

# A suffix instead of a width, so that nothing is truncated except names, which may contain anything and so come last.
JOB_FORMAT = ",".join(f"{name}:{_NAME_WIDTH if name == 'Name' else ''}\t" for name in JOB_FIELDS)

_NOTHING = frozenset(("", "N/A", "(null)", "None", "NONE", "Unknown", "UNKNOWN", "n/a"))
_MARKS = {"*": "NOT_RESPONDING", "~": "POWERED_DOWN", "#": "POWERING_UP", "%": "POWERING_DOWN", "!": "POWER_DOWN"}
_MARKS |= {"$": "MAINT", "@": "REBOOT_REQUESTED", "^": "REBOOT_ISSUED", "-": "PLANNED"}
_MARK_SIGNS = "".join(_MARKS)
_GPUS = re.compile(r"(?:^|,)gpu(?::[^,:()]+)*?:(\d+)(?=[(,]|$)")
_PAIR = re.compile(r"(?:^|\s)(\w+)=(\S*)")
_WORD = re.compile(r"\S+")
_TASKS = re.compile(r"(\d+)(?:-(\d+)(?::(\d+))?)?(?=,|$|\.)")


P = ParamSpec("P")
T = TypeVar("T")


def _reader(parse: Callable[P, T]) -> Callable[P, T]:
    """Decorate a parser to raise `UnreadableAnswer` wherever a number or a date in its input is malformed."""

    @functools.wraps(parse)
    def read(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return parse(*args, **kwargs)
        except UnreadableAnswer:
            raise
        except (ValueError, OverflowError, OSError) as error:  # OSError: a date beyond the C library's
            raise UnreadableAnswer(" ".join(str(error)[:200].split())) from None

    return read


@_reader
def parse_time(text: str) -> float | None:
    """Parse a point in time; ``None`` if it is not set.

    Raises
    ------
    UnreadableAnswer
        It is malformed.
    """
    if text in _NOTHING:
        return None
    return float(text) if text.isdecimal() else datetime.fromisoformat(text).timestamp()


@_reader
def parse_seconds(text: str) -> float | None:
    """Parse a walltime (``1-02:03:04``, ``10:00``, ``UNLIMITED``) in seconds; ``None`` if it is not set.

    Raises
    ------
    UnreadableAnswer
        It is not a walltime.
    """
    if text in ("UNLIMITED", "INFINITE"):
        return math.inf
    if text in _NOTHING or text in ("NOT_SET", "Partition_Limit", "INVALID"):
        return None
    days, _, rest = text.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if days:
        parts += [0] * (3 - len(parts))  # days-hours, days-hours:minutes
    elif len(parts) == 1:
        parts.append(0)  # minutes
    seconds = 86400 * int(days or 0)
    for part, unit in zip(reversed(parts), (1, 60, 3600), strict=False):
        seconds += part * unit
    return float(seconds)


@_reader
def parse_jobs(text: str) -> list[SlurmJob]:
    """Parse ``squeue -h -O JOB_FORMAT``.

    Raises
    ------
    UnreadableAnswer
        A line does not have this format.
    """
    records: list[SlurmJob] = []
    for line in text.splitlines():
        if not (records and _continues_a_name(line)):
            records.append(_job(line))
    return records


def _continues_a_name(line: str) -> bool:
    """Return whether a line is the continuation of the previous job's name after a line feed."""
    return "\t" not in line[:-1] and len(line) <= _NAME_WIDTH + 1


def _job(line: str) -> SlurmJob:
    *texts, name = line.split("\t", len(JOB_FIELDS) - 1)
    values = ["" if value in _NOTHING else value for value in texts]
    if len(values) != len(JOB_FIELDS) - 1 or not values[0].isdecimal():
        raise ValueError(f"line {line[:80]!r} does not have the {len(JOB_FIELDS)} requested fields")
    job, partition, state, user, limit, start, ends, count, nodes, planned, named, priority, reason, features, tasks = (
        values
    )
    return SlurmJob(
        job,
        partition,
        state,
        user,
        parse_seconds(limit),
        parse_time(start),
        parse_time(ends),
        int(count.partition("-")[0]),
        nodes,
        planned,
        named,
        float(priority),
        reason,
        features,
        name.rstrip(),
        count_tasks(tasks),
    )


def count_tasks(tasks: str) -> int:
    """Count the tasks of a job array that may run at once: ``1-200``, ``1,5-9:2%10``; one if it is none.

    A long list ends with dots: the others are not counted.
    """
    numbers, _, limit = tasks.partition("%")
    count = 0
    for first, last, step in _TASKS.findall(numbers):
        count += (int(last or first) - int(first)) // int(step or 1) + 1
    return max(1, min(count, int(limit)) if limit.isdecimal() and int(limit) else count)


@_reader
def parse_nodes(text: str) -> dict[str, Node]:
    """Parse ``scontrol -d show nodes``.

    Raises
    ------
    UnreadableAnswer
        A record is not a node's.
    """
    nodes = {}
    for block in text.split("\n\n"):
        if not block.strip():
            continue
        if not block.lstrip().startswith("NodeName="):
            raise ValueError(f"line {block.strip().splitlines()[0][:80]!r} is not the record of a node")
        name = _field(block, "NodeName=")
        reason = block.find(" Reason=")
        nodes[name] = make_node(
            name,
            _node_words(_field(block, " State=")),
            block[reason + 8 :].partition("\n")[0] if reason >= 0 else "",
            tuple(_field(block, " Partitions=").split(",")),
            (int(_field(block, " CPUEfctv=") or _field(block, " CPUTot=")), int(_field(block, " CPUAlloc="))),
            (_field(block, " Gres="), _field(block, " GresUsed=")),
            (int(_field(block, " RealMemory=")), int(_field(block, " AllocMem="))),
            _field(block, " ActiveFeatures=").split(","),
            parse_time(_field(block, " LastBusyTime=")),
        )
    return nodes


def _field(block: str, key: str) -> str:
    """Find the first value of a key, given with a leading blank; empty if it is missing or null."""
    begin = block.find(key)
    if begin < 0:
        return ""
    match = _WORD.match(block, begin + len(key))
    return "" if match is None or match[0] == "(null)" else match[0]


def _node_words(state: str) -> list[str]:
    words = []
    for word in state.split("+"):
        plain = word.rstrip(_MARK_SIGNS)
        words += [plain, *(_MARKS[mark] for mark in word[len(plain) :])]
    return words


@_reader
def make_node(
    name: str,
    words: list[str],
    reason: str,
    partitions: tuple[str, ...],
    cpus: tuple[int, int],
    gres: tuple[str, str],
    memory: tuple[int, int],
    features: list[str],
    idle_since: float | None,
) -> Node:
    """Build a node from the data common to text and JSON; pairs are (total, in use)."""
    if not words or not words[0]:
        raise ValueError(f"node {name} has no state")
    why = next((UNUSABLE[word] for word in words if word in UNUSABLE), "")
    comment = reason.partition(" [")[0].strip()
    if why and comment and comment != "none":
        why = f"{why}: {comment}"
    gpus = count_gpus(gres[0])
    idle = words[0] == "IDLE" and "COMPLETING" not in words
    return Node(
        name,
        idle,
        why,
        partitions,
        cpus[0],
        cpus[0] - cpus[1],
        gpus,
        gpus - count_gpus(gres[1]),
        memory[0],
        memory[0] - memory[1],
        frozenset(filter(None, features)),
        idle_since if idle else None,
        idle and "PLANNED" in words,
    )


@_reader
def count_gpus(gres: str) -> int:
    """Count the GPUs in a list of generic resources such as ``gpu:a100:4(S:0-1),shard:8``."""
    return sum(map(int, _GPUS.findall(re.sub(r"\([^)]*\)", "", gres)))) if gres else 0


def _records(text: str, first: str) -> Iterator[dict[str, str]]:
    """Split the output of ``scontrol show`` into records of keys and values."""
    for block in text.split("\n\n"):
        if block.startswith(f"{first}="):
            yield {key: "" if value in _NOTHING else value for key, value in _PAIR.findall(block)}
        elif block.strip() and not block.startswith("No "):
            raise ValueError(f"line {block.strip().splitlines()[0][:80]!r} is not the record of a {first}")


@_reader
def parse_partitions(text: str, preempt_type: str = "") -> dict[str, Partition]:
    """Parse ``scontrol -a show partition``.

    A partition is preemptible if its jobs yield to those of a partition with a higher tier that shares a node with it.

    Raises
    ------
    UnreadableAnswer
        A record is not a partition's.
    """
    records = {record["PartitionName"]: record for record in _records(text, "PartitionName")}
    nodes = {
        name: tuple(expand_hosts(record.get("Nodes", ""))) if record.get("Nodes") else ()
        for name, record in records.items()
    }
    tiers = {name: float(record.get("PriorityTier") or 1) for name, record in records.items()}
    partitions = {}
    for name, record in records.items():
        mine = set(nodes[name])
        yields = record.get("PreemptMode", "OFF").partition(",")[0] not in ("OFF", "DISABLED", "")
        above = any(tiers[other] > tiers[name] and not mine.isdisjoint(nodes[other]) for other in records)
        most = record.get("MaxNodes", "UNLIMITED")
        partitions[name] = Partition(
            name,
            nodes[name],
            record.get("State", "UP") == "UP",
            _or_infinite(parse_seconds(record.get("MaxTime", ""))),
            max(1, int(record.get("MinNodes") or 1)),
            int(most) if most.isdecimal() else None,
            tiers[name],
            preempt_type.endswith("partition_prio") and yields and above,
            float(record.get("GraceTime") or 0),
            record.get("OverSubscribe") != "EXCLUSIVE" and record.get("Exclusive") != "NODE",
            record.get("Default") == "YES",
            _allowed(record.get("AllowQos", "ALL")),
            _allowed(record.get("AllowAccounts", "ALL")),
        )
    return partitions


def _or_infinite(seconds: float | None) -> float:
    return math.inf if seconds is None else seconds


def _allowed(text: str) -> frozenset[str]:
    return frozenset() if text in ("ALL", "") else frozenset(text.split(","))


@_reader
def parse_reservations(text: str) -> tuple[Reservation, ...]:
    """Parse ``scontrol show reservation``; reservations without nodes (of licences) are omitted.

    Raises
    ------
    UnreadableAnswer
        A record is not a reservation's.
    """
    reservations = []
    for record in _records(text, "ReservationName"):
        start, end = parse_time(record.get("StartTime", "")), parse_time(record.get("EndTime", ""))
        if start is not None and end is not None and record.get("Nodes"):
            nodes = tuple(expand_hosts(record["Nodes"]))
            reservations.append(Reservation(record["ReservationName"], nodes, start, end))
    return tuple(reservations)


def parse_config(text: str) -> dict[str, str]:
    """Parse ``scontrol show config``: settings as strings."""
    pairs = (line.partition("=") for line in text.splitlines())
    return {key.strip(): value.strip() for key, equals, value in pairs if equals and key.strip()}
