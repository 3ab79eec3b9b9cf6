"""The batch systems, by name."""

from __future__ import annotations

from typing import Any, Final

from freetrain_parsl.entry_points import EntryPoints, subclass_of
from freetrain_parsl.windows.system import BatchSystem

__all__ = ["SYSTEMS", "system_of"]


SYSTEMS: Final = EntryPoints[BatchSystem](
    "freetrain.windows", "batch system", lambda found: subclass_of(BatchSystem)(found)()
)
"""Name -> batch system; of those that are `shared`, the first is chosen first."""


def system_of(provider: Any) -> BatchSystem | None:
    """Return the batch system of a Parsl provider; ``None`` if none handles it."""
    return next((system for system in SYSTEMS.values() if system.handles(provider)), None)
