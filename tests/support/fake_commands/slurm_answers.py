"""Output of the fake Slurm commands: the requested fields, in the formats of 22.05 and 24.11."""

from __future__ import annotations

import json
import math
import os
import re
import time
from typing import TYPE_CHECKING, Any

from freetrain_parsl.windows.hostlist import compress_hosts
from tests.support.fake_commands.options import Refused
from tests.support.fake_commands.store import QUEUES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.support.fake_commands.store import FakeJob, Store

__all__ = [
    "config",
    "has_json",
    "jobs_json",
    "long_line",
    "nodes_json",
    "nodes_text",
    "now",
    "overview",
    "partitions",
    "reservations",
    "short_line",
]

_STATES = {
    "PENDING": ("PENDING", "PD"),
    "RUNNING": ("RUNNING", "R"),
    "COMPLETED": ("COMPLETED", "CD"),
    "FAILED": ("FAILED", "F"),
    "TIMED_OUT": ("TIMEOUT", "TO"),
    "PREEMPTED": ("PREEMPTED", "PR"),
    "CANCELLED": ("CANCELLED", "CA"),
}
_MEMORY = 16384
_TIERS = {"main": 100, "backfill": 1, "preemptible": 1}
_FIELD = re.compile(r"(\w+)(?::([^,]*))?(?:,|$)")


def now(store: Store) -> float:
    """Return the cluster's time, s since the epoch."""
    return float(store.client.ping()["time"])


def has_json(store: Store) -> bool:
    """Return whether this version's JSON output includes planned starts."""
    major, minor = store.settings.version.split(".")[:2]
    return (int(major), int(minor)) >= (24, 11)


def state_words(job: FakeJob) -> list[str]:
    """Return the state of a job."""
    return ["RUNNING", "COMPLETING"] if job.ending else [_STATES[job.state][0]]


def _date(when: float | None) -> str:
    """Format a time as the commands do: in the caller's format, if any."""
    if when is None:
        return "N/A"
    style = os.environ.get("SLURM_TIME_FORMAT", "")
    return str(int(when)) if style == "%s" else time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(when))


def _limit(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"{f'{days}-' if days else ''}{hours:02}:{minutes:02}:{rest:02}"


def _fields(job: FakeJob) -> dict[str, str]:
    nodes = compress_hosts(job.nodes) if job.nodes else ""
    return {
        "ArrayTaskID": "N/A",
        "EndTime": _date(job.end if job.end is not None else job.ends),
        "Feature": "(null)",
        "JobID": job.id,
        "Name": job.name,
        "NodeList": nodes,
        "NumNodes": str(job.node_count),
        "Partition": job.queue,
        "PriorityLong": str(_priority(job)),
        "Reason": _reason(job),
        "ReqNodes": "",
        "SchedNodes": compress_hosts(job.planned) if job.planned else "(null)",
        "StartTime": _date(job.start if job.start is not None else job.planned_start),
        "State": state_words(job)[-1],
        "TimeLimit": _limit(job.walltime),
        "UserName": job.user,
    }


def _priority(job: FakeJob) -> int:
    return 4294900000 - int(job.id)


def _reason(job: FakeJob) -> str:
    return ("Resources" if job.planned_start is not None else "Priority") if job.state == "PENDING" else "None"


def long_line(job: FakeJob, layout: str) -> str:
    """Format a job as ``squeue -O`` does: a field, and a width or a suffix."""
    fields = _fields(job)
    line = ""
    for name, suffix in _FIELD.findall(layout):
        if name not in fields:
            raise Refused(f"Invalid job format specification: {name}: the fake does not know it")
        value = fields[name]
        line += f"{value[: int(suffix)]:<{int(suffix)}}" if suffix.isdecimal() else value + suffix
    return line


def short_line(job: FakeJob, layout: str) -> str:
    """Format a job as ``squeue -o`` does."""
    fields = _fields(job)
    letters = {
        "D": fields["NumNodes"],
        "M": "0:00",
        "N": fields["NodeList"],
        "P": fields["Partition"],
        "R": fields["NodeList"] or f"({fields['Reason']})",
        "T": fields["State"],
        "i": job.id,
        "j": job.name,
        "t": _STATES[job.state][1],
        "u": job.user,
    }
    unknown = [letter for letter in re.findall(r"%\.?\d*(\w)", layout) if letter not in letters]
    if unknown:
        raise Refused(f"Invalid job format specification: {unknown[0]}: the fake does not know it")
    return re.sub(r"%\.?\d*(\w)", lambda match: letters[match[1]], layout)


def _number(value: float | None) -> dict[str, Any]:
    if value is not None and math.isinf(value):
        return {"set": False, "infinite": True, "number": 0}
    return {"set": value is not None, "infinite": False, "number": 0 if value is None else int(value)}


def jobs_json(store: Store, jobs: Sequence[FakeJob]) -> str:
    """Format jobs as ``squeue --json`` of 24.11 does."""
    records = [
        {
            "job_id": int(job.id),
            "name": job.name,
            "partition": job.queue,
            "job_state": state_words(job),
            "state_reason": _reason(job),
            "user_name": job.user,
            "time_limit": _number(math.ceil(job.walltime / 60)),
            "submit_time": _number(job.submit),
            "start_time": _number(job.start if job.start is not None else job.planned_start or 0),
            "end_time": _number(job.end if job.end is not None else job.ends or 0),
            "node_count": _number(job.node_count),
            "nodes": compress_hosts(job.nodes) if job.nodes else "",
            "scheduled_nodes": compress_hosts(job.planned) if job.planned else "",
            "required_nodes": "",
            "priority": _number(_priority(job)),
            "features": "",
            "exit_code": {"return_code": _number(job.exit_code)},
        }
        for job in jobs
    ]
    return json.dumps({"jobs": records, "last_update": _number(now(store)), "errors": [], "warnings": []})


def _planned_nodes(store: Store) -> set[str]:
    return {name for job in store.jobs().values() for name in job.planned}


def nodes_json(store: Store) -> str:
    """Format nodes as ``scontrol --json show nodes`` of 24.11 does."""
    cpus, planned = store.settings.cpus, _planned_nodes(store)
    records = []
    for name, job in store.node_jobs().items():
        state = ["ALLOCATED"] if job else ["IDLE", "PLANNED"] if name in planned else ["IDLE"]
        records.append(
            {
                "name": name,
                "state": state,
                "reason": "",
                "partitions": list(QUEUES),
                "cpus": cpus,
                "effective_cpus": cpus,
                "alloc_cpus": cpus if job else 0,
                "gres": "",
                "gres_used": "gpu:0",
                "real_memory": _MEMORY,
                "alloc_memory": _MEMORY if job else 0,
                "active_features": [],
                "last_busy": _number(now(store)),
            }
        )
    return json.dumps({"nodes": records, "errors": [], "warnings": []})


def nodes_text(store: Store) -> str:
    """Format nodes as ``scontrol -d show nodes`` does."""
    cpus, planned = store.settings.cpus, _planned_nodes(store)
    blocks = []
    for name, job in store.node_jobs().items():
        state = "ALLOCATED" if job else "IDLE+PLANNED" if name in planned else "IDLE"
        used = cpus if job else 0
        memory = _MEMORY if job else 0
        blocks.append(
            f"NodeName={name} Arch=x86_64 CoresPerSocket={cpus} \n"
            f"   CPUAlloc={used} CPUEfctv={cpus} CPUTot={cpus} CPULoad=0.00\n"
            f"   AvailableFeatures=(null)\n   ActiveFeatures=(null)\n   Gres=(null)\n   GresUsed=gpu:0\n"
            f"   NodeAddr=127.0.0.1 NodeHostName={name} Version={store.settings.version}\n"
            f"   RealMemory={_MEMORY} AllocMem={memory} FreeMem={_MEMORY - memory} Sockets=1 Boards=1\n"
            f"   State={state} ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A\n"
            f"   Partitions={','.join(QUEUES)} \n"
            f"   LastBusyTime={_date(now(store))}\n"
        )
    return "\n".join(blocks)


def partitions(store: Store) -> str:
    """Format partitions as ``scontrol show partition`` does."""
    names = list(store.client.nodes())
    nodes = compress_hosts(names)
    blocks = [
        f"PartitionName={name}\n"
        f"   AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL\n"
        f"   Default={'YES' if name == QUEUES[0] else 'NO'} QoS=N/A\n"
        f"   DefaultTime=00:10:00 DisableRootJobs=NO ExclusiveUser=NO GraceTime=0 Hidden=NO\n"
        f"   MaxNodes=UNLIMITED MaxTime=UNLIMITED MinNodes=0 LLN=NO MaxCPUsPerNode=UNLIMITED\n"
        f"   Nodes={nodes}\n"
        f"   PriorityJobFactor=1 PriorityTier={_TIERS[name]} RootOnly=NO ReqResv=NO OverSubscribe=EXCLUSIVE\n"
        f"   OverTimeLimit=NONE PreemptMode={'CANCEL' if name == 'preemptible' else 'OFF'}\n"
        f"   State=UP TotalCPUs={len(names) * store.settings.cpus} TotalNodes={len(names)}\n"
        for name in QUEUES
    ]
    return "\n".join(blocks)


def reservations(_: Store) -> str:
    """Return the output of ``scontrol show reservation`` without reservations."""
    return "No reservations in the system"


def config(store: Store) -> str:
    """Format the configuration, as far as it is used."""
    settings = {
        "AccountingStorageType": "accounting_storage/none",
        "AccountingStorageEnforce": "none",
        "PreemptMode": "CANCEL",
        "PreemptType": "preempt/partition_prio",
        "SchedulerParameters": "bf_interval=1,bf_max_job_test=1000",
        "SchedulerType": "sched/backfill",
        "SLURM_VERSION": store.settings.version,
    }
    head = f"Configuration data as of {_date(now(store))}\n"
    return head + "".join(f"{key:<23} = {value}\n" for key, value in settings.items())


def overview(store: Store) -> str:
    """Return the output of ``sinfo``."""
    planned = _planned_nodes(store)
    groups: dict[str, list[str]] = {}
    for name, job in store.node_jobs().items():
        groups.setdefault("alloc" if job else "plnd" if name in planned else "idle", []).append(name)
    lines = ["PARTITION   AVAIL  TIMELIMIT  NODES  STATE NODELIST"]
    for queue in QUEUES:
        mark = "*" if queue == QUEUES[0] else ""
        for state, names in groups.items():
            lines.append(
                f"{queue + mark:<11} {'up':>5} {'infinite':>10} {len(names):>6} {state:>6} {compress_hosts(names)}"
            )
    return "\n".join(lines)
