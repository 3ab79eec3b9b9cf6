"""The batch systems that are known, by name."""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from freetrain_parsl.windows.system import BatchSystem

__all__ = ["system_of", "systems"]

GROUP: Final = "freetrain.windows"
"""Entry points of other packages: name -> a class that implements `BatchSystem`."""

_OWN = {
    "local": "freetrain_parsl.cluster.system:EmbeddedSystem",
    "slurm": "freetrain_parsl.executor.batch.slurm:SlurmSystem",
}


@cache
def systems() -> Mapping[str, BatchSystem]:
    """Return all batch systems by name; which comes first is chosen first, except one that is not `shared`."""
    ours: Mapping[str, Mapping[str, str]] = resolve_name("freetrain_parsl.extensions").ENTRY_POINTS
    named = {**_OWN, **ours[GROUP]}
    found: dict[str, Any] = {name: resolve_name(value) for name, value in named.items()}
    found |= {point.name: point.load() for point in entry_points(group=GROUP) if point.name not in named}
    return {name: make() for name, make in found.items()}


def system_of(provider: Any) -> BatchSystem | None:
    """Return the batch system of a Parsl provider; ``None`` if none handles it."""
    return next((system for system in systems().values() if system.handles(provider)), None)
