"""Planner settings and small events, shared by the planner's tests."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from freetrain_parsl.planning import events as ev
from freetrain_parsl.planning.curves.scaling import ScalingCurve
from freetrain_parsl.planning.model import CostsInSeconds, PlannedJob, PoolNode, Window
from freetrain_parsl.planning.settings import PlannerSettings

if TYPE_CHECKING:
    from freetrain_parsl.planning.planner import Planner

DEFAULTS = PlannerSettings().in_seconds()
SETTINGS = replace(
    DEFAULTS,
    startup=10,
    min_useful=20,
    closing_margin=5,
    max_walltime=1000,
    idle_timeout=30,
    join_timeout=60,
    replan_interval=1e6,
    settle=2,
    max_pending_blocks=4,
)
# Concave, so that sharing pays off: with linear curves all splits of the nodes are equally good.
CURVE = ScalingCurve({1: 10.0, 2: 18.0, 4: 32.0, 8: 50.0, 64: 60.0})


def trainer(name: str, *, least: int = 1, most: int = 4, work: float = math.inf, submitted: float = 0.0) -> PlannedJob:
    return PlannedJob(name, least, most, CURVE, CostsInSeconds(1, 1, 1), work_left=work, submitted=submitted)


def window(*nodes: str, closes: float | None = 500.0, opens: float = 0.0) -> Window:
    return Window(nodes, opens, closes)


def joined(time: float, block: str, *nodes: str, closes: float | None = 500.0) -> ev.NodesJoined:
    return ev.NodesJoined(time, block, tuple(PoolNode(name, closes) for name in nodes))


def only(kind: type, actions: ev.Actions) -> list:
    return [action for action in actions if isinstance(action, kind)]


def held(planner: Planner, *nodes: str, closes: float = 500.0, time: float = 0.0) -> str:
    """Take a block with these nodes through request, start and join; requires a trainer that wants them."""
    (request,) = only(ev.RequestBlock, planner.advance(ev.WindowsSeen(time, (window(*nodes, closes=closes),))))
    planner.advance(ev.BlockStarted(time, request.block, request.nodes, closes))
    planner.advance(joined(time, request.block, *request.nodes, closes=closes))
    return request.block
