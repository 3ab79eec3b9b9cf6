"""Rules for batch systems that hide other users' jobs.

There it is unknown which job is planned where and when, or waits for one of our nodes. Two sources remain: idle nodes
that the scheduler has planned for a job are marked ``planned``, and its statistics include the number of pending jobs.
Therefore:

- An idle node that is planned, and not for one of our jobs, is in no window.
- In a partition whose jobs cannot be preempted, nodes are used only while no other job is pending: as soon as either
  source shows one, there are no windows; if the statistics show it, all our blocks yield.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from freetrain_parsl.windows.occupancy import Occupancy
    from freetrain_parsl.windows.state import Partition

__all__ = ["HiddenQueue", "hides_jobs"]


class HiddenQueue:
    """The rules of this module, for one round of queries and the partition of our blocks; visible jobs are ours.

    Attributes
    ----------
    unused
        Idle node that must not be used -> why.
    wanted
        Nodes of our running jobs to be released -> now, seconds.
    notes
        Assumptions, one line each.
    """

    def __init__(self, occupancy: Occupancy, partition: Partition) -> None:
        state = occupancy.state
        ours = {name for job in state.pending if job.job in occupancy.ours for name in job.planned_nodes}
        idle = [name for name in partition.nodes if name in state.nodes and occupancy.is_free(state.nodes[name])]
        self.unused = {
            name: "planned for a job that this site hides"
            for name in idle
            if state.nodes[name].planned and name not in ours
        }
        self.wanted: dict[str, float] = {}
        self.notes = ["this site hides other users' jobs: idle nodes that are planned for a job are not used"]
        if partition.preemptible:
            return
        self.notes.append(
            "this site hides other users' jobs, and ours cannot be preempted here: nodes are used only for short "
            "blocks and while no other job is pending; a preemptible partition has no such limits"
        )
        if state.others_waiting or self.unused:  # the statistics may be older than the plan
            why = "not used: other jobs are pending, and this site does not show for which nodes"
            self.unused = {**dict.fromkeys(idle, why), **self.unused}
        if state.others_waiting:
            running = (job for job in state.running if job.job in occupancy.ours)
            self.wanted = {name: state.time for job in running for name in job.nodes}


def hides_jobs(private_data: str, user: str, slurm_user: str) -> bool:
    """Return whether, according to Slurm's ``PrivateData``, a user sees only their own jobs.

    Operators in the accounting database see all jobs anyway; for them this is too conservative.
    """
    words = private_data.replace(" ", "").lower().split(",")
    return ("jobs" in words or "all" in words) and user not in ("root", slurm_user.partition("(")[0])
