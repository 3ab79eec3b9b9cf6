"""The options of a training app: what a call may override, and their conversion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from freetrain_parsl.errors import InvalidTrainer
from freetrain_parsl.planning.curves.scaling import CurveLike, ScalingCurve

if TYPE_CHECKING:
    from datetime import datetime, timedelta

    from freetrain_parsl.executor.jobs.request import Fuse
    from freetrain_parsl.planning.settings import RescaleCosts
    from freetrain_parsl.protocol.options import OnCodeChange

__all__ = ["AppOptions", "Scaling", "curves_of", "kinds_of"]

Scaling: TypeAlias = "CurveLike | Mapping[str, CurveLike]"
"""A scaling curve, or one for each kind of node."""


@dataclass(frozen=True)
class AppOptions:
    """The options that a call may override; see `training_app`."""

    min_nodes: int = 1
    max_nodes: int = 1
    scaling: Scaling = None
    priority: float = 1.0
    deadline: datetime | timedelta | None = None
    samples: int | None = None
    epochs: int | None = None
    rescale_costs: RescaleCosts | None = None
    seed: int = 0
    checkpoint_interval: timedelta | None = None
    name: str | None = None
    on_code_change: OnCodeChange = "refuse"
    fuse: Fuse = "auto"
    node_kinds: Sequence[str] = ()
    tracker: Any = None


def kinds_of(names: object) -> tuple[str, ...]:
    """Return the kinds of nodes that `node_kinds` names.

    Raises
    ------
    InvalidTrainer
        It is no list of names.
    """
    if isinstance(names, str) or not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise InvalidTrainer(f"node_kinds is a list of names, such as ['gpu'], got {names!r}")
    return tuple(dict.fromkeys(names))


def curves_of(scaling: Scaling) -> tuple[ScalingCurve, dict[str, ScalingCurve]]:
    """Return the curve wherever none is given for the kind of node, and the curves by kind.

    Raises
    ------
    InvalidTrainer
        It has both numbers of nodes and kinds of nodes, or a curve is invalid.
    """
    if not isinstance(scaling, Mapping) or not any(isinstance(key, str) for key in scaling):
        return ScalingCurve.of(cast("CurveLike", scaling)), {}
    if not all(isinstance(key, str) for key in scaling):
        raise InvalidTrainer(f"scaling: give numbers of nodes or kinds of nodes, not both, got {list(scaling)!r}")
    curves = {kind: ScalingCurve.of(curve) for kind, curve in cast("Mapping[str, CurveLike]", scaling).items()}
    return next(iter(curves.values())), curves
