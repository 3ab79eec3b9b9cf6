"""What can be known where the batch system hides the jobs of others, but marks the idle nodes that it has planned.

Nobody can read there which job is planned where and when. What shows is one mark, ``planned``, on idle nodes. So:

- An idle node that is planned, and not for a job of ours, is somebody's: it is in no window.
- In a partition whose jobs cannot be preempted one idle, unplanned node, the *guard*, is left free. A job that waits
  for nodes takes idle ones first: it starts on the guard, or the guard becomes planned. As long as there is one,
  nobody waits for ours.
- Without a guard, while idle nodes are planned, somebody waits, perhaps for ours: all our blocks make way.
- Without a guard and without any idle node nobody can tell: the smallest of our blocks makes way, and its nodes show
  who waits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from freetrain_parsl.windows.hostlist import natural_order

if TYPE_CHECKING:
    from collections.abc import Collection

    from freetrain_parsl.windows.occupancy import Occupancy
    from freetrain_parsl.windows.state import Partition

__all__ = ["HiddenQueue"]


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
        Node that must not be used -> why.
    notes
        What is assumed, one line each.
    """

    def __init__(self, occupancy: Occupancy, partition: Partition) -> None:
        self._occupancy = occupancy
        self._preemptible = partition.preemptible
        state = occupancy.state
        ours = {name for job in state.pending if job.job in occupancy.ours for name in job.planned_nodes}
        idle = [name for name in partition.nodes if name in state.nodes and occupancy.is_free(state.nodes[name])]
        self._claimed = [name for name in idle if state.nodes[name].planned and name not in ours]
        self.unused = dict.fromkeys(self._claimed, "planned for a job that this site does not show")
        self.notes = ["this site hides the jobs of others: idle nodes that are planned for somebody are left alone"]
        self._guard: str | None = None
        if not partition.preemptible:
            self.notes.append(
                "this site hides the jobs of others, and ours cannot be preempted here: blocks are short, and one idle "
                "node is left free; when it is taken or planned, blocks make way"
            )
            self._guard = max((name for name in idle if name not in self.unused), key=natural_order, default=None)
            if self._guard is not None:
                self.unused[self._guard] = "left free: it shows whether somebody waits, whose jobs this site hides"

    def wanted(self) -> dict[str, float]:
        """Tell which nodes of our running jobs are given back: node -> now."""
        if self._preemptible or self._guard is not None:
            return {}
        blocks = [job for job in self._occupancy.state.running if job.job in self._occupancy.ours and job.nodes]
        if not self._claimed:
            blocks = sorted(blocks, key=lambda job: (len(job.nodes), natural_order(job.job)))[:1]
        return {name: self._occupancy.now for job in blocks for name in job.nodes}


def hides_jobs(private_data: str, user: str, slurm_user: str) -> bool:
    """Tell from Slurm's ``PrivateData`` whether a user is shown only jobs of their own.

    Users whom the accounting database makes operators see all jobs nevertheless; for them this is too careful.
    """
    words: Collection[str] = private_data.replace(" ", "").lower().split(",")
    return ("jobs" in words or "all" in words) and user not in ("root", slurm_user.partition("(")[0])
