"""What the planner assumes of a site."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from freetrain_parsl.errors import InvalidSettings

__all__ = ["PlannerSettings"]


@dataclass(frozen=True)
class PlannerSettings:
    """What the planner assumes of the site; all times in seconds.

    Parameters
    ----------
    startup
        From the request of a block until its slots are ready.
    min_useful
        Least training time that a block must give after its start-up to be worth requesting.
    closing_margin
        A node is vacated this long before it closes.
    max_walltime
        Longest block, and the length of one in a window of unknown closing.
    hidden_jobs_walltime
        Longest block where the batch system hides the jobs of others and cannot preempt ours: the longest that a job
        which nobody sees may wait for one.
    idle_timeout
        A block that nothing wants for this long is released.
    join_timeout
        A node of a running block whose slots are missing for this long is given up, and with the last its block.
    replan_interval
        Longest time between two decisions: work left, and with it what a rescale pays, changes without events.
    settle
        After a node has joined, how long to wait for its neighbours before trainers grow once for all of them.
    max_pending_blocks
        Most blocks that may wait in the queue or be starting.
    max_nodes_per_block
        Larger blocks are split; a preempted block takes all its nodes with it.
    """

    startup: float = 30.0
    min_useful: float = 60.0
    closing_margin: float = 10.0
    max_walltime: float = 3600.0
    hidden_jobs_walltime: float = 900.0
    idle_timeout: float = 30.0
    join_timeout: float = 180.0
    replan_interval: float = 30.0
    settle: float = 2.0
    max_pending_blocks: int = 8
    max_nodes_per_block: int | None = None

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            least = 1 if item.name.startswith("max_") else 0
            if value is not None and not (math.isfinite(value) and value >= least):
                raise InvalidSettings(
                    f"planner setting {item.name!r} must be a number of at least {least}, got {value!r}"
                )
