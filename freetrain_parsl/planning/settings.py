"""The planner's assumptions about a site."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from freetrain_parsl.errors import InvalidSettings

__all__ = ["PlannerSettings"]


@dataclass(frozen=True)
class PlannerSettings:
    """The planner's assumptions about the site; all times in seconds.

    Parameters
    ----------
    startup
        Time from requesting a block until its slots are ready.
    min_useful
        Minimum training time after start-up for a block to be worth requesting.
    closing_margin
        How long before it closes a node is vacated.
    max_walltime
        Longest block; also the length of a block in a window of unknown closing.
    hidden_jobs_walltime
        Longest block where the batch system hides other users' jobs and cannot preempt ours: the longest time that a
        hidden job may have to wait for one.
    idle_timeout
        A block that is not needed for this long is released.
    join_timeout
        A node of a running block is dropped when its slots have been missing for this long; with the last node, its
        block is released.
    replan_interval
        Longest time between two decisions: work left, and with it the benefit of a rescale, changes without events.
    settle
        How long to wait for further nodes after one has joined, so that trainers grow once for all of them.
    max_pending_blocks
        Maximum number of blocks that may be pending or starting.
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
