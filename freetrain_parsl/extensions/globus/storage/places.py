"""Places on Globus collections, as given in a site file."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from datetime import timedelta
from pathlib import PurePosixPath

from freetrain_parsl.errors import InvalidSettings

__all__ = ["CollectionPath", "GlobusSettings"]

_LEAST_LEASE = timedelta(seconds=2)


@dataclass(frozen=True)
class CollectionPath:
    """A directory on a collection.

    Parameters
    ----------
    collection
        Its UUID.
    path
        Absolute path on the collection, or a path below the user's home directory there, such as ``/~/freetrain``.

    Raises
    ------
    InvalidSettings
        The UUID or the path is invalid.
    """

    collection: str
    path: str

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "collection", str(uuid.UUID(self.collection)))
        except ValueError:
            raise InvalidSettings(f"{self.collection[:80]!r} is not the UUID of a collection") from None
        parts = PurePosixPath(self.path).parts
        if parts[:1] != ("/",) or len(parts) < 2 or ".." in parts:
            raise InvalidSettings(
                f"{self.path[:80]!r} is not a directory on a collection; give an absolute path, such as /~/freetrain"
            )
        object.__setattr__(self, "path", str(PurePosixPath(*parts)))

    def __str__(self) -> str:
        return f"{self.collection}:{self.path}"

    def join(self, *names: str) -> str:
        """Return the path of an entry below this directory."""
        return str(PurePosixPath(self.path, *names))


@dataclass(frozen=True)
class GlobusSettings:
    """Where a site's checkpoint directory is on Globus, and where checkpoints are carried to.

    Parameters
    ----------
    local
        The checkpoint directory, as its collection shows it.
    home
        Where the checkpoints of all sites meet.
    lease
        A site whose driver has not renewed its claims for so long loses its trainings to other sites. A driver that
        cannot reach `home` stops its trainings earlier.

    Raises
    ------
    InvalidSettings
        Both places overlap, or the lease is too short.
    """

    local: CollectionPath
    home: CollectionPath
    lease: timedelta = timedelta(minutes=15)

    def __post_init__(self) -> None:
        if self.lease < _LEAST_LEASE:
            raise InvalidSettings(f"a lease must be at least {_LEAST_LEASE.total_seconds():.0f} s")
        one, other = PurePosixPath(self.local.path), PurePosixPath(self.home.path)
        if self.local.collection == self.home.collection and (one in (other, *other.parents) or other in one.parents):
            raise InvalidSettings(f"home {self.home} and the checkpoint directory {self.local} overlap")
