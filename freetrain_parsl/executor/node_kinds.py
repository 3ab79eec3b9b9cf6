"""The kinds of nodes of an executor: each has a provider and a window source of its own."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from freetrain_parsl.errors import InvalidApp, InvalidSettings, did_you_mean
from freetrain_parsl.settings_checks import check_count, check_kind_name, check_speed

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from parsl.providers.base import ExecutionProvider

    from freetrain_parsl.executor.jobs.request import TrainingRequest
    from freetrain_parsl.windows.base import WindowSource

logger = logging.getLogger(__name__)

__all__ = ["KindOfSlots", "NodeKind", "kinds_of", "refuse_unknown_kinds", "sized_for", "units_per_node"]


@dataclass(frozen=True)
class NodeKind:
    """Nodes that are alike: a training job runs on nodes of one kind at a time.

    Parameters
    ----------
    name
        What training jobs call it in their ``node_kinds``.
    provider
        Submits its blocks.
    windows
        Finds its windows; ``None``: the provider's own source. All kinds belong to one batch system.
    slots_per_node, available_accelerators
        As in `FreeTrainExecutor`.
    speed
        Assumed throughput of a node relative to those of other kinds, until a training job has been measured on both.

    Raises
    ------
    InvalidSettings
        A value is out of range.
    """

    name: str
    provider: ExecutionProvider
    windows: WindowSource | None = None
    slots_per_node: int = 1
    available_accelerators: int | tuple[str, ...] = 0
    speed: float = 1.0

    def __post_init__(self) -> None:
        if self.name:  # the only kind has none
            check_kind_name(self.name)
        who = f"node kind {self.name!r}" if self.name else "FreeTrainExecutor"
        check_count(f"{who}: slots_per_node", self.slots_per_node)
        check_speed(f"{who}: speed", self.speed)

    @property
    def accelerators(self) -> list[str]:
        """Names of the accelerators, one for each slot; empty for none."""
        given = self.available_accelerators
        return [str(number) for number in range(given)] if isinstance(given, int) else list(given)

    @property
    def slots(self) -> KindOfSlots:
        """What the control loop needs to know of it."""
        return KindOfSlots(self.slots_per_node, self.name if self.accelerators else "", self.speed)


@dataclass(frozen=True)
class KindOfSlots:
    """The slots on nodes of a kind.

    Parameters
    ----------
    per_node
        Number of slots that make a node complete.
    transport
        Processes on nodes of equal transports can form one group and hand over a training job's state; others only by a
        checkpoint, such as those with GPUs and those without.
    speed
        As in `NodeKind`.
    """

    per_node: int = 1
    transport: str = ""
    speed: float = 1.0


def units_per_node(kinds: Collection[KindOfSlots], *, share_nodes: bool) -> int:
    """Return the number of units of a node that the planner assigns: its slots, or 1 if jobs do not share nodes.

    The planner counts in one unit, so jobs share nodes only if nodes of all kinds have the same number of slots.
    """
    numbers = {kind.per_node for kind in kinds}
    return numbers.pop() if share_nodes and len(numbers) == 1 else 1


def sized_for(request: TrainingRequest, kinds: Mapping[str, NodeKind], units_per_node: int) -> TrainingRequest:
    """Return a training job's request with its size in units of these kinds of nodes; log what is rounded.

    Raises
    ------
    InvalidApp
        The site has no such kind of nodes, or no job can have its size there.
    """
    refuse_unknown_kinds(request, kinds)
    slots = {name: kind.slots_per_node for name, kind in kinds.items()}
    if rounded := request.rounding(slots, units_per_node):
        logger.info("training job %s: %s", request.name, rounded)
    return request.on_nodes(slots, units_per_node)


def refuse_unknown_kinds(request: TrainingRequest, kinds: Collection[str]) -> None:
    """Check that a training job asks for kinds of nodes that exist.

    Raises
    ------
    InvalidApp
        It names another one.
    """
    for kind in (*request.node_kinds, *request.scaling_by_kind):
        if kind not in kinds:
            known = f"; the kinds are {', '.join(sorted(kinds))}" if any(kinds) else "; the site has no kinds of nodes"
            raise InvalidApp(
                f"training job {request.name!r}: there are no nodes of kind "
                f"{kind!r}{did_you_mean(kind, kinds) or known}"
            )


def kinds_of(
    given: Sequence[NodeKind],
    provider: ExecutionProvider | None,
    windows: WindowSource | None,
    slots_per_node: int,
    accelerators: int | list[str],
) -> dict[str, NodeKind]:
    """Return the kinds of an executor's nodes by name; without any, the only one, which has no name.

    Raises
    ------
    InvalidSettings
        One has no name, two have the same, or there are kinds and settings that each of them has of its own.
    """
    if not given:
        if provider is None:
            from freetrain_parsl.cluster.provider import EmbeddedClusterProvider

            provider = EmbeddedClusterProvider()
        named_ones = accelerators if isinstance(accelerators, int) else tuple(accelerators)
        return {"": NodeKind("", provider, windows, slots_per_node, named_ones)}
    named = {kind.name: kind for kind in given if kind.name}
    if len(named) != len(given):
        raise InvalidSettings(
            f"FreeTrainExecutor: each of the node_kinds needs a name of its own, got {[kind.name for kind in given]!r}"
        )
    if provider is not None or windows is not None or slots_per_node != 1 or accelerators:
        raise InvalidSettings(
            "FreeTrainExecutor: with node_kinds, give provider, windows, slots_per_node and available_accelerators "
            "of each kind only"
        )
    return named
