"""The planner's assumptions about a site, and about what a change of nodes costs."""

from __future__ import annotations

from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any

from freetrain_parsl.planning.model import CostsInSeconds
from freetrain_parsl.settings_checks import check_count, check_duration

__all__ = ["DEFAULT_COSTS", "PlannerSettings", "RescaleCosts", "SettingsInSeconds"]


@dataclass(frozen=True)
class RescaleCosts:
    """Training time that is lost when the nodes of a training job change.

    Parameters
    ----------
    up, down
        When it grows, or shrinks (also to zero nodes), at the rate it had before.
    start
        When it starts or resumes on nodes, at its rate there.

    Raises
    ------
    InvalidSettings
        A value is not a duration of zero or more.
    """

    up: timedelta = timedelta(0)
    down: timedelta = timedelta(0)
    start: timedelta = timedelta(0)

    def __post_init__(self) -> None:
        for item in fields(self):
            check_duration(f"RescaleCosts: {item.name}", getattr(self, item.name), least=timedelta(0))

    def in_seconds(self) -> CostsInSeconds:
        """Return the same costs as the planner computes with them."""
        return CostsInSeconds(self.up.total_seconds(), self.down.total_seconds(), self.start.total_seconds())


DEFAULT_COSTS = RescaleCosts(timedelta(seconds=2), timedelta(seconds=2), timedelta(seconds=2))
"""Costs of training jobs that state none."""


@dataclass(frozen=True)
class PlannerSettings:
    """The planner's assumptions about the site.

    Parameters
    ----------
    startup
        Time from requesting a block until its slots are ready.
    min_useful
        Minimum training time after start-up for a block to be worth requesting.
    closing_margin
        Time before the closing of a node at which it is vacated.
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
        Time to wait for further nodes after one has joined, so that trainers grow once for all of them.
    max_pending_blocks
        Maximum number of blocks that may be pending or starting.
    standby_blocks
        Maximum number of these that wait in the queue of a preemptible partition for nodes to become idle; if there are
        several kinds of nodes, for each kind.
    max_nodes_per_block
        Larger blocks are split; a preempted block takes all its nodes with it.

    Raises
    ------
    InvalidSettings
        A value is out of range.
    """

    startup: timedelta = timedelta(seconds=30)
    min_useful: timedelta = timedelta(minutes=1)
    closing_margin: timedelta = timedelta(seconds=10)
    max_walltime: timedelta = timedelta(hours=1)
    hidden_jobs_walltime: timedelta = timedelta(minutes=15)
    idle_timeout: timedelta = timedelta(seconds=30)
    join_timeout: timedelta = timedelta(minutes=3)
    replan_interval: timedelta = timedelta(seconds=30)
    settle: timedelta = timedelta(seconds=2)
    max_pending_blocks: int = 8
    standby_blocks: int = 2
    max_nodes_per_block: int | None = None

    def __post_init__(self) -> None:
        for item in fields(self):
            setting, value = f"PlannerSettings: {item.name}", getattr(self, item.name)
            if item.type == "timedelta":
                check_duration(setting, value, least=timedelta(seconds=1 if item.name == "max_walltime" else 0))
            elif value is not None or item.type == "int":
                check_count(setting, value, least=0 if item.name == "standby_blocks" else 1)

    def in_seconds(self) -> SettingsInSeconds:
        """Return the same settings as the planner computes with them."""
        values: dict[str, Any] = {item.name: getattr(self, item.name) for item in fields(self)}
        for name, value in values.items():
            if isinstance(value, timedelta):
                values[name] = value.total_seconds()
        return SettingsInSeconds(**values)


@dataclass(frozen=True)
class SettingsInSeconds:
    """`PlannerSettings` with durations as seconds, like all times inside the planner."""

    startup: float
    min_useful: float
    closing_margin: float
    max_walltime: float
    hidden_jobs_walltime: float
    idle_timeout: float
    join_timeout: float
    replan_interval: float
    settle: float
    max_pending_blocks: int
    max_nodes_per_block: int | None
    standby_blocks: int = 0  # as in recordings of versions that had none
