"""The options of a training app, and their conversion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, cast

from freetrain_parsl.errors import InvalidApp
from freetrain_parsl.executor.jobs.size import Size, same_bound
from freetrain_parsl.planning.curves.scaling import CurveLike, ScalingCurve

if TYPE_CHECKING:
    from datetime import datetime, timedelta
    from pathlib import Path

    from parsl.dataflow.dflow import DataFlowKernel

    from freetrain_parsl.executor.jobs.request import Fuse
    from freetrain_parsl.planning.settings import RescaleCosts
    from freetrain_parsl.protocol.options import OnCodeChange, SnapshotEvery

__all__ = ["AppOptions", "Scaling", "curves_of", "kinds_of"]

Scaling: TypeAlias = "CurveLike | Mapping[str, CurveLike]"
"""A scaling curve, or one for each kind of node."""

_SIZE: Final = tuple(item.name for item in fields(Size))


@dataclass(frozen=True, kw_only=True)
class AppOptions:
    """The options of `training_app`, which describes them; `TrainingApp.options` changes them."""

    min_nodes: int | None = None
    max_nodes: int | None = None
    accelerators: int | None = None
    min_accelerators: int | None = None
    max_accelerators: int | None = None
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
    snapshot_every: SnapshotEvery = "auto"
    replicas: int = 1
    fuse: Fuse = "auto"
    node_kinds: Sequence[str] = ()
    tracker: Any = None
    stage: Sequence[str | Path] | Mapping[str, Path] = ()
    executors: Sequence[str] | Literal["all"] = "all"
    cache: bool = False
    data_flow_kernel: DataFlowKernel | None = None

    def shared_with(self, kind: type) -> dict[str, Any]:
        """Return the options that are fields of another dataclass."""
        names = {item.name for item in fields(kind)}
        return {name: value for name, value in vars(self).items() if name in names}

    def changed(self, **changes: Any) -> AppOptions:
        """Return a copy with other values.

        A bound on the size replaces the one that states the same in another way.

        Raises
        ------
        InvalidApp
            There is no such option, or numbers of nodes are replaced by numbers of accelerators, or vice versa, and the
            points of `scaling` are not.
        """
        known = {item.name for item in fields(self)}
        if unknown := sorted(set(changes) - known):
            raise InvalidApp(f"training_app has no option {unknown[0]!r}; it has {', '.join(sorted(known))}")
        stated = {word for word in _SIZE if changes.get(word) is not None}
        said = {word for word in _SIZE if any(same_bound(word, other) for other in stated)}
        changed = replace(self, **{**dict.fromkeys(said), **changes})
        before, after = self.size.counts_accelerators, changed.size.counts_accelerators
        if stated and before is not after and "scaling" not in changes and not _suits_any_unit(self.scaling):
            units = ("accelerators", "nodes") if before else ("nodes", "accelerators")
            raise InvalidApp(
                f"{min(stated)} is changed for an app whose scaling counts {units[0]}: change scaling, too, to "
                f"points in {units[1]}"
            )
        return changed

    @property
    def size(self) -> Size:
        """The bounds on the size of a training job."""
        return Size(**self.shared_with(Size))


def _suits_any_unit(scaling: Scaling) -> bool:
    default, by_kind = curves_of(scaling)
    return all(curve.unknown or curve == ScalingCurve.default() for curve in (default, *by_kind.values()))


def kinds_of(names: object) -> tuple[str, ...]:
    """Return the kinds of nodes that `node_kinds` names.

    Raises
    ------
    InvalidApp
        It is not a list of names.
    """
    if isinstance(names, str) or not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise InvalidApp(f"node_kinds is a list of names, such as ['gpu'], got {names!r}")
    return tuple(dict.fromkeys(names))


def curves_of(scaling: Scaling) -> tuple[ScalingCurve, dict[str, ScalingCurve]]:
    """Return the default curve, and the curves by kind of node.

    Raises
    ------
    InvalidApp
        It has both numbers of nodes and kinds of nodes, or a curve is invalid.
    """
    if not isinstance(scaling, Mapping) or not any(isinstance(key, str) for key in scaling):
        return ScalingCurve.of(cast("CurveLike", scaling)), {}
    if not all(isinstance(key, str) for key in scaling):
        raise InvalidApp(f"scaling: give numbers of nodes or kinds of nodes, not both, got {list(scaling)!r}")
    curves = {kind: ScalingCurve.of(curve) for kind, curve in cast("Mapping[str, CurveLike]", scaling).items()}
    return next(iter(curves.values())), curves
