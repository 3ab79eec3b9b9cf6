"""The batch systems, by name."""

from __future__ import annotations

from typing import Any, Final

from freetrain_parsl.entry_points import EntryPoints
from freetrain_parsl.windows.system import BatchSystem

__all__ = ["SYSTEMS", "system_of"]


def _read(found: Any) -> BatchSystem:
    if not (isinstance(found, type) and issubclass(found, BatchSystem)):
        raise TypeError(f"{found!r} is not a subclass of BatchSystem")
    return found()


SYSTEMS: Final = EntryPoints[BatchSystem]("freetrain.windows", "batch system", _read)
"""Name -> batch system; of those that are `shared`, the first is chosen first."""


def system_of(provider: Any) -> BatchSystem | None:
    """Return the batch system of a Parsl provider; ``None`` if none handles it."""
    return next((system for system in SYSTEMS.values() if system.handles(provider)), None)
