"""A campaign at several sites and its run directory.

The run directory is that of a campaign (`freetrain_parsl.campaign.store`), without jobs of its own, and has also::

    coordinator.json     what a later coordinator must know, replaced after each change, before it is acted upon
    requests/SITE.json   the campaign as it is sent to a site
    sites/SITE/          runs of a site that is this machine
"""

from __future__ import annotations

import json
import secrets
import shutil
import sqlite3
import time
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from freetrain_parsl.campaign.directories import make_run_directory
from freetrain_parsl.campaign.display import contained
from freetrain_parsl.campaign.files.campaign import Campaign
from freetrain_parsl.campaign.files.yaml_file import Variables
from freetrain_parsl.campaign.lock import driver_lock, own_identity
from freetrain_parsl.campaign.run import refuse_living_driver, run_signals
from freetrain_parsl.campaign.store import RunStore
from freetrain_parsl.errors import InvalidInput
from freetrain_parsl.extensions.globus.remote.compute import ComputeEndpoint, RequestBudget
from freetrain_parsl.extensions.globus.remote.preparation import pack_campaign, prepare_packed
from freetrain_parsl.extensions.globus.sites.coordinator import Coordinator
from freetrain_parsl.extensions.globus.sites.kind import COORDINATOR, CoordinatorFile
from freetrain_parsl.extensions.globus.sites.loop import LocalPlace, SitesLoop
from freetrain_parsl.extensions.globus.sites.planning.planner import plan_sites
from freetrain_parsl.extensions.globus.sites.sites_file import SitesFile
from freetrain_parsl.extensions.globus.sites.state import CallPace, TrainingAtSite
from freetrain_parsl.planning.settings import DEFAULT_COSTS
from freetrain_parsl.storage.atomic_files import sync_directory, write_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from freetrain_parsl.extensions.globus.sites.loop import SitePlace
    from freetrain_parsl.extensions.globus.sites.planning.model import SitePlan, SitesQuestion
    from freetrain_parsl.extensions.globus.sites.sites_file import SiteEntry
    from freetrain_parsl.planning.model import Trainer

    Show = Callable[[Coordinator, float], None]

__all__ = ["SitesRun"]

_REQUESTS = "requests"
_LOCAL_SITES = "sites"
_REQUESTS_PER_MINUTE = 100  # of ours to Globus Compute, at all endpoints; it permits 20 in ten seconds
_LEAST_REQUESTS = 6


@dataclass
class SitesRun:
    """A run directory with its campaign and its sites.

    Parameters
    ----------
    store
        Its state.
    campaign, sites
        As they were when the run was created.
    requests
        Site -> the campaign, as it is sent there.
    left_out
        Files that stay here because of their names.
    unstopped
        Sites that were asked to stop and may have left trainings or jobs -> why.
    place_of
        Makes the place of a site; default: an endpoint, or this machine.
    clock
        Seconds since the epoch.
    """

    store: RunStore
    campaign: Campaign
    sites: SitesFile
    requests: Mapping[str, Mapping[str, Any]]
    left_out: tuple[str, ...] = ()
    unstopped: dict[str, str] = field(default_factory=dict)
    place_of: Callable[[SitesRun, str], SitePlace] = field(default=lambda run, name: run.make_place(name))
    clock: Callable[[], float] = time.time
    budgets: dict[str, RequestBudget] = field(default_factory=dict)

    @classmethod
    def create(
        cls,
        campaign: Path,
        sites: Path,
        directory: Path | None = None,
        *,
        settings: Sequence[str] = (),
        include: Sequence[Path] = (),
        any_versions: bool = False,
    ) -> SitesRun:
        """Check all files, pack the campaign, and create the run directory, private to the user; send nothing.

        The parameters are those of `RemoteCampaign.start`, with the list of sites, and the run directory; default: a
        new one in the current directory.

        Raises
        ------
        InvalidInput
            A file is invalid or cannot travel, or the directory is in use.
        """
        given = dict(setting.partition("=")[::2] for setting in settings)
        listed = SitesFile.load(sites, given)
        run_id = secrets.token_hex(4)
        packed = pack_campaign(campaign, settings=settings, include=include)
        preparations = {
            entry.name: prepare_packed(packed, entry.config, any_versions=any_versions, run=f"{run_id}-{entry.name}")
            for entry in listed.sites
        }
        loaded = packed.campaign
        now = datetime.now().astimezone()
        run_dir, made = make_run_directory(directory, now)
        requests = {name: {**one.request, "verb": "prepare"} for name, one in preparations.items()}
        facts = {
            "name": loaded.name,
            "run_id": run_id,
            "created": now.timestamp(),
            "campaign_file": str(Path(loaded.file).absolute()),
            "campaign_text": loaded.text,
            "site_file": str(sites.absolute()),
            "site_text": "",
            "variables": {**listed.variables, **loaded.variables},
            "assignment": None,
            "sites": {"text": listed.text, "settings": given},
        }
        try:
            (run_dir / _REQUESTS).mkdir(mode=0o700)
            for name, request in requests.items():
                write_text(run_dir / _REQUESTS / f"{name}.json", json.dumps(request))
            sync_directory(run_dir / _REQUESTS)
            store = RunStore.create(run_dir, facts, [training.name for training in loaded.trainings])
        except OSError as error:
            shutil.rmtree(run_dir if made else run_dir / _REQUESTS, ignore_errors=True)
            raise InvalidInput(f"--run-dir {run_dir}: {error.strerror}; choose another directory") from None
        return cls(store, loaded, listed, requests, packed.left_out)

    @classmethod
    def reopen(cls, directory: Path) -> SitesRun:
        """Open a run directory, with the campaign and the sites of its creation.

        Raises
        ------
        InvalidInput
            It is not that of a run at several sites, or is damaged.
        """
        store = RunStore(directory.absolute())
        described = store.fact("sites", None)
        if described is None:
            raise InvalidInput(f"{directory} is not a run at several sites")
        file, place = Path(store.fact("campaign_file")), Path(store.fact("site_file"))
        variables = Variables(store.fact("variables"), environment={})
        campaign = Campaign.parse(store.fact("campaign_text"), str(file), file.parent, variables)
        if {training.name for training in campaign.trainings} != {item.name for item in store.trainings()}:
            raise InvalidInput(f"{directory}: its trainings do not match its campaign; it was tampered with")
        listed = SitesFile.parse(described["text"], str(place), place.parent, described["settings"])
        requests = {entry.name: _read_request(store.directory, entry.name) for entry in listed.sites}
        return cls(store, campaign, listed, requests)

    @property
    def directory(self) -> Path:
        """The run directory, absolute."""
        return self.store.directory

    def entry(self, name: str) -> SiteEntry:
        """Return a site of the list."""
        return next(entry for entry in self.sites.sites if entry.name == name)

    def make_place(self, name: str) -> SitePlace:
        """Return where a site's calls go."""
        entry = self.entry(name)
        if not entry.endpoint:
            return LocalPlace(self.directory / _LOCAL_SITES / name)
        shared = sum(bool(one.endpoint) for one in self.sites.sites)
        budget = self.budgets.setdefault(name, RequestBudget(max(_LEAST_REQUESTS, _REQUESTS_PER_MINUTE // shared)))
        return ComputeEndpoint(entry.endpoint, budget=budget)

    def to_retry(self, names: Iterable[str], *, failed: bool = False) -> tuple[str, ...]:
        """Return which trainings a retry is about: failed or cancelled ones of `names`, and all that have failed.

        Raises
        ------
        InvalidInput
            No training has that name, or it has finished.
        """
        chosen = [self.store.training(name) for name in names]
        for item in chosen:
            if item.state == "finished":
                raise InvalidInput(f"{item.name} has finished; there is nothing to retry")
        chosen += [item for item in self.store.trainings() if failed and item.state == "failed"]
        return tuple(dict.fromkeys(item.name for item in chosen if item.state in ("failed", "cancelled")))

    def drive(self, *, report: Callable[[str], None], show: Show, stop: bool = False, retry: Sequence[str] = ()) -> str:
        """Coordinate the sites until all trainings have ended, or until the run is stopped.

        SIGINT (Ctrl-C), SIGTERM and a stop request stop the sites: trainings save, drivers end. A second signal, or
        SIGHUP, ends the coordinator only: trainings go on where they are.

        Parameters
        ----------
        report
            Called with lines of output.
        show
            Called several times per second with the coordinator and the seconds since the start.
        stop
            Stop the sites at once.
        retry
            Trainings of `to_retry`.

        Returns
        -------
        str
            ``finished``, ``stopped``, ``interrupted``, or ``detached``: trainings go on.

        Raises
        ------
        InvalidInput
            Another coordinator is running; a site refuses the campaign before any training is assigned.
        """
        before = refuse_living_driver(self.store)
        report, show = contained(report), contained(show)
        with driver_lock(self.directory):
            coordinator = self._coordinator()
            try:
                for name in retry:
                    coordinator.retry(name)
                if retry:  # first here: a site's answer about the attempt before must not count
                    lines = list(coordinator.lines(self.clock()))
                    CoordinatorFile(coordinator.as_json(), lines).write(self.directory)
                for name in retry:
                    self.store.retry(name)
                driver = self.store.begin_driver(*own_identity(), replaces=before)
            except (OSError, sqlite3.OperationalError) as error:
                raise InvalidInput(f"{self.directory} cannot be written: {error}; free some space") from error
            how = "failed"
            try:
                with run_signals() as caught:
                    how = SitesLoop(self, coordinator, driver, caught, report, show).drive(stop=stop)
            finally:
                self.store.end_driver(driver, how)
        return how

    def _coordinator(self) -> Coordinator:
        def planner(question: SitesQuestion) -> SitePlan:
            return plan_sites(question, self.sites.settings)

        settings = self.sites.settings
        coordinator = Coordinator(
            list(self._trainers()),
            {entry.name: entry.rates for entry in self.sites.sites},
            CallPace(settings.look.total_seconds(), self.sites.status_period),
            planner,
        )
        if (kept := CoordinatorFile.read(self.directory)) is not None:
            ended = {
                item.name: TrainingAtSite(item.name, item.state, item.share, (), item.result, item.error)
                for item in self.store.trainings()
                if item.state in ("finished", "failed", "cancelled")
            }
            try:
                coordinator.restore(kept.document, ended)
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                raise InvalidInput(f"{self.directory / COORDINATOR} is damaged: {error}") from None
        return coordinator

    def _trainers(self) -> Iterator[Trainer]:
        costs = DEFAULT_COSTS.in_seconds()
        for number, training in enumerate(self.campaign.trainings):
            yield training.app.request(training.name).trainer(costs, float(number))


def _read_request(directory: Path, name: str) -> dict[str, Any]:
    path = directory / _REQUESTS / f"{name}.json"
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        return {**document, "run": str(document["run"])}
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise InvalidInput(f"{path} cannot be read: {error}") from None
