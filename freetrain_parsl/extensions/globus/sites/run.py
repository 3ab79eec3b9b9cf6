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
import signal
import sqlite3
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from freetrain_parsl.campaign.directories import make_run_directory
from freetrain_parsl.campaign.files.campaign import Campaign
from freetrain_parsl.campaign.files.yaml_file import Variables
from freetrain_parsl.campaign.lock import BEAT, driver_lock, own_identity
from freetrain_parsl.campaign.run import contained, refuse_living_driver, run_signals
from freetrain_parsl.campaign.store import RunStore
from freetrain_parsl.errors import FreeTrainError, InvalidInput, PlanningError, RemoteError, UsageError
from freetrain_parsl.extensions.globus.remote.compute import HUNG, ComputeEndpoint, RequestBudget
from freetrain_parsl.extensions.globus.remote.messages import parse_status
from freetrain_parsl.extensions.globus.remote.preparation import pack_campaign, prepare_packed
from freetrain_parsl.extensions.globus.sites.coordinator import Coordinator
from freetrain_parsl.extensions.globus.sites.places import LocalPlace
from freetrain_parsl.extensions.globus.sites.planning.model import in_common_units
from freetrain_parsl.extensions.globus.sites.planning.planner import plan_sites
from freetrain_parsl.extensions.globus.sites.sites_file import SitesFile
from freetrain_parsl.extensions.globus.sites.state import (
    COORDINATOR,
    Ask,
    CallPace,
    CoordinatorFile,
    SiteAnswer,
    SiteFacts,
    TrainingAtSite,
)
from freetrain_parsl.planning.settings import DEFAULT_COSTS
from freetrain_parsl.storage.atomic_files import sync_directory, write_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from freetrain_parsl.extensions.globus.sites.places import SitePlace
    from freetrain_parsl.extensions.globus.sites.planning.model import SitePlan, SitesQuestion
    from freetrain_parsl.extensions.globus.sites.sites_file import SiteEntry
    from freetrain_parsl.extensions.globus.sites.state import SiteCall
    from freetrain_parsl.planning.model import PlannedJob

    Show = Callable[[Coordinator, float], None]

__all__ = ["SitesLoop", "SitesRun"]

_REQUESTS = "requests"
_LOCAL_SITES = "sites"
_REQUESTS_PER_MINUTE = 100  # of ours to Globus Compute, at all endpoints; it permits 20 in ten seconds
_LEAST_REQUESTS = 6
_PERIOD = 0.25  # seconds between polls of answers and signals
_CALL_TIMEOUT = 120.0  # seconds
_STOP_WAIT = 45.0  # seconds for which a site waits for its driver to end


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
        Sites that were asked to stop and may have left training jobs or jobs -> why.
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
            raise InvalidInput(f"{directory}: its training jobs do not match its campaign; it was tampered with")
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
        """Return which training jobs a retry is about: failed or cancelled ones of `names`, and all that have failed.

        Raises
        ------
        InvalidInput
            No training job has that name, or it has finished.
        """
        chosen = [self.store.training(name) for name in names]
        for item in chosen:
            if item.state == "finished":
                raise InvalidInput(f"{item.name} has finished; there is nothing to retry")
        chosen += [item for item in self.store.trainings() if failed and item.state == "failed"]
        return tuple(dict.fromkeys(item.name for item in chosen if item.state in ("failed", "cancelled")))

    def drive(self, *, report: Callable[[str], None], show: Show, stop: bool = False, retry: Sequence[str] = ()) -> str:
        """Coordinate the sites until all training jobs have ended, or until the run is stopped.

        SIGINT (Ctrl-C), SIGTERM and a stop request stop the sites: training jobs save, drivers end. A second signal, or
        SIGHUP, ends the coordinator only: training jobs continue where they are.

        Parameters
        ----------
        report
            Called with lines of output.
        show
            Called several times per second with the coordinator and the seconds since the start.
        stop
            Stop the sites at once.
        retry
            Training jobs of `to_retry`.

        Returns
        -------
        str
            ``finished``, ``stopped``, ``interrupted``, or ``detached``: training jobs continue.

        Raises
        ------
        InvalidInput
            Another coordinator is running; a site refuses the campaign before any training job is assigned.
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
        costs = DEFAULT_COSTS.in_seconds()
        requests = {training.name: training.app.request(training.name) for training in self.campaign.trainings}
        submitted = {name: float(number) for number, name in enumerate(requests)}

        def sized(name: str, slots: int, units: int) -> PlannedJob:
            request = requests[name]
            slots_per_node = dict.fromkeys(request.node_kinds or ("",), slots)
            return request.on_nodes(slots_per_node, units).trainer(costs, submitted[name])

        def planner(question: SitesQuestion) -> SitePlan:
            return plan_sites(in_common_units(question, sized), settings)

        settings = self.sites.settings
        coordinator = Coordinator(
            [sized(name, 1, 1) for name in requests],
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


def _read_request(directory: Path, name: str) -> dict[str, Any]:
    path = directory / _REQUESTS / f"{name}.json"
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        return {**document, "run": str(document["run"])}
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise InvalidInput(f"{path} cannot be read: {error}") from None


@dataclass
class SitesLoop:
    """One process's loop over a run at several sites.

    `driver` is the number of this process in the store, and `caught` has signals, as they arrive; see `SitesRun.drive`.
    """

    run: SitesRun
    coordinator: Coordinator
    driver: int
    caught: list[int]
    report: Callable[[str], None]
    show: Show

    def __post_init__(self) -> None:
        self._outcomes: SimpleQueue[tuple[SiteCall, Mapping[str, Any] | FreeTrainError]] = SimpleQueue()
        self._places = {name: self.run.place_of(self.run, name) for name in self.coordinator.sites}
        self._busy: dict[str, tuple[SiteCall, float]] = {}  # site -> the call that it answers, and since when
        self._calls: list[SiteCall] = []  # to be made once the state is stored
        self._unwritable = False
        self._saved: tuple[dict[str, Any], list[tuple[str, bool]]] = ({}, [])
        self._stored: set[str] = {name for name, item in self.coordinator.trainings.items() if item.ended is not None}

    def drive(self, *, stop: bool) -> str:
        """Coordinate until all has ended; see `SitesRun.drive`."""
        coordinator, store = self.coordinator, self.run.store
        begin = time.monotonic()
        next_beat, how, heard = begin, "finished", 0
        if stop:
            how = "stopped"
            coordinator.stop()
        while True:
            self._take_outcomes()
            self._calls += coordinator.due(self.run.clock())
            with self._writing():
                self._save()
                for call in self._calls:
                    self._submit(call)
                self._calls.clear()
                if time.monotonic() >= next_beat:
                    next_beat = time.monotonic() + BEAT
                    self._beat()
                    for name in store.cancellations():
                        coordinator.cancel(name)
                    if store.stop_requested() and not coordinator.stopping:
                        how = "stopped"
                        self._stop()
            self.show(coordinator, time.monotonic() - begin)
            if coordinator.is_done and not self._unwritable:
                self._report_not_stopped()
                with self._writing():
                    self._save()
                    self._beat()
                if not self._unwritable:
                    return how
            if len(self.caught) > heard:
                if signal.SIGHUP in self.caught or coordinator.stopping:
                    return "detached"
                heard, how = len(self.caught), "interrupted"
                self._stop()
            time.sleep(_PERIOD)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Continue if the run directory cannot be written for now, as on a full disk; then nothing is sent."""
        try:
            yield
        except (OSError, sqlite3.OperationalError) as error:
            if not self._unwritable:
                self.report(f"the state of the run cannot be written to {self.run.store.directory}: {error}; retrying")
            self._unwritable = True
        else:
            self._unwritable = False

    def _stop(self) -> None:
        self.report(
            "stopping: the sites save their training jobs and end their drivers; Ctrl-C again leaves them as they are"
        )
        self.coordinator.stop()

    def _report_not_stopped(self) -> None:
        for site in self.coordinator.sites.values():
            if self.coordinator.stopping and site.silent and site.facts is not None:
                self.report(f"site {site.name} could not be stopped, its training jobs may continue: {site.silent}")
                self.run.unstopped[site.name] = "it does not answer, and its training jobs may continue"

    # Calls.

    def _request(self, call: SiteCall) -> Mapping[str, Any]:
        prepared = self.run.requests[call.site]
        match call.ask:
            case Ask.PREPARE:
                return prepared
            case Ask.STOP:
                return {"verb": "stop", "run": prepared["run"], "wait": _STOP_WAIT}
        return {
            "verb": "look",
            "run": prepared["run"],
            "order": call.order,
            "trainings": list(call.trainings),
            "plan": call.ask is Ask.LOOK,
            "start": call.start,
            "retry": self.coordinator.attempts,
        }

    def _submit(self, call: SiteCall) -> None:
        """Make a call in a thread that does not keep the process alive."""
        place, request = self._places[call.site], self._request(call)

        def carry_out() -> None:
            try:
                self._outcomes.put((call, place.call(request, _CALL_TIMEOUT)))
            except FreeTrainError as error:
                self._outcomes.put((call, error))
            # The SDK's errors of tokens and sockets are many; none of them may end the campaign.
            except Exception as error:  # noqa: BLE001 - see above
                self._outcomes.put((call, RemoteError(f"{type(error).__name__}: {error}")))

        self._busy[call.site] = call, time.monotonic()
        threading.Thread(target=carry_out, name=f"freetrain-site-{call.site}", daemon=True).start()

    def _take_outcomes(self) -> None:
        while True:
            try:
                call, outcome = self._outcomes.get_nowait()
            except Empty:
                break
            if call.site in self._busy and self._busy[call.site][0] is call:  # otherwise it was given up
                del self._busy[call.site]
                self._take(call, outcome)
        for name, (_, since) in list(self._busy.items()):
            if time.monotonic() - since > HUNG:
                del self._busy[name]
                self._places[name] = self.run.place_of(self.run, name)
                self.coordinator.on_silence(name, f"no answer within {HUNG:.0f} s", self.run.clock())

    def _take(self, call: SiteCall, outcome: Mapping[str, Any] | FreeTrainError) -> None:
        coordinator, now = self.coordinator, self.run.clock()
        try:
            if isinstance(outcome, FreeTrainError):
                raise outcome
            match call.ask:
                case Ask.PREPARE:
                    coordinator.on_prepared(call.site, SiteFacts.parse(outcome), now)
                case Ask.STOP:
                    status = parse_status(outcome)
                    if status.state == "died":
                        self.report(
                            f"site {call.site}: its driver had died; its training jobs have their last checkpoints, "
                            "and "
                            "batch jobs may be left until the run continues"
                        )
                        self.run.unstopped[call.site] = "its driver had died, and its jobs may be left"
                    coordinator.on_stopped(call.site, over=status.over, now=now)
                case _:
                    coordinator.on_answer(call.site, self._checked(call, SiteAnswer.parse(outcome)), now)
        except UsageError as error:
            if call.ask is Ask.PREPARE and not any(item.site for item in coordinator.trainings.values()):
                raise type(error)(f"{self.run.entry(call.site).where}: site {call.site}: {error}") from None
            coordinator.on_silence(call.site, str(error), now)
        except PlanningError as error:
            self.report(f"no decision this time: {error}")
        except FreeTrainError as error:  # whatever a call raises, the other sites continue
            coordinator.on_silence(call.site, str(error), now)

    def _checked(self, call: SiteCall, answer: SiteAnswer) -> SiteAnswer:
        """Return an answer if it is about this run, with the home and the lease as before."""
        run, facts = self.run.requests[call.site]["run"], self.coordinator.sites[call.site].facts
        if answer.run != run:
            raise RemoteError(f"the site sent an answer about another run, {answer.run[:100]!r} instead of {run!r}")
        if facts is not None and answer.facts != facts:
            raise RemoteError(
                f"its home is now {answer.facts.home} with a lease of {answer.facts.lease:.0f} s, it was {facts.home} "
                f"with {facts.lease:.0f} s; undo that at the site: all sites need the same"
            )
        return answer

    # State.

    def _save(self) -> None:
        """Store what a later coordinator must know, and the results; before it is acted upon."""
        store, coordinator = self.run.store, self.coordinator
        for name, item in coordinator.trainings.items():
            if item.ended is None or name in self._stored:
                continue
            match item.ended.state:
                case "finished":
                    remark = "; ".join(filter(None, [f"at {item.ended_at}", item.ended.remark]))
                    store.finish(name, item.ended.result, remark)
                case "failed":
                    store.fail(name, f"at {item.ended_at}: {item.ended.error}", final=True)
                case _:
                    store.cancel(name)
            self._stored.add(name)
        document = coordinator.as_json()
        shown = [(site.silent, site.answer is None) for site in coordinator.sites.values()]
        if (document, shown) != self._saved:
            lines = list(coordinator.lines(self.run.clock()))
            CoordinatorFile(document, lines).write(self.run.store.directory)
            self._saved = (document, shown)

    def _beat(self) -> None:
        states: dict[str, tuple[str, float | None, Sequence[str]]] = {}
        remarks = {}
        for name, item in self.coordinator.trainings.items():
            if item.ended is not None:
                continue
            site = None if item.site is None else self.coordinator.sites[item.site]
            at_site = None if site is None else site.trainings.get(name)
            states[name] = ("waiting", None, ()) if at_site is None else (at_site.state, at_site.share, at_site.nodes)
            remarks[name] = "; ".join(
                filter(None, [f"at {item.site}" if item.site else "", at_site.remark if at_site else "", item.reason])
            )
        self.run.store.beat(self.driver, states, remarks)
