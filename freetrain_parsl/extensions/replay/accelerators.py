"""Nodes of several accelerators in a replay: shared by training jobs, or whole nodes as units.

The log's nodes are as recorded. Where jobs share them, each hole of a node is one of each of its accelerators. Training
jobs are described over accelerators either way, so that the same jobs are replayed on both kinds of units.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from freetrain_parsl.errors import InvalidSettings
from freetrain_parsl.extensions.replay.holes import Change, Hole, HoleLog
from freetrain_parsl.places import slot_place
from freetrain_parsl.planning.curves.scaling import ScalingCurve

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from freetrain_parsl.extensions.replay.simulation import Outcome
    from freetrain_parsl.planning.model import PlannedJob

__all__ = ["Accelerators", "SlotLog", "accelerator_figures", "over_accelerators", "over_whole_nodes", "per_node"]

_MOST = 64  # of a node
_HOUR = 3600.0


@dataclass(frozen=True)
class Accelerators:
    """The accelerators of each node.

    Parameters
    ----------
    per_node
        How many a node has.
    shared
        Whether jobs share nodes; otherwise each node that a job has is its own, even if it cannot use all of it.
    """

    per_node: int
    shared: bool = True

    def __post_init__(self) -> None:
        if not 2 <= self.per_node <= _MOST:
            raise InvalidSettings(f"--accelerators: must be 2 to {_MOST}, got {self.per_node}")


class SlotLog(HoleLog):
    """A log in which each node is its accelerators, named as in `freetrain_parsl.places`.

    Parameters
    ----------
    log
        The log of whole nodes. Forecasts remain about these.
    per_node
        Accelerators of each node.
    """

    def __init__(self, log: HoleLog, per_node: int) -> None:
        self._log, self._lanes = log, range(per_node)
        self.name, self.nodes, self.date = log.name, log.nodes * per_node, log.date
        self.start, self.end = log.start, log.end
        self.skipped, self.clipped, self.zero_length, self.masked = (
            log.skipped,
            log.clipped,
            log.zero_length,
            log.masked,
        )
        self.has_forecasts = log.has_forecasts

    def changes(self, *, forecasts: bool = False) -> Iterator[Change]:
        """Yield the changes; see `HoleLog.changes`."""
        for change in self._log.changes(forecasts=forecasts):
            yield replace(
                change,
                opened=tuple(
                    Hole(slot_place(hole.node, lane), hole.start, hole.end)
                    for hole in change.opened
                    for lane in self._lanes
                ),
                closed=tuple(slot_place(node, lane) for node in change.closed for lane in self._lanes),
            )


def over_accelerators(trainer: PlannedJob, per_node: int) -> PlannedJob:
    """Convert a training job described over nodes to one over accelerators.

    Its curve is linear inside a node, from zero, and has the points of the nodes. A job that may run on one node may
    run on one accelerator. A speedup of 1 is its rate on as few accelerators as it may have.
    """
    points = {nodes * per_node: rate for nodes, rate in trainer.curve.points}
    if trainer.curve.first_nodes == 1:
        points[1] = trainer.curve(1) / per_node
    curve = ScalingCurve(points, relative=trainer.curve.relative)
    least = 1 if trainer.min_nodes == 1 else trainer.min_nodes * per_node
    return replace(
        trainer,
        min_nodes=least,
        max_nodes=trainer.max_nodes * per_node,
        curve=curve,
        unit=trainer.unit or curve(least) or None,
    )


def over_whole_nodes(trainer: PlannedJob, per_node: int) -> PlannedJob:
    """Convert a training job described over accelerators to one that gets whole nodes, whatever it uses of them."""
    most = trainer.max_nodes
    least, largest = -(-trainer.min_nodes // per_node), -(-most // per_node)
    ends = (least, *(accelerators // per_node for accelerators, _ in trainer.curve.points), largest)
    counts = sorted({nodes for nodes in ends if least <= nodes <= largest})
    return replace(
        trainer,
        min_nodes=least,
        max_nodes=largest,
        curve=ScalingCurve(
            {nodes: trainer.rate(min(nodes * per_node, most)) for nodes in counts}, relative=trainer.curve.relative
        ),
    )


def per_node(outcome: Outcome, accelerators: int) -> None:
    """Convert what a replay has counted in accelerators to nodes."""
    outcome.idle_seconds /= accelerators
    outcome.used_seconds /= accelerators
    outcome.bins.scale("idle", 1 / accelerators)
    for account in outcome.accounts:
        account.node_seconds /= accelerators
        outcome.trainer_bins.scale(account.trainer.name, 1 / accelerators)


def accelerator_figures(outcome: Outcome, trainers: Sequence[PlannedJob], accelerators: Accelerators) -> dict[str, Any]:
    """Return the accelerator-hours of a replay that counts nodes, and the samples of all trainers.

    ``held`` are those that trainers have had, ``used`` those that they could use: fewer than held, if a trainer for one
    accelerator has a whole node. `trainers` are described over accelerators.
    """
    each = accelerators.per_node
    held = sum(account.node_seconds * each for account in outcome.accounts)
    most = {trainer.name: min(trainer.max_nodes, each) for trainer in trainers}
    used = sum(account.node_seconds * most[account.trainer.name] for account in outcome.accounts)
    return {
        "accelerator_hours": {
            "idle": outcome.idle_seconds * each / _HOUR,
            "held": held / _HOUR,
            "used": (held if accelerators.shared else used) / _HOUR,
        },
        "samples": sum(account.samples for account in outcome.accounts),
    }
