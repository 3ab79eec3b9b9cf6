"""The home of a site's checkpoints on a Globus collection: its settings, checks, the mover, ``clean`` and ``prune``."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar
from urllib.parse import unquote

from freetrain_parsl.campaign.site.home import HomeKind
from freetrain_parsl.errors import CheckpointError, GlobusRefused
from freetrain_parsl.extensions.globus.storage.carrier import CopyKind
from freetrain_parsl.extensions.globus.storage.collections import CollectionPath, Collections, GlobusSettings
from freetrain_parsl.extensions.globus.storage.home_search import difference_at_home, list_home, newest_claims
from freetrain_parsl.extensions.globus.storage.login import CLIENT_SECRET, logged_in, make_app
from freetrain_parsl.extensions.globus.storage.mover import Mover
from freetrain_parsl.extensions.globus.storage.mover_directory import EXCHANGE, MoverDirectory, MoverState
from freetrain_parsl.extensions.globus.storage.names import CHECKPOINTS, OWNERS, claim_name
from freetrain_parsl.storage.entry import MANIFEST
from freetrain_parsl.storage.posix import CheckpointDirectory, directory_name
from freetrain_parsl.windows.system import given_values

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from typing_extensions import Self

    from freetrain_parsl.campaign.files.yaml_file import Section
    from freetrain_parsl.campaign.store import RunStore
    from freetrain_parsl.extensions.globus.storage.carrier import Parcel

__all__ = ["GlobusHome", "check_places"]

_LAST_COPIES = 60.0  # seconds for which a driver that ends waits for copies


@dataclass(frozen=True)
class GlobusHome(HomeKind):
    """``checkpoints.globus`` of a site file: where the checkpoint directory is on Globus, and home.

    Parameters
    ----------
    settings
        The places.
    root
        The checkpoint directory.
    """

    secrets: ClassVar[Sequence[str]] = (CLIENT_SECRET,)

    settings: GlobusSettings
    root: Path

    @classmethod
    def read(cls, keys: Section, directory: Path | None) -> Self:
        """Read the section; see `HomeKind`."""
        if directory is None:
            raise keys.refusal("needs checkpoints.directory: the directory that the collection shows")
        home = keys.section("home")
        local, there = (
            section.checked(
                CollectionPath,
                section.required("collection", "6c54cade-bde5-45c1-bdea-f4bd71dba2cc"),
                section.required("path", "/~/freetrain"),
            )
            for section in (keys, home)
        )
        settings = keys.checked(GlobusSettings, local, there, **given_values(lease=keys.duration("lease")))
        home.done()
        return cls(settings, directory)

    @classmethod
    def lines(cls, run_dir: Path) -> Sequence[str]:
        """Return what the mover of a run is doing."""
        return MoverState.read(run_dir).lines

    def check(self) -> None:
        """Check that the collections can be used.

        Raises
        ------
        GlobusRefused
            They cannot; the message gives the reason and the remedy.
        CollectionUnavailable
            Globus, or a collection, does not answer at present.
        """
        with logged_in(make_app()) as app:
            check_places(Collections(app), self.settings, self.root)

    @contextmanager
    def open(self, run: RunStore, allowed: Callable[[], bool]) -> Iterator[Mover]:
        """Run the mover of a run; see `HomeKind`."""
        with logged_in(make_app()) as app:
            mover = Mover(
                self.settings,
                self.root,
                run.directory,
                run.fact("run_id"),
                Collections(app),
                allowed=allowed,
            )
            mover.start()
            try:
                yield mover
            finally:
                if allowed():
                    mover.close(_LAST_COPIES)
                else:
                    mover.halt()

    def clean(self, run: RunStore, report: Callable[[str], None]) -> None:
        """Cancel the copies of a run without a driver, remove its partial checkpoints, and release its training jobs.

        Nothing that other runs have claimed is touched.
        """
        home, driver = self.settings.home, run.fact("run_id")
        with logged_in(make_app()) as app:
            collections = Collections(app)
            jobs = MoverState.read(run.directory).jobs
            for job in jobs:
                if job.task:
                    collections.cancel(job.task)
            copies = [job for job in jobs if job.kind is not CopyKind.REMOVE]
            if copies:
                report(f"cancelled {len(copies)} copies between {self.settings.local} and {home}")
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
                self._remove(collections, partial)
                report(f"removing {len(partial)} partial checkpoints from {home}")
            exchange = MoverDirectory(self.root)
            exchange.keep_only(())
            exchange.forget_arrivals()
            MoverState().write(run.directory)

    def prune(
        self, run: RunStore, keep: int, training: str | None, report: Callable[[str], None], *, dry_run: bool
    ) -> None:
        """Remove checkpoints at home that are older than the `keep` newest of their training job.

        Only the training jobs that this run has claimed last are touched. A checkpoint counts as kept if it is intact
        here and home lists its files with the same sizes: a listing may show checkpoints that do not exist.
        """
        home, driver = self.settings.home, run.fact("run_id")
        with logged_in(make_app()) as app:
            collections = Collections(app)
            claims = newest_claims(collections, home)
            doomed: list[Parcel] = []
            for item in run.trainings():
                name = directory_name(item.name)
                if name not in claims or (training is not None and item.name != training):
                    continue
                if claims[name].drivers != {driver}:
                    report(f"{item.name}: another run has claimed it at home; nothing is removed there")
                    continue
                listed = list_home(collections, home, name).ordered
                kept = _proven(collections, home, listed, CheckpointDirectory(self.root, item.name), keep)
                if len(kept) == keep:
                    doomed += [parcel for parcel in listed if parcel.order < kept[-1].order]
                elif len(listed) > keep:
                    report(
                        f"{item.name}: nothing is removed at home: of its {len(listed)} checkpoints there, {len(kept)} "
                        f"are also here, intact and of the same sizes; --keep {keep} needs {keep}"
                    )
            for parcel in doomed:
                place = f"{home.collection}:{home.join(CHECKPOINTS, *parcel.path)}"
                report(f"{'would remove' if dry_run else 'removing'} {place}")
            if doomed and not dry_run:
                self._remove(collections, doomed)

    def _remove(self, collections: Collections, parcels: list[Parcel]) -> None:
        home = self.settings.home
        paths = [home.join(CHECKPOINTS, *parcel.path) for parcel in parcels]
        collections.submit_delete(collections.submission_id(), home.collection, paths)


def check_places(collections: Collections, settings: GlobusSettings, root: Path) -> None:
    """Check that both collections can be used, and that the site's one shows the checkpoint directory."""
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
