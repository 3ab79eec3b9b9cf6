"""The home of a run's checkpoints on a Globus collection: checks, the mover, ``clean`` and ``prune``."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING
from urllib.parse import unquote

from freetrain_parsl.errors import CheckpointError
from freetrain_parsl.extensions.globus.storage.collections import Collections
from freetrain_parsl.extensions.globus.storage.home_listing import difference_at_home, list_home, newest_claims
from freetrain_parsl.extensions.globus.storage.login import forget_secret, logged_in, make_app
from freetrain_parsl.extensions.globus.storage.mover.carrier import CopyKind
from freetrain_parsl.extensions.globus.storage.mover.mover import Mover
from freetrain_parsl.extensions.globus.storage.mover.mover_directory import MoverDirectory
from freetrain_parsl.extensions.globus.storage.mover.mover_state import MoverState
from freetrain_parsl.extensions.globus.storage.names import CHECKPOINTS, OWNERS, claim_name
from freetrain_parsl.extensions.globus.storage.place_check import check_places
from freetrain_parsl.storage.entry import MANIFEST
from freetrain_parsl.storage.posix import CheckpointDirectory, directory_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from freetrain_parsl.campaign.site.site import Site
    from freetrain_parsl.campaign.store import RunStore
    from freetrain_parsl.executor.driver.driver_fence import DriverFence
    from freetrain_parsl.extensions.globus.storage.mover.carrier import Parcel
    from freetrain_parsl.extensions.globus.storage.places import CollectionPath

__all__ = ["check_home", "clean_home", "open_mover", "prune_home"]

_LAST_COPIES = 60.0  # seconds for which a driver that ends waits for copies


def check_home(site: Site) -> None:
    """Check that the collections of a site can be used, if it has any.

    Raises
    ------
    GlobusRefused
        They cannot; the message gives the reason and the remedy.
    CollectionUnavailable
        Globus, or a collection, does not answer at present.
    """
    if site.globus is not None and site.checkpoint_dir is not None:
        with logged_in(make_app()) as app:
            check_places(Collections(app), site.globus, site.checkpoint_dir)


@contextmanager
def open_mover(site: Site, store: RunStore, fence: DriverFence) -> Iterator[Mover | None]:
    """Run the mover of a run, if its site has a home; at the end, the last checkpoints are copied.

    A driver that was replaced ends it at once: the trainings, and the copies, are those of the other one.

    The client secret is not in the environment afterwards, also without a home: jobs would inherit it.
    """
    if site.globus is None or site.checkpoint_dir is None:
        forget_secret()
        yield None
        return
    with logged_in(make_app()) as app:
        forget_secret()
        mover = Mover(
            site.globus,
            site.checkpoint_dir,
            store.directory,
            store.fact("run_id"),
            Collections(app),
            allowed=fence.allows,
        )
        mover.start()
        try:
            yield mover
        finally:
            if fence.allows():
                mover.close(_LAST_COPIES)
            else:
                mover.halt()


def clean_home(site: Site, store: RunStore, report: Callable[[str], None]) -> None:
    """Cancel the copies of a run without a driver, remove its partial checkpoints, and release its trainings.

    Nothing that other runs have claimed is touched.
    """
    if site.globus is None or site.checkpoint_dir is None:
        return
    home, driver = site.globus.home, store.fact("run_id")
    with logged_in(make_app()) as app:
        collections = Collections(app)
        jobs = MoverState.read(store.directory).jobs
        for job in jobs:
            if job.task:
                collections.cancel(job.task)
        copies = [job for job in jobs if job.kind is not CopyKind.REMOVE]
        if copies:
            report(f"cancelled {len(copies)} copies between {site.globus.local} and {home}")
        under_way = {parcel for job in copies if job.kind is CopyKind.DATA for parcel in job.parcels}
        partial: list[Parcel] = []
        for training, claim in newest_claims(collections, home).items():
            if claim.drivers != {driver} or claim.released:
                continue
            found = list_home(collections, home, training)
            # A listing without a manifest is no proof that a checkpoint has none: only those under way are removed.
            partial += found.partial & under_way
            collections.make_directory(
                home.collection, home.join(OWNERS, claim_name(training, claim.generation, "released"))
            )
            report(f"released {unquote(training)}, with {len(found.whole)} checkpoints at home")
        if partial:
            _remove(collections, site, partial)
            report(f"removing {len(partial)} partial checkpoints from {home}")
        exchange = MoverDirectory(site.checkpoint_dir)
        exchange.keep_only(())
        exchange.forget_arrivals()
        MoverState().write(store.directory)


def prune_home(
    site: Site, store: RunStore, keep: int, training: str | None, report: Callable[[str], None], *, dry_run: bool
) -> None:
    """Remove checkpoints at home that are older than the `keep` newest of their training.

    Only the trainings that this run has claimed last are touched. A checkpoint counts as kept if it is intact here and
    home lists its files with the same sizes: a listing may show checkpoints that do not exist.
    """
    if site.globus is None or site.checkpoint_dir is None:
        return
    home, driver = site.globus.home, store.fact("run_id")
    with logged_in(make_app()) as app:
        collections = Collections(app)
        claims = newest_claims(collections, home)
        doomed: list[Parcel] = []
        for item in store.trainings():
            name = directory_name(item.name)
            if name not in claims or (training is not None and item.name != training):
                continue
            if claims[name].drivers != {driver}:
                report(f"{item.name}: another run has claimed it at home; nothing is removed there")
                continue
            listed = list_home(collections, home, name).ordered
            kept = _proven(collections, home, listed, CheckpointDirectory(site.checkpoint_dir, item.name), keep)
            if len(kept) == keep:
                doomed += [parcel for parcel in listed if parcel.order < kept[-1].order]
            elif len(listed) > keep:
                report(
                    f"{item.name}: nothing is removed at home: of its {len(listed)} checkpoints there, {len(kept)} are "
                    f"also here, intact and of the same sizes; --keep {keep} needs {keep}"
                )
        for parcel in doomed:
            place = f"{home.collection}:{home.join(CHECKPOINTS, *parcel.path)}"
            report(f"{'would remove' if dry_run else 'removing'} {place}")
        if doomed and not dry_run:
            _remove(collections, site, doomed)


def _proven(
    collections: Collections, home: CollectionPath, listed: list[Parcel], here: CheckpointDirectory, most: int
) -> list[Parcel]:
    """Return the newest checkpoints, at most so many, that are intact here and that home lists with their sizes."""
    entries = {entry.path.name: entry for entry in here.entries()}
    found: list[Parcel] = []
    for parcel in reversed(listed):
        entry = entries.get(parcel.name)
        if len(found) == most:
            break
        if entry is None:
            continue
        try:
            _, manifest = entry.verify()
            sizes = {name: (entry.path / name).stat().st_size for name in (*manifest["files"], MANIFEST)}
        except (CheckpointError, OSError):
            continue
        if not difference_at_home(collections, home, parcel, sizes):
            found.append(parcel)
    return found


def _remove(collections: Collections, site: Site, parcels: list[Parcel]) -> None:
    assert site.globus is not None, "the caller has checked"
    home = site.globus.home
    paths = [home.join(CHECKPOINTS, *parcel.path) for parcel in parcels]
    collections.submit_delete(collections.submission_id(), home.collection, paths)
