"""Cost of one poll of a batch system, excluding its commands: parsing Slurm's output and finding the windows.

Use ``--quick`` for a short run, ``--json FILE`` to save the rows. The cluster is synthetic: three quarters of the nodes
run jobs of 1 to 64 nodes, the others are idle; of the pending jobs one in five has a planned start on named nodes, one
in ten is held, the others wait without a plan. We hold 32 nodes in 4 jobs, so that there are yield requests. Text is
the output of ``squeue -O`` and ``scontrol show nodes``, JSON that of Slurm 24.11 with ``--json``, of the same length as
the real one. Times are CPU seconds of the single thread; a row is the median of the repetitions; the target is 1 s for
10,000 nodes and 5,000 jobs.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

from _report import report

from freetrain_parsl.windows.availability_profile import NodeNeeds, find_windows
from freetrain_parsl.windows.slurm.jobs import SlurmJob, sort_jobs
from freetrain_parsl.windows.slurm.json_parser import parse_json_jobs, parse_json_nodes
from freetrain_parsl.windows.slurm.text_parser import parse_jobs, parse_nodes
from freetrain_parsl.windows.state import BatchState, Partition, Scheduling

NOW = 1_800_000_000
TARGET_SECONDS = 1.0
OUR_JOBS, OUR_NODES = 4, 8

_NODE_TEXT = """NodeName={name} Arch=x86_64 CoresPerSocket=64
   CPUAlloc={used} CPUEfctv=128 CPUTot=128 CPULoad=0.11
   AvailableFeatures=a100,nvme
   ActiveFeatures=a100,nvme
   Gres=gpu:a100:4(S:0-1)
   GresDrain=N/A
   GresUsed=gpu:a100:{gpus}(IDX:0-3)
   NodeAddr={name} NodeHostName={name} Version=24.11.5
   OS=Linux 5.14.21-150500.55.65_13.0.73-cray_shasta_c #1 SMP Sat Jul 20 13:37:22 UTC 2024
   RealMemory=515000 AllocMem=0 FreeMem=430000 Sockets=2 Boards=1
   State={state} ThreadsPerCore=2 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A
   Partitions=regular,debug
   BootTime=1799000000 SlurmdStartTime=1799000100
   LastBusyTime=1799999000 ResumeAfterTime=None
   CfgTRES=cpu=128,mem=515000M,billing=128,gres/gpu=4
   AllocTRES=
   CurrentWatts=0 AveWatts=0
"""


def make_cluster(nodes: int, jobs: int, seed: int = 1) -> tuple[list[tuple[str, bool]], list[SlurmJob], list[str]]:
    """Make nodes (name, whether busy), jobs, and the ids of our jobs."""
    rng = random.Random(seed)
    names = [f"nid{index:06d}" for index in range(nodes)]
    busy = set(names[: nodes * 3 // 4])
    records = []
    free = iter(names)

    def record(**values: Any) -> None:
        base = SlurmJob(
            str(1000 + len(records)),
            "regular",
            "PENDING",
            "ada",
            3600.0,
            None,
            None,
            1,
            "",
            "",
            "",
            1.0,
            "None",
            "",
            "train",
        )
        records.append(base._replace(**values))

    left = len(busy)
    while left:
        size = OUR_NODES if len(records) < OUR_JOBS else min(left, rng.randint(1, 64))
        left -= size
        first = next(free)
        last = [next(free) for _ in range(size - 1)][-1:] or [first]
        ends = NOW + 60.0 * rng.randint(1, 600)
        record(state="RUNNING", nodes=f"nid[{first[3:]}-{last[0][3:]}]", start=NOW - 600.0, ends=ends, node_count=size)
    ours = [item.job for item in records[:OUR_JOBS]]
    while len(records) < jobs:
        size = rng.randint(1, 64)
        kind = rng.random()
        more: dict[str, Any] = {"reason": "Priority", "priority": rng.uniform(1, 1e6)}
        if kind < 0.2:
            start = rng.randrange(nodes - size)
            planned = f"nid[{start:06d}-{start + size - 1:06d}]"
            more |= {"start": NOW + 60.0 * rng.randint(1, 600), "planned_nodes": planned}
        elif kind < 0.3:
            more |= {"reason": "JobHeldUser", "priority": 0.0}
        record(node_count=size, walltime=60.0 * rng.randint(10, 1440), **more)
    return [(name, name in busy) for name in names], records, ours


def as_text(nodes: list[tuple[str, bool]], jobs: list[SlurmJob]) -> tuple[str, str]:
    """Format the output of squeue and scontrol."""
    lines = []
    for job in jobs:
        minutes = int(job.walltime or 0) // 60
        times = ["N/A" if when is None else f"{when:.0f}" for when in (job.start, job.ends)]
        fields = (job.job, job.partition, job.state, job.user, f"{minutes}:00", *times, f"{job.node_count}", job.nodes)
        lines.append(
            "\t".join([*fields, job.planned_nodes or "(null)", "", f"{job.priority:.0f}", job.reason, "(null)", ""])
        )
    blocks = [
        _NODE_TEXT.format(name=name, used=128 * busy, gpus=4 * busy, state="ALLOCATED" if busy else "IDLE+PLANNED")
        for name, busy in nodes
    ]
    return "\n".join(lines) + "\n", "\n".join(blocks) + "\n"


def as_json(nodes: list[tuple[str, bool]], jobs: list[SlurmJob]) -> tuple[str, str]:
    """Format the output of Slurm 24.11 with ``--json``, padded to its length."""

    def number(value: float | None) -> dict[str, Any]:
        return {"set": True, "infinite": False, "number": int(value or 0)}

    padding = {f"other_field_{index}": number(None) for index in range(60)}
    job_items = [
        padding
        | {
            "job_id": int(job.job),
            "partition": job.partition,
            "job_state": [job.state],
            "user_name": job.user,
            "time_limit": number((job.walltime or 0) // 60),
            "start_time": number(job.start),
            "end_time": number(job.ends),
            "node_count": number(job.node_count),
            "nodes": job.nodes,
            "scheduled_nodes": job.planned_nodes,
            "required_nodes": "",
            "priority": number(job.priority),
            "state_reason": job.reason,
            "features": "",
        }
        for job in jobs
    ]
    node_items = [
        dict(list(padding.items())[:12])
        | {
            "name": name,
            "state": ["ALLOCATED"] if busy else ["IDLE", "PLANNED"],
            "reason": "",
            "partitions": ["regular", "debug"],
            "cpus": 128,
            "effective_cpus": 128,
            "alloc_cpus": 128 * busy,
            "gres": "gpu:a100:4(S:0-1)",
            "gres_used": f"gpu:a100:{4 * busy}(IDX:0-3)",
            "real_memory": 515000,
            "alloc_memory": 0,
            "active_features": ["a100", "nvme"],
            "last_busy": number(NOW - 1000),
            "tres": "cpu=128,mem=515000M,billing=128,gres/gpu=4",
            "operating_system": "Linux 5.14.21-150500.55.65_13.0.73-cray_shasta_c #1 SMP",
        }
        for name, busy in nodes
    ]
    return json.dumps({"jobs": job_items}, indent=1), json.dumps({"nodes": node_items}, indent=1)


def measure(nodes: int, jobs: int, form: str, repeats: int) -> dict[str, Any]:
    """Time the parsing and the search for windows; verify both against the synthetic cluster."""
    made_nodes, made_jobs, ours = make_cluster(nodes, jobs)
    squeue, scontrol = (as_text if form == "text" else as_json)(made_nodes, made_jobs)
    read_jobs, read_nodes = (parse_jobs, parse_nodes) if form == "text" else (parse_json_jobs, parse_json_nodes)
    partitions = {"regular": Partition("regular", tuple(name for name, _ in made_nodes))}
    needs = NodeNeeds("regular", cpus=128, gpus=4, features=frozenset({"a100"}))
    parse_seconds, find_seconds = [], []
    for _ in range(repeats):
        begin = time.process_time()
        running, pending = sort_jobs(read_jobs(squeue), partitions)
        known = read_nodes(scontrol)
        parsed = time.process_time()
        scheduling = Scheduling("slurm", plan_jobs=500)
        state = BatchState(float(NOW), scheduling, known, running, pending, (), partitions)
        staircase = find_windows(state, needs, ours)
        find_seconds.append(time.process_time() - parsed)
        parse_seconds.append(parsed - begin)
    in_windows = sum(len(window.nodes) for window in staircase.windows)
    if in_windows + len(staircase.unused) != nodes or len(running) + len(pending) != jobs:
        raise SystemExit("nodes or jobs are missing in the result")
    total = statistics.median(map(sum, zip(parse_seconds, find_seconds, strict=True)))
    return {
        "nodes": nodes,
        "jobs": jobs,
        "form": form,
        "megabytes": (len(squeue) + len(scontrol)) / 1e6,
        "parse_s": statistics.median(parse_seconds),
        "windows_s": statistics.median(find_seconds),
        "total_s": total,
        "of_target": total / TARGET_SECONDS,
        "windows": len(staircase.windows),
        "wanted": len(staircase.wanted),
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small cluster, one repetition")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    sizes = [(1000, 500)] if arguments.quick else [(1000, 500), (10_000, 5_000)]
    repeats = 1 if arguments.quick else arguments.repeats
    rows = [measure(nodes, jobs, form, repeats) for nodes, jobs in sizes for form in ("text", "json")]
    report("One poll of a batch system", rows, (), arguments.json)


if __name__ == "__main__":
    main()
