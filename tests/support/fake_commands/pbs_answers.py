"""Output of the fake PBS commands in the format of OpenPBS 23.06: JSON with tabs, dates in words."""

from __future__ import annotations

import getpass
import json
import time
from typing import TYPE_CHECKING, Any

from freetrain_parsl.extensions.pbs.values import write_duration
from tests.support.fake_commands.store import QUEUES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.support.fake_commands.store import FakeJob, Store

__all__ = ["SCHEDULER", "full_id", "jobs", "nodes", "on_island", "queues", "server"]

SCHEDULER = """Sched default
    sched_host = fake
    preempt_queue_prio = 150
    preempt_prio = express_queue, normal_jobs
    preempt_order = R
    scheduling = True
    scheduler_iteration = 1
"""

_SERVER = "fake"
_ISLANDS = ("even", "odd")  # a site's own resource, by which a job may select nodes
_PRIORITIES = {"main": 100, "backfill": 10, "preemptible": 1}
_MEMORY = "16777216kb"
_TERMINATED, _FINISHED, _FAILED = 91, 92, 93
# State in the cluster -> exit status and substate. 271 is 256 + SIGTERM.
_ENDS = {
    "COMPLETED": (0, _FINISHED),
    "FAILED": (1, _FINISHED),
    "TIMED_OUT": (-29, _FAILED),
    "PREEMPTED": (271, _FAILED),
    "CANCELLED": (271, _TERMINATED),
}


def full_id(job: str) -> str:
    """Return the PBS id of a job."""
    return f"{job}.{_SERVER}"


def _write(store: Store, now: float, **content: Any) -> str:
    head = {"timestamp": int(now), "pbs_version": store.settings.version, "pbs_server": _SERVER}
    return json.dumps({**head, **content}, indent="\t", separators=(",", ":\t"))


def _now(store: Store) -> float:
    return float(store.client.ping()["time"])


def _date(when: float) -> str:
    return time.strftime("%a %b %d %H:%M:%S %Y", time.localtime(when))


def _vnodes(store: Store, names: Sequence[str]) -> str:
    return "+".join(f"({name}:ncpus={store.settings.cpus})" for name in names)


def jobs(store: Store, shown: Sequence[FakeJob]) -> str:
    """Format jobs as ``qstat -f -F json`` does."""
    records = {full_id(job.id): _job(store, job) for job in shown}
    # Without jobs, PBS omits the key.
    return _write(store, _now(store), Jobs=records) if records else _write(store, _now(store))


def _job(store: Store, job: FakeJob) -> dict[str, Any]:
    cpus = store.settings.cpus
    record: dict[str, Any] = {
        "Job_Name": job.name,
        "Job_Owner": f"{job.user}@{_SERVER}",
        "job_state": _letter(job),
        "queue": job.queue,
        "server": _SERVER,
        "Hold_Types": "n",
        "Priority": 0,
        "qtime": _date(job.submit),
        "Rerunable": "False",
        "Resource_List": {
            "ncpus": cpus * job.node_count,
            "nodect": job.node_count,
            "place": "scatter",
            "select": f"{job.node_count}:ncpus={cpus}",
            "walltime": write_duration(job.walltime),
        },
        "schedselect": f"{job.node_count}:ncpus={cpus}",
        "substate": 10 if job.state == "PENDING" else 42,
        "euser": job.user,
    }
    if job.nodes:
        where = _vnodes(store, job.nodes)
        record["exec_vnode"] = where
        record["comment"] = f"Job run at {time.strftime('%a %b %d at %H:%M', time.localtime(job.start))} on {where}"
    if job.start is not None:
        record["stime"] = _date(job.start)
        record["run_count"] = 1
    if job.state == "PENDING":
        record["comment"] = "Not Running: Not enough free nodes available"
    if job.planned_start is not None:
        record["estimated"] = {"exec_vnode": _vnodes(store, job.planned), "start_time": _date(job.planned_start)}
        record["topjob"] = "True"
    if job.end is not None:
        record |= _end(job, record.get("comment", ""))
    return record


def _letter(job: FakeJob) -> str:
    if job.end is not None:
        return "F"
    if job.ending:
        return "E"
    return {"PENDING": "Q", "RUNNING": "R"}[job.state]


def _end(job: FakeJob, comment: str) -> dict[str, Any]:
    assert job.end is not None
    status, substate = _ENDS[job.state]
    record: dict[str, Any] = {"obittime": _date(job.end), "substate": substate}
    if job.start is not None:
        record["Exit_status"] = job.exit_code or status if job.state == "FAILED" else status
    if job.state == "CANCELLED":
        record["comment"] = f"{comment} and terminated by {getpass.getuser()}@{_SERVER}".strip()
    elif job.state == "COMPLETED":
        record["comment"] = f"{comment} and finished".strip()
    return record


def nodes(store: Store) -> str:
    """Format vnodes as ``pbsnodes -av -F json`` does."""
    cpus, now = store.settings.cpus, _now(store)
    records = {}
    for number, (name, job) in enumerate(store.node_jobs().items()):
        resources = {"arch": "linux", "host": name, "mem": _MEMORY, "ncpus": cpus, "vnode": name}
        records[name] = {
            "Mom": name,
            "ntype": "PBS",
            "state": "job-exclusive" if job else "free",
            "pcpus": cpus,
            **({"jobs": [full_id(job)]} if job else {}),
            "resources_available": {**resources, "island": _ISLANDS[number % 2]},
            "resources_assigned": {"ncpus": cpus} if job else {},
            "resv_enable": "True",
            "sharing": "default_excl",
            "last_used_time": int(now),
        }
    return _write(store, now, nodes=records)


def on_island(island: str, names: Sequence[str], all_names: Sequence[str]) -> list[str]:
    """Return those of `names` that are on an island."""
    return [name for name in names if _ISLANDS[all_names.index(name) % 2] == island]


def queues(store: Store) -> str:
    """Format queues as ``qstat -Qf -F json`` does."""
    records = {
        name: {"queue_type": "Execution", "Priority": _PRIORITIES[name], "enabled": "True", "started": "True"}
        for name in QUEUES
    }
    return _write(store, _now(store), Queue=records)


def server(store: Store) -> str:
    """Format the server as ``qstat -Bf -F json`` does."""
    record = {
        "server_state": "Active",
        "default_queue": QUEUES[0],
        "query_other_jobs": "True",
        "scheduler_iteration": 1,
        "job_history_enable": "True",
        "pbs_version": store.settings.version,
    }
    return _write(store, _now(store), Server={_SERVER: record})
