"""Whether a site's collections can be used, before anything is submitted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from freetrain_parsl.errors import GlobusRefused
from freetrain_parsl.extensions.globus.storage.mover.mover_directory import EXCHANGE, MoverDirectory
from freetrain_parsl.extensions.globus.storage.names import CHECKPOINTS, OWNERS

if TYPE_CHECKING:
    from pathlib import Path

    from freetrain_parsl.extensions.globus.storage.collections import Collections
    from freetrain_parsl.extensions.globus.storage.places import GlobusSettings

__all__ = ["check_places"]


def check_places(collections: Collections, settings: GlobusSettings, root: Path) -> None:
    """Check that both collections can be used, and that the site's one shows the checkpoint directory.

    Raises
    ------
    GlobusRefused
        They cannot; the message gives the reason and the remedy.
    CollectionUnavailable
        Globus, or a collection, does not answer at present.
    """
    local, home = settings.local, settings.home
    exchange = MoverDirectory(root)
    probe = exchange.probe()
    try:
        names = collections.names(local.collection, local.join(EXCHANGE))
    finally:
        exchange.end_probe(probe)
    if names is None or probe not in names:
        raise GlobusRefused(
            f"{root} is not {local.path} on collection {local.collection}; give the path at which the collection shows "
            "the checkpoint directory as checkpoints.globus.path in the site file"
        )
    for path in (home.path, home.join(OWNERS), home.join(CHECKPOINTS)):
        collections.make_directory(home.collection, path)
