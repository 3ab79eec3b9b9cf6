"""What `peers.py` measures from outside, for each way alike: node time from Slurm, samples from the jobs' records."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import dataclass
from datetime import datetime
from statistics import median
from typing import TYPE_CHECKING, Any

from _peers_workload import SAMPLE_SECONDS, read_finished, read_records, read_steps, undisturbed_losses

from freetrain_parsl.windows.hostlist import expand_hosts

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from _peers_workload import Job

_LATE = 7.0  # seconds by which Slurm's record may end before the last step: until it kills, and whole seconds
_NEVER = ("Unknown", "None")


@dataclass(frozen=True)
class Held:
    """A stay of a batch job in the queue and on its nodes; times in seconds since the epoch, 0 where there is none."""

    job: str
    submit: float
    start: float
    end: float
    nodes: tuple[str, ...]
    state: str = ""

    def node_seconds(self, since: float, until: float) -> float:
        """Return the node-seconds between two times."""
        return len(self.nodes) * max(0.0, min(self.end, until) - max(self.start, since))


def read_held(file: Path, partition: str) -> list[Held]:
    """Read the stays of a partition's jobs from the records of Slurm's ``jobcomp/filetxt``, one for each requeue."""
    stays = []
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        fields = dict(re.findall(r"(\w+)=(\S*)", line))
        if fields.get("Partition") == partition:
            times = (_time_of(fields[name]) for name in ("SubmitTime", "StartTime", "EndTime"))
            nodes = () if fields["NodeList"] in ("", "(null)") else tuple(expand_hosts(fields["NodeList"]))
            stays.append(Held(fields["JobId"], *times, nodes, fields["JobState"]))
    return stays


def _time_of(text: str) -> float:
    return 0.0 if text in _NEVER else datetime.fromisoformat(text).timestamp()


def held_on_idle(stays: Sequence[Held], idle: Sequence[tuple[str, float, float]]) -> float:
    """Return the node-seconds that these jobs held in the periods in which their nodes had no main job."""
    return sum(
        max(0.0, min(stay.end, until) - max(stay.start, since))
        for node, since, until in idle
        for stay in stays
        if node in stay.nodes
    )


def shares(
    directory: Path,
    jobs: Sequence[Job],
    stays: Sequence[Held],
    idle: Sequence[tuple[str, float, float]],
    until: float,
    *,
    saves: bool = True,
) -> dict[str, Any]:
    """Summarize a way.

    Parameters
    ----------
    directory
        Its shared directory, with the records of its jobs.
    jobs
        Its training jobs.
    stays
        Its batch jobs.
    idle
        Periods in which a node had no main job: node, from, until; seconds since the epoch.
    until
        End of the measurement.
    saves
        Whether its jobs save their state.
    """
    counts = [
        read_records(directory, job, until, () if saves else ended_in_vain(directory, job, stays, until))
        for job in jobs
    ]
    gaps = {}
    for job in jobs:
        loss = read_finished(directory, job, until)
        if loss is not None:
            gaps[job.name] = _gap(loss, undisturbed_losses(job))
    offered = sum(b - a for _, a, b in idle)
    held = held_on_idle(stays, idle)
    trained = sum(count["trained"] for count in counts) * SAMPLE_SECONDS
    useful = sum(count["useful"] for count in counts) * SAMPLE_SECONDS
    begin = min((a for _, a, _ in idle), default=until)
    return {
        "offered_node_s": offered,
        "useful_per_offered": useful / offered,
        "held_per_offered": held / offered,
        "useful_per_held": useful / held if held else None,
        "repeated_per_held": (trained - useful) / held if held else None,
        "finished": len(gaps),
        "samples_repeated": sum(count["repeated"] for count in counts),
        "samples_lost": sum(count["lost"] for count in counts),
        "loss_gap": max((gap for gap, _ in gaps.values()), default=None),
        "loss_spread": max((spread for _, spread in gaps.values()), default=None),
        "samples_outside": trained_outside(directory, stays, until),
        "batch_jobs": sum(stay.start > 0 and bool(stay.nodes) for stay in stays),
        "batch_jobs_failed": sum(stay.state == "FAILED" for stay in stays),
        "queue_length": at_once(stays),
        "start_s": median(starts) if (starts := seconds_to_start(directory, stays)) else None,
        "held_node_s": sum(stay.node_seconds(begin, until) for stay in stays if stay.start),
        "trained_samples": sum(count["trained"] for count in counts),
    }


def trained_outside(directory: Path, stays: Sequence[Held], until: float) -> int:
    """Return how many samples were trained on a node that the way did not hold: by processes that it left there."""
    outside = 0
    for file in (directory / "seen").glob("*/*.jsonl"):
        node, _ = _process_of(file)
        times = [(stay.start, stay.end + _LATE) for stay in stays if node in stay.nodes]
        for at, samples in read_steps(file):
            if at <= until and not any(start <= at <= end for start, end in times):
                outside += len(samples)
    return outside


def ended_in_vain(directory: Path, job: Job, stays: Sequence[Held], until: float) -> list[str]:
    """Return the names of the records of a job's processes that ended before it was finished."""
    files = sorted((directory / "seen" / job.name).glob("*.jsonl"), key=lambda file: _process_of(file)[1])
    if read_finished(directory, job, until) is not None:
        return [file.stem for file in files[:-1]]
    lost = []
    for file in files:
        node, at = _process_of(file)
        if any(node in stay.nodes and stay.start <= at < stay.end <= until for stay in stays):
            lost.append(file.stem)
    return lost


def _process_of(file: Path) -> tuple[str, float]:
    """Return the node of a process that wrote records, and when it began."""
    node, _, nanoseconds = file.stem.rsplit("-", 2)
    return node, int(nanoseconds) / 1e9


def seconds_to_start(directory: Path, stays: Sequence[Held]) -> list[float]:
    """Return, for each stay that trained, the seconds from its start until a training function began on its nodes."""
    begun: dict[str, list[float]] = {}
    for file in (directory / "seen").glob("*/*.jsonl"):
        node, at = _process_of(file)
        begun.setdefault(node, []).append(at)
    found = []
    for stay in stays:
        times = [at for node in stay.nodes for at in begun.get(node, ()) if stay.start <= at < stay.end]
        found += [min(times) - stay.start] if times else []
    return found


def _gap(loss: float, references: Sequence[float]) -> tuple[float, float]:
    """Return how much a loss exceeds the median of the references, and the spread of those."""
    return loss - median(references), max(references) - min(references)


def at_once(stays: Sequence[Held]) -> int:
    """Return how many jobs were in the queue, pending or running, at the same time, at most."""
    ends: dict[str, float] = {}
    submits: dict[str, float] = {}
    for stay in stays:
        ends[stay.job] = max(stay.end, ends.get(stay.job, 0.0))
        submits[stay.job] = min(stay.submit, submits.get(stay.job, stay.submit))
    return max((sum(submits[job] <= at < ends[job] for job in ends) for at in submits.values()), default=0)


def read_report(directory: Path, freetrain: str, environment: dict[str, str]) -> dict[str, Any]:
    """Return the own account of FreeTrain's run in this directory: ``freetrain report --json``."""
    done = subprocess.run(
        [freetrain, "report", "--json"], cwd=directory, env=environment, capture_output=True, text=True, check=True
    )
    report: dict[str, Any] = json.loads(done.stdout)
    return report
