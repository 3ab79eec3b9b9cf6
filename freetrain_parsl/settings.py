"""The executor's settings, by subject; the planner's are in `freetrain_parsl.planning.settings`."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from freetrain_parsl.errors import InvalidSettings
from freetrain_parsl.planning.settings import DEFAULT_COSTS, RescaleCosts
from freetrain_parsl.protocol.options import SessionOptions
from freetrain_parsl.settings_checks import check_count, check_duration

__all__ = ["CheckpointSettings", "RateLimits", "TrainingSettings"]


@dataclass(frozen=True)
class TrainingSettings:
    """Settings of an executor's training jobs.

    Parameters
    ----------
    rescale_costs
        Training time lost by a change of nodes, for training jobs that do not state it, until it is measured.
    heartbeat_timeout
        Time without a heartbeat after which a slot, or the driver, counts as failed: the delay in detecting a process
        that hangs or a node that is cut off. A process that dies is detected at once.
    peer_timeout
        If all members of a training job are alive but only wait for each other for this long, their connections are
        assumed to be broken and they form a new group. Must exceed the longest exchange of gradients.
    max_restarts
        A training job fails after more than this number of crashes without reaching a new step.
    threads_per_slot
        Number of torch threads in each slot; ``None``: one for each core of the slot's share where several slots share
        a node, otherwise torch's default.
    bind_cores
        Whether each of several slots of a node is bound to its share of the node's cores. Set it to false where the
        site manages that. Slots of the embedded cluster are never bound: its nodes share the cores of this host.

    Raises
    ------
    InvalidSettings
        A value is out of range.
    """

    rescale_costs: RescaleCosts = DEFAULT_COSTS
    heartbeat_timeout: timedelta = timedelta(seconds=10)
    peer_timeout: timedelta = timedelta(seconds=10)
    max_restarts: int = 3
    threads_per_slot: int | None = None
    bind_cores: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.rescale_costs, RescaleCosts):
            raise InvalidSettings(
                f"TrainingSettings: rescale_costs must be RescaleCosts(up, down, start), got {self.rescale_costs!r}"
            )
        check_duration("TrainingSettings: heartbeat_timeout", self.heartbeat_timeout)
        check_duration("TrainingSettings: peer_timeout", self.peer_timeout)
        check_count("TrainingSettings: max_restarts", self.max_restarts, least=0)
        if self.threads_per_slot is not None:
            check_count("TrainingSettings: threads_per_slot", self.threads_per_slot)


@dataclass(frozen=True)
class RateLimits:
    """Limits on an executor's load on the batch system.

    Parameters
    ----------
    poll_interval
        Time between rounds of queries to the batch system.
    submissions_per_minute
        Maximum number of blocks submitted per minute.
    max_refusals
        After this number of consecutive permanent rejections, no further block is submitted, and waiting training jobs
        fail with the reason.
    max_failed_blocks
        The same after this number of consecutive attempts to start a block that end before a worker connects, e.g.
        because ``worker_init`` fails. The pause between attempts doubles.

    Raises
    ------
    InvalidSettings
        A value is out of range.
    """

    poll_interval: timedelta = timedelta(seconds=15)
    submissions_per_minute: int = 20
    max_refusals: int = 5
    max_failed_blocks: int = 5

    def __post_init__(self) -> None:
        check_duration("RateLimits: poll_interval", self.poll_interval)
        check_count("RateLimits: submissions_per_minute", self.submissions_per_minute)
        check_count("RateLimits: max_refusals", self.max_refusals)
        check_count("RateLimits: max_failed_blocks", self.max_failed_blocks)


@dataclass(frozen=True)
class CheckpointSettings:
    """Settings of the checkpoints of an executor's training jobs.

    Parameters
    ----------
    interval
        Time between periodic checkpoints; ``None``: derived from their cost and the failure rate. Additional
        checkpoints are written when windows close.
    save_margin
        Time between the completion of the last checkpoint and the closing of a node.
    keep
        Number of checkpoints to keep of each training job; with two, there is one to fall back on.

    Raises
    ------
    InvalidSettings
        A value is out of range.
    """

    interval: timedelta | None = None
    save_margin: timedelta = SessionOptions.save_margin
    keep: int = SessionOptions.keep

    def __post_init__(self) -> None:
        if self.interval is not None:
            check_duration("CheckpointSettings: interval", self.interval)
        check_duration("CheckpointSettings: save_margin", self.save_margin, least=timedelta(0))
        check_count("CheckpointSettings: keep", self.keep)
