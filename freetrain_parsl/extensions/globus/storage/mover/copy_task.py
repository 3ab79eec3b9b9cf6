"""Pure: what a copy between a checkpoint directory and home is as a task of Globus Transfer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from freetrain_parsl.extensions.globus.storage.collections import CopyItem
from freetrain_parsl.extensions.globus.storage.mover.carrier import CopyKind
from freetrain_parsl.extensions.globus.storage.mover.mover_directory import EXCHANGE
from freetrain_parsl.extensions.globus.storage.names import CHECKPOINTS

if TYPE_CHECKING:
    from freetrain_parsl.extensions.globus.storage.mover.carrier import CopyJob
    from freetrain_parsl.extensions.globus.storage.places import GlobusSettings

__all__ = ["CopyTask", "copy_task"]


@dataclass(frozen=True)
class CopyTask:
    """A task.

    Parameters
    ----------
    source, target
        Collections; both are home's for a removal.
    items
        What is copied.
    paths
        What is removed.
    """

    source: str
    target: str
    items: tuple[CopyItem, ...] = ()
    paths: tuple[str, ...] = ()


def copy_task(job: CopyJob, settings: GlobusSettings) -> CopyTask:
    """Return the task of a job: data to home, then its manifests, fetches from home, or removals there."""
    local, home = settings.local, settings.home
    there = [home.join(CHECKPOINTS, *parcel.path) for parcel in job.parcels]
    side = "in" if job.kind is CopyKind.FETCH else "out"
    here = [local.join(EXCHANGE, side, *parcel.path) for parcel in job.parcels]
    pairs = list(zip(here, there, strict=True))
    match job.kind:
        case CopyKind.REMOVE:
            return CopyTask(home.collection, home.collection, paths=tuple(there))
        case CopyKind.FETCH:
            items = [CopyItem(remote, one, recursive=True) for one, remote in pairs]
            return CopyTask(home.collection, local.collection, tuple(items))
        case CopyKind.DATA:
            items = [CopyItem(one, remote, recursive=True) for one, remote in pairs]
        case CopyKind.MANIFEST:
            items = [CopyItem(f"{one}.json", f"{remote}/manifest.json", recursive=False) for one, remote in pairs]
    return CopyTask(local.collection, home.collection, tuple(items))
