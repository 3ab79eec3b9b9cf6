"""Prepare and drive the run of a campaign, and resume it after a stop or a crash."""

from __future__ import annotations

import logging
import secrets
import shutil
import signal
import sqlite3
import time
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec

from freetrain_parsl.campaign.directories import kind_of, make_run_directory
from freetrain_parsl.campaign.files.campaign import Campaign
from freetrain_parsl.campaign.files.yaml_file import Variables
from freetrain_parsl.campaign.lock import BEAT, driver_lock, is_silent, own_identity
from freetrain_parsl.campaign.orphans import remove_orphans
from freetrain_parsl.campaign.owned_trainings import Assignment, OwnedTrainings
from freetrain_parsl.campaign.site.home import HOME_KINDS, open_home
from freetrain_parsl.campaign.site.providers import (
    ask_slots,
    make_executor,
    make_window_source,
    refuse_impossible,
    refuse_too_large,
)
from freetrain_parsl.campaign.site.site import Site
from freetrain_parsl.campaign.store import RunStore
from freetrain_parsl.errors import (
    CollectionUnavailable,
    FreeTrainError,
    InvalidInput,
    StorageUnavailable,
    TrainingCancelled,
)
from freetrain_parsl.executor.batch.systems import SYSTEMS
from freetrain_parsl.executor.driver.driver_fence import DriverFence
from freetrain_parsl.planning.blocks import least_walltime
from freetrain_parsl.report.projection.run import RunState
from freetrain_parsl.storage.posix import check_writable
from freetrain_parsl.texts import text_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from concurrent.futures import Future
    from types import FrameType

    Show = Callable[[RunState, float, Sequence[str]], None]

    from freetrain_parsl.campaign.store import DriverRecord
    from freetrain_parsl.campaign.stored_run import StoredRun
    from freetrain_parsl.protocol.options import OnCodeChange

logger = logging.getLogger(__name__)

__all__ = [
    "CampaignRun",
    "contained",
    "preflight",
    "read_site",
    "refuse_living_driver",
    "run_signals",
]

_P = ParamSpec("_P")
_PERIOD = 0.25  # seconds between polls of futures and signals


def preflight(site: Site, run_dir: Path, *, resuming: bool = False) -> None:
    """Reject settings that can never run, before anything is submitted.

    A full disk is rejected too, unless the run is resumed with training jobs that wait for space.

    Raises
    ------
    UsageError, BatchSystemError
        The batch system's commands are missing, the partition does not exist, the disk is full, …
    """
    directory = site.checkpoint_dir or run_dir / "checkpoints"
    try:
        check_writable(directory)
    except StorageUnavailable as error:
        if not resuming:
            raise InvalidInput(f"{error}; free some space, or set another checkpoints.directory") from error
    free = 0 if not directory.exists() else shutil.disk_usage(directory).free
    if free < site.least_free and not resuming:
        raise InvalidInput(
            f"{directory}: {free / 1e6:,.0f} MB are free, fewer than the {site.least_free / 1e6:,.0f} MB that site "
            f"{site.name} requires for checkpoints; set another checkpoints.directory"
        )
    try:
        if site.home is not None:
            site.home.check()
    except CollectionUnavailable as error:
        if not resuming:
            raise InvalidInput(f"{error}; try again later") from error
    if site.outlives_driver:
        make_window_source(site).check(least_walltime(site.planner_settings.in_seconds()))


@dataclass
class CampaignRun:
    """A run directory with its campaign and its site.

    Parameters
    ----------
    store
        Its state.
    site, campaign
        As they were when the run was created.
    """

    store: RunStore
    site: Site
    campaign: Campaign
    _owned: OwnedTrainings = field(default_factory=OwnedTrainings)
    _unwritable: bool = False
    _fence: DriverFence = field(default_factory=DriverFence)
    _assignment: tuple[str, ...] | None = None
    _cancelled: set[str] = field(default_factory=set)

    @classmethod
    def create(
        cls, campaign: Campaign, site: Site, directory: Path | None = None, *, assignment: Path | None = None
    ) -> CampaignRun:
        """Create the run directory, private to the user; submit nothing.

        Parameters
        ----------
        campaign, site, directory
            What it consists of; the directory has a default name.
        assignment
            File with the training jobs that are assigned to this site; ``None``: all are.

        Raises
        ------
        InvalidInput
            The directory is in use or cannot be created, a training job needs nodes that the site does not have, or
            training jobs are assigned to a site without a home.
        UsageError, BatchSystemError
            See `preflight`.
        """
        site = ask_slots(site)
        refuse_impossible(campaign, site)
        if assignment is not None:
            if site.home is None:
                sections = " or ".join(f"checkpoints.{name}" for name in HOME_KINDS)
                raise InvalidInput(f"{site.file}: training jobs are assigned to sites that have {sections} only")
            Assignment.read(assignment)
        now = datetime.now().astimezone()
        run_dir, made = make_run_directory(directory, now)
        try:
            preflight(site, run_dir)
            if site.outlives_driver:
                refuse_too_large(campaign, site)
        except BaseException:
            shutil.rmtree(run_dir / "checkpoints", ignore_errors=True)  # created by the preflight
            if made:
                run_dir.rmdir()
            raise
        facts = {
            "name": campaign.name,
            "run_id": secrets.token_hex(4),
            "created": now.timestamp(),
            "campaign_file": str(Path(campaign.file).absolute()),
            "campaign_text": campaign.text,
            "site_file": str(Path(site.file).absolute()),
            "site_text": site.text,
            "variables": {**site.variables, **campaign.variables},
            "assignment": None if assignment is None else str(assignment.absolute()),
        }
        store = RunStore.create(run_dir, facts, [training.name for training in campaign.trainings])
        return cls(store, site, campaign)

    @classmethod
    def reopen(
        cls, directory: Path, config: Path | None = None, on_code_change: OnCodeChange | None = None
    ) -> CampaignRun:
        """Open a run directory, with the campaign and site of its creation.

        Parameters
        ----------
        directory
            The run directory.
        config
            Another site file.
        on_code_change
            What to do with training jobs whose code has changed; ``None``: as set in the campaign.

        Raises
        ------
        InvalidInput
            It is not a run directory, or its campaign can no longer be loaded, for example because an app is missing.
        """
        store = RunStore(directory.absolute())
        if (kind := kind_of(store)) is not None:
            raise InvalidInput(f"{directory} is {kind.described}; 'freetrain resume' continues it")
        variables = Variables(store.fact("variables"))
        file = Path(store.fact("campaign_file"))
        campaign = Campaign.parse(store.fact("campaign_text"), str(file), file.parent, variables)
        if {training.name for training in campaign.trainings} != {item.name for item in store.trainings()}:
            raise InvalidInput(f"{directory}: its training jobs do not match its campaign; it was tampered with")
        if on_code_change is not None:
            trainings = (
                replace(training, app=training.app.options(on_code_change=on_code_change))
                for training in campaign.trainings
            )
            campaign = replace(campaign, trainings=tuple(trainings))
        site = ask_slots(read_site(store) if config is None else Site.load(config, variables))
        refuse_impossible(campaign, site)
        return cls(store, site, campaign)

    @property
    def directory(self) -> Path:
        """The run directory, absolute."""
        return self.store.directory

    def drive(self, *, report: Callable[[str], None], show: Show, resuming: bool = False) -> str:
        """Run the unfinished training jobs until all are finished, or until the run is stopped.

        Ctrl-C, SIGTERM, SIGHUP and a stop request end the run cleanly: training jobs save, batch jobs are cancelled.

        Parameters
        ----------
        report
            Called with lines of output.
        show
            Called several times per second with the state of the run, the seconds since its start, and notes on copies
            to home.
        resuming
            Whether earlier drivers may have left jobs.

        Returns
        -------
        str
            ``finished``, ``stopped`` or ``interrupted``.

        Raises
        ------
        InvalidInput
            Another driver is running.
        DriverSuperseded
            Another driver has taken the run over, while this one was suspended.
        """
        before = refuse_living_driver(self.store)
        report, show = contained(report), contained(show)
        with driver_lock(self.directory):
            try:
                driver = self.store.begin_driver(*own_identity(), replaces=before)
            except sqlite3.OperationalError as error:
                raise InvalidInput(f"{self.directory} cannot be written: {error}; free some space") from error
            self._fence = DriverFence(self.store.check_driver)
            how = "failed"
            try:
                if resuming:  # now: an earlier driver that continues meanwhile submits nothing more
                    remove_orphans(self.site, self.store, report)
                    preflight(self.site, self.directory, resuming=True)
                    self._report_retries(report)
                with run_signals() as caught:
                    how = self._drive(driver, caught, report, show)
            finally:
                with self._kept(report):
                    self.store.end_driver(driver, how)
        return how

    def _report_retries(self, report: Callable[[str], None]) -> None:
        """Report which interrupted training jobs are retried, and which training jobs are left out."""
        trainings = self.store.trainings()
        for item in trainings:
            if item.state == "waiting" and item.error:
                report(f"retrying {item.name}, which was interrupted: {' '.join(item.error.split())[:300]}")
        for state, option in (("failed", "--retry-failed or --retry NAME"), ("cancelled", "--retry NAME")):
            if names := [item.name for item in trainings if item.state == state]:
                report(f"left out, {state}: {_some(names)}; {option} retries them")
        self.store.forget_interruptions()

    def _drive(
        self,
        driver: int,
        caught: list[int],
        report: Callable[[str], None],
        show: Show,
    ) -> str:
        import parsl
        from parsl.config import Config

        executor = make_executor(
            self.site,
            run_dir=self.directory,
            run_id=self.store.fact("run_id"),
            import_paths=self.campaign.import_paths,
            fence=self._fence,
        )
        config = Config(
            executors=[executor],
            run_dir=str(self.directory / "parsl"),
            strategy="none",
            initialize_logging=True,
        )
        if not self.site.outlives_driver:
            SYSTEMS[self.site.system].await_end(self.directory, report)
        with open_home(self.site.home, self.store, self._fence.allows) as home:
            with parsl.load(config):
                self.store.describe_driver(driver, executor.job_prefix, executor.journal_path, self.site.units_per_node)
                unfinished = {item.name for item in self.store.trainings() if item.state == "waiting"}
                submissions = {
                    training.name: partial(training.app, **training.arguments)
                    for training in self.campaign.trainings
                    if training.name in unfinished
                }
                self._owned = OwnedTrainings(submissions, executor.cancel, home, self._assigned())
                run = RunState(executor.journal_path)
                how = self._watch(driver, run, caught, report, show)
                if how != "finished":
                    report("stopping: training jobs save their work, batch jobs are cancelled")
            ended = self._owned.ended_last()
        with self._kept(report):
            for name, future in ended.items():
                self._keep(name, future, run=run)
        with self._kept(report):
            for name in self.store.cancellations():
                self.store.cancel(name)
        return how

    def _watch(
        self,
        driver: int,
        run: RunState,
        caught: list[int],
        report: Callable[[str], None],
        show: Show,
    ) -> str:
        owned = self._owned
        begin = time.monotonic()
        next_beat = begin
        while True:
            self._fence.check()
            _refresh(run)
            now = time.monotonic()
            owned.admit()
            if now >= next_beat or owned.has_ended:
                next_beat = now + BEAT
                _refresh(run)
                with self._kept(report):
                    owned.collect(partial(self._keep, run=run))
                    self._cancel_requested()
                    if (assigned := self._assigned()) is not None:
                        owned.assign(assigned)
                    self._beat(driver, run)
                    if self.store.stop_requested():
                        return "stopped"
            show(run, now - begin, owned.notes())
            if owned.is_done:
                return "finished"
            if caught:
                return "interrupted"
            time.sleep(_PERIOD)

    def _beat(self, driver: int, run: RunState) -> None:
        """Store the state of the jobs that have not ended; if its future is done, the reason is stored already."""
        names = self._owned.current
        current = [item for item in _unfinished(run) if item.name in names]
        states = dict.fromkeys(self._owned.held | self._owned.elsewhere, ("waiting", None, ()))
        remarks = {item.name: item.remark(time.time()) for item in current}
        for name in (*names, *self._owned.held, *self._owned.elsewhere):
            remarks[name] = "; ".join(filter(None, [remarks.get(name), self._owned.remark(name)]))
        running = {item.name: (item.state, item.share_done, item.nodes) for item in current}
        since = self._fence.now()
        self.store.beat(driver, {**states, **running}, remarks)
        self._fence.confirm(since)

    def _assigned(self) -> tuple[str, ...] | None:
        """Return the training jobs that are assigned to this site; ``None``: all.

        A file that cannot be read for now changes nothing.
        """
        file = self.store.fact("assignment", None)
        if file is not None:
            try:
                self._assignment = Assignment.read(Path(file)).trainings
            except InvalidInput as error:
                if self._assignment is None:
                    raise
                logger.warning("%s; the training jobs assigned before stay", error)
        return self._assignment

    def _cancel_requested(self) -> None:
        """Carry out cancel requests."""
        for name in self.store.cancellations():
            if name not in self._cancelled and self._owned.cancel(name):
                self._cancelled.add(name)

    def _keep(self, name: str, future: Future[Any], *, run: RunState) -> None:
        """Store the outcome of a completed future, and the journal's remark on its training job."""
        error = future.exception()
        if error is None:
            known = run.trainings.get(name)
            self.store.finish(name, future.result(), known.remark() if known is not None else "")
        elif isinstance(error, TrainingCancelled):
            self.store.cancel(name)
        else:
            final = not (isinstance(error, FreeTrainError) and error.resumable)
            self.store.fail(name, f"{type(error).__name__}: {text_of(error)}", final=final)

    @contextmanager
    def _kept(self, report: Callable[[str], None]) -> Iterator[None]:
        """Continue if the run's state cannot be written for now, e.g. because the disk is full; report it once."""
        try:
            yield
        except sqlite3.OperationalError as error:
            if not self._unwritable:
                report(f"the state of the run cannot be written to {self.directory}: {error}; retrying")
            self._unwritable = True
        else:
            self._unwritable = False


def read_site(store: StoredRun) -> Site:
    """Return the site that a run was created with, without its campaign.

    Raises
    ------
    InvalidInput
        It is a run of another kind, such as one at several sites.
    """
    if (kind := kind_of(store)) is not None:
        raise InvalidInput(f"{store.directory} is {kind.described}; its jobs and checkpoints are there")
    return Site.parse(store.fact("site_text"), store.fact("site_file"), Variables(store.fact("variables")))


def refuse_living_driver(store: RunStore) -> DriverRecord | None:
    """Reject a run that has a live driver.

    Returns
    -------
    DriverRecord or None
        The last driver, which has ended or died.

    Raises
    ------
    InvalidInput
        It names the driver.
    """
    driver = store.last_driver()
    if driver is not None and not is_silent(store):
        raise InvalidInput(
            f"{store.directory}: its driver runs on {driver.host} (process {driver.pid}); "
            f"stop it first: freetrain stop {store.directory}"
        )
    return driver


def _some(names: list[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _refresh(run: RunState) -> None:
    """Read the journal; if it cannot be read for now, or is damaged, what was read before is shown."""
    try:
        run.refresh()
    except sqlite3.Error as error:
        logger.debug("the journal cannot be read: %s", error)


def _unfinished(run: RunState) -> Iterator[Any]:
    return (item for item in run.trainings.values() if item.state in ("waiting", "running"))


@contextmanager
def run_signals() -> Iterator[list[int]]:
    """Collect the signals that end a run; handlers only record them, the loop acts."""
    caught: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        caught.append(number)

    before = {}
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup's SIGHUP stays ignored
            before[number] = signal.signal(number, note)
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def contained(function: Callable[_P, object]) -> Callable[_P, None]:
    """Return a function that logs the first exception of this one, and passes on none."""
    failed = False

    def call(*args: _P.args, **kwargs: _P.kwargs) -> None:
        nonlocal failed
        try:
            function(*args, **kwargs)
        except Exception:  # whatever fails in a display, the run continues
            logger.log(logging.DEBUG if failed else logging.WARNING, "the run cannot be shown", exc_info=True)
            failed = True

    return call
