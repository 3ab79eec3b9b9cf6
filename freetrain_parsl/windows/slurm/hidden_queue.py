"""What can be known where the batch system hides the jobs of others.

Nobody can read there which job is planned where and when, or waits for a node of ours. Two signs are left: idle nodes
that the scheduler has planned for somebody are marked ``planned``, and its statistics tell how many jobs wait. So:

- An idle node that is planned, and not for a job of ours, is somebody's: it is in no window.
- In a partition whose jobs cannot be preempted, nodes are used only while nobody else waits: as soon as a job of
  somebody does by either sign, there are no windows; by the statistics, all our blocks make way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from freetrain_parsl.windows.occupancy import Occupancy
    from freetrain_parsl.windows.state import Partition

__all__ = ["HiddenQueue", "hides_jobs"]


class HiddenQueue:
    """The rules of this module, for one round of queries.

    Parameters
    ----------
    occupancy
        The state, with the jobs that are shown: ours.
    partition
        Where our blocks run.

    Attributes
    ----------
    unused
        Idle node that must not be used -> why.
    wanted
        Nodes of our running jobs that are given back -> now, seconds.
    notes
        What is assumed, one line each.
    """

    def __init__(self, occupancy: Occupancy, partition: Partition) -> None:
        state = occupancy.state
        ours = {name for job in state.pending if job.job in occupancy.ours for name in job.planned_nodes}
        idle = [name for name in partition.nodes if name in state.nodes and occupancy.is_free(state.nodes[name])]
        self.unused = {
            name: "planned for a job that this site does not show"
            for name in idle
            if state.nodes[name].planned and name not in ours
        }
        self.wanted: dict[str, float] = {}
        self.notes = ["this site hides the jobs of others: idle nodes that are planned for somebody are left alone"]
        if partition.preemptible:
            return
        self.notes.append(
            "this site hides the jobs of others, and ours cannot be preempted here: nodes are used for short blocks "
            "only while nobody else waits; a preemptible partition has no such limits"
        )
        if state.others_waiting or self.unused:  # the statistics may be older than a plan
            why = "left alone: jobs of others wait, and this site does not show for what"
            self.unused = {**dict.fromkeys(idle, why), **self.unused}
        if state.others_waiting:
            running = (job for job in state.running if job.job in occupancy.ours)
            self.wanted = {name: state.time for job in running for name in job.nodes}


def hides_jobs(private_data: str, user: str, slurm_user: str) -> bool:
    """Tell from Slurm's ``PrivateData`` whether a user is shown only jobs of their own.

    Users whom the accounting database makes operators see all jobs nevertheless; for them this is too careful.
    """
    words = private_data.replace(" ", "").lower().split(",")
    return ("jobs" in words or "all" in words) and user not in ("root", slurm_user.partition("(")[0])
