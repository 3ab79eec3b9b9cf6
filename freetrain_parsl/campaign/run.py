"""The run of a campaign: prepared, driven, and gone on with after a stop or a crash."""

from __future__ import annotations

import secrets
import shutil
import signal
import sqlite3
import time
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from freetrain_parsl.campaign.campaign import Campaign
from freetrain_parsl.campaign.lock import BEAT, driver_lock, is_silent, own_identity
from freetrain_parsl.campaign.orphans import remove_orphans
from freetrain_parsl.campaign.site import Site
from freetrain_parsl.campaign.store import DATABASE, RunStore
from freetrain_parsl.campaign.yaml_file import Variables
from freetrain_parsl.errors import (
    BatchSystemError,
    CodeChanged,
    InvalidInput,
    StorageUnavailable,
    TrainingCancelled,
    TrainingInterrupted,
)
from freetrain_parsl.planning.blocks.rules import least_walltime
from freetrain_parsl.report.run import RunState
from freetrain_parsl.storage.posix import check_writable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future
    from types import FrameType

    from freetrain_parsl.protocol.options import OnCodeChange

__all__ = ["CampaignRun", "find_run", "preflight", "run_directories"]

_PERIOD = 0.25  # seconds between looks at futures and signals
_RUN_NAME = "freetrain-run-"


def preflight(site: Site, run_dir: Path, *, resuming: bool = False) -> None:
    """Refuse what can never run, before anything is submitted.

    A disk that is full is refused too, unless trainings that wait for it are gone on with.

    Raises
    ------
    UsageError, BatchSystemError
        The batch system's commands are missing, there is no such partition, the disk is full, …
    """
    directory = site.checkpoint_dir or run_dir / "checkpoints"
    try:
        check_writable(directory)
    except StorageUnavailable as error:
        if not resuming:
            raise InvalidInput(f"{error}; make room there, or name another place in checkpoints.directory") from error
    free = 0 if not directory.exists() else shutil.disk_usage(directory).free
    if free < site.least_free and not resuming:
        raise InvalidInput(
            f"{directory}: {free / 1e6:,.0f} MB are free, fewer than the {site.least_free / 1e6:,.0f} MB that site "
            f"{site.name} wants for checkpoints; name another place in its checkpoints.directory"
        )
    if site.outlives_driver:
        site.window_source().check(least_walltime(site.planner_settings))


def find_run(directory: Path | None) -> Path:
    """Return a run directory as it was named, or the newest one here.

    Raises
    ------
    InvalidInput
        There is none.
    """
    if directory is not None:
        return directory
    found = run_directories()
    if not found:
        raise InvalidInput(f"there is no {_RUN_NAME}… here; name the run directory")
    return max(found, key=lambda run: (RunStore(run).fact("created"), run.name))


def run_directories() -> list[Path]:
    """List the run directories here that were not named by the user."""
    return [file.parent for file in sorted(Path().glob(f"{_RUN_NAME}*/{DATABASE}"))]


@dataclass
class CampaignRun:
    """A run directory with its campaign and its site.

    Parameters
    ----------
    store
        Its state.
    site, campaign
        As they were when the run was made.
    """

    store: RunStore
    site: Site
    campaign: Campaign
    _futures: dict[str, Future[Any]] = field(default_factory=dict)
    _unwritable: bool = False
    _cancelled: set[str] = field(default_factory=set)

    @classmethod
    def create(cls, campaign: Campaign, site: Site, directory: Path | None = None) -> CampaignRun:
        """Make the run directory, private to the user; nothing is submitted.

        Raises
        ------
        InvalidInput
            The directory is in use or cannot be made.
        UsageError, BatchSystemError
            See `preflight`.
        """
        now = datetime.now().astimezone()
        run_dir = (directory or Path(f"{_RUN_NAME}{now:%Y%m%d-%H%M%S}")).absolute()
        made = not run_dir.exists()
        try:
            run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            if any(run_dir.iterdir()):
                raise InvalidInput(f"--run-dir {run_dir} is not empty; name a new one, or 'freetrain resume' that one")
            run_dir.chmod(0o700)
        except OSError as error:
            raise InvalidInput(f"--run-dir {run_dir}: {error.strerror}; name a directory that can be made") from None
        try:
            preflight(site, run_dir)
        except BaseException:
            shutil.rmtree(run_dir / "checkpoints", ignore_errors=True)  # what the preflight itself has made
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
        }
        store = RunStore.create(run_dir, facts, [training.name for training in campaign.trainings])
        return cls(store, site, campaign)

    @classmethod
    def reopen(
        cls, directory: Path, config: Path | None = None, on_code_change: OnCodeChange | None = None
    ) -> CampaignRun:
        """Read a run directory; campaign and site are those that the run was made with.

        Parameters
        ----------
        directory
            The run directory.
        config
            Another site file to go on with.
        on_code_change
            What becomes of trainings whose code has changed; ``None``: what the campaign says.

        Raises
        ------
        InvalidInput
            It is no run directory, or its campaign cannot be read any more: an app is gone, for example.
        """
        store = RunStore(directory.absolute())
        variables = Variables(store.fact("variables"))
        file = Path(store.fact("campaign_file"))
        campaign = Campaign.parse(store.fact("campaign_text"), str(file), file.parent, variables)
        if {training.name for training in campaign.trainings} != {item.name for item in store.trainings()}:
            raise InvalidInput(f"{directory}: its trainings are not those of its campaign; it was tampered with")
        if on_code_change is not None:
            trainings = (
                replace(training, app=training.app.options(on_code_change=on_code_change))
                for training in campaign.trainings
            )
            campaign = replace(campaign, trainings=tuple(trainings))
        return cls(store, read_site(store) if config is None else Site.load(config, variables), campaign)

    @property
    def directory(self) -> Path:
        """The run directory, absolute."""
        return self.store.directory

    def drive(
        self, *, tell: Callable[[str], None], show: Callable[[RunState, float], None], resuming: bool = False
    ) -> str:
        """Run the trainings that are not finished until all are, or until somebody stops us.

        Ctrl-C, SIGTERM, SIGHUP and a request to stop end the run in order: trainings save, jobs are withdrawn.

        Parameters
        ----------
        tell
            Takes lines about what is done.
        show
            Takes the state of the run, and the seconds since it began, several times a second.
        resuming
            Whether earlier drivers may have left jobs.

        Returns
        -------
        str
            ``finished``, ``stopped`` or ``interrupted``.

        Raises
        ------
        InvalidInput
            Another driver runs.
        """
        refuse_living_driver(self.store)
        with driver_lock(self.directory):
            if resuming:
                remove_orphans(self.site, self.store, tell)
                preflight(self.site, self.directory, resuming=True)
                self._tell_retries(tell)
            try:
                driver = self.store.begin_driver(*own_identity())
            except sqlite3.OperationalError as error:
                raise InvalidInput(f"{self.directory} cannot be written: {error}; make room there") from error
            how = "failed"
            try:
                with _signals() as caught:
                    how = self._drive(driver, caught, tell, show)
            finally:
                with self._kept(tell):
                    self.store.end_driver(driver, how)
        return how

    def _tell_retries(self, tell: Callable[[str], None]) -> None:
        """Say which trainings were interrupted and are tried again, and which are left out."""
        trainings = self.store.trainings()
        for item in trainings:
            if item.state == "waiting" and item.error:
                tell(f"trying {item.name} again, which was interrupted: {' '.join(item.error.split())[:300]}")
        for state, option in (("failed", "--retry-failed, or --retry NAME,"), ("cancelled", "--retry NAME")):
            if names := [item.name for item in trainings if item.state == state]:
                tell(f"left out, {state}: {_some(names)}; {option} tries again")
        self.store.forget_interruptions()

    def _drive(
        self,
        driver: int,
        caught: list[int],
        tell: Callable[[str], None],
        show: Callable[[RunState, float], None],
    ) -> str:
        import parsl
        from parsl.config import Config

        executor = self.site.executor(
            run_dir=self.directory, run_id=self.store.fact("run_id"), import_paths=self.campaign.import_paths
        )
        config = Config(
            executors=[executor],
            run_dir=str(self.directory / "parsl"),
            strategy="none",
            initialize_logging=True,
        )
        with parsl.load(config):
            self.store.describe_driver(driver, executor.job_prefix, executor.journal_path)
            unfinished = {item.name for item in self.store.trainings() if item.state == "waiting"}
            self._futures = {
                training.name: training.app(**training.arguments)
                for training in self.campaign.trainings
                if training.name in unfinished
            }
            run = RunState(executor.journal_path)
            how = self._watch(driver, run, caught, tell, show, executor.cancel)
            if how != "finished":
                tell("stopping: trainings save their work, jobs are withdrawn")
        with self._kept(tell):
            for name, future in self._futures.items():  # what has ended while we were leaving
                if future.done() and not isinstance(future.exception(), TrainingInterrupted):
                    self._keep(name, future, run)
        with self._kept(tell):
            for name in self.store.cancellations():
                self.store.cancel(name)
        return how

    def _watch(
        self,
        driver: int,
        run: RunState,
        caught: list[int],
        tell: Callable[[str], None],
        show: Callable[[RunState, float], None],
        cancel: Callable[[Future[Any]], bool],
    ) -> str:
        begin = time.monotonic()
        next_beat = begin
        while True:
            run.refresh()
            now = time.monotonic()
            if now >= next_beat or any(future.done() for future in self._futures.values()):
                next_beat = now + BEAT
                with self._kept(tell):
                    self._collect(run.refresh())
                    self._cancel_requested(cancel)
                    # Of a training whose future is done the reason is kept already.
                    current = [item for item in _unfinished(run) if item.name in self._futures]
                    self.store.beat(
                        driver,
                        {item.name: (item.state, item.share_done, item.nodes) for item in current},
                        {item.name: item.remark(time.time()) for item in current},
                    )
                    if self.store.stop_requested():
                        return "stopped"
            show(run, now - begin)
            if not self._futures:
                return "finished"
            if caught:
                return "interrupted"
            time.sleep(_PERIOD)

    def _cancel_requested(self, cancel: Callable[[Future[Any]], bool]) -> None:
        """Cancel the trainings that somebody has asked for; one that Parsl has not submitted yet is asked again."""
        for name in self.store.cancellations():
            if name in self._futures and name not in self._cancelled and cancel(self._futures[name]):
                self._cancelled.add(name)

    def _collect(self, run: RunState) -> None:
        """Keep what the futures that are done hold."""
        for name, future in list(self._futures.items()):
            if not future.done():
                continue
            self._keep(name, future, run)
            del self._futures[name]  # not before it is kept

    def _keep(self, name: str, future: Future[Any], run: RunState) -> None:
        """Keep what a future that is done holds, and what the journal remarks about its training."""
        error = future.exception()
        if error is None:
            told = run.trainings.get(name)
            self.store.finish(name, future.result(), told.remark() if told is not None else "")
        elif isinstance(error, TrainingCancelled):
            self.store.cancel(name)
        else:
            # Neither the site's refusals nor the driver's own end is the training's failure, and changed code is a
            # question to the user: resume goes on with it.
            final = not isinstance(error, (BatchSystemError, TrainingInterrupted, CodeChanged))
            self.store.fail(name, f"{type(error).__name__}: {error}", final=final)

    @contextmanager
    def _kept(self, tell: Callable[[str], None]) -> Iterator[None]:
        """Go on if the run's state cannot be written for now, on a full disk for example, and say so once."""
        try:
            yield
        except sqlite3.OperationalError as error:
            if not self._unwritable:
                tell(f"the state of the run cannot be written: {error}; it is kept and tried again: {self.directory}")
            self._unwritable = True
        else:
            self._unwritable = False


def read_site(store: RunStore) -> Site:
    """Return the site that a run was made with, without its campaign."""
    return Site.parse(store.fact("site_text"), store.fact("site_file"), Variables(store.fact("variables")))


def refuse_living_driver(store: RunStore) -> None:
    """Refuse a run that somebody drives.

    Raises
    ------
    InvalidInput
        It tells who.
    """
    driver = store.last_driver()
    if driver is not None and not is_silent(store):
        raise InvalidInput(
            f"{store.directory}: its driver runs on {driver.host} (process {driver.pid}); "
            f"stop it first: freetrain stop {store.directory}"
        )


def _some(names: list[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _unfinished(run: RunState) -> Iterator[Any]:
    return (item for item in run.trainings.values() if item.state in ("waiting", "running"))


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Collect the signals that end a run; a handler only notes them, the loop acts."""
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
