"""What a run directory has for a reader: the journals of its drivers, the logs, and a way to stop the run."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from freetrain_parsl.campaign.directories import kind_of
from freetrain_parsl.campaign.lock import DriverState, driver_state
from freetrain_parsl.campaign.logs import LOGS, log_lines
from freetrain_parsl.campaign.store import RunStore
from freetrain_parsl.campaign.stored_run import DATABASE, StoredRun, TrainingRecord
from freetrain_parsl.errors import InvalidInput
from freetrain_parsl.report.log_reader import has_writer
from freetrain_parsl.report.run_reader import DriverJournal, state_of
from freetrain_parsl.storage.owned_files import open_directory
from freetrain_parsl.strict_yaml import shown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from freetrain_parsl.campaign.directories import RunKind
    from freetrain_parsl.executor.training_logs import LogLine
    from freetrain_parsl.report.projection.run import TrainingState

__all__ = ["CampaignSource", "RunSource", "ScriptSource", "open_source"]

_JOURNAL = "journal.sqlite"
# In the executor's directory, Parsl's of one run, Parsl's of all runs, and the demo's.
_JOURNALS = (_JOURNAL, f"*/{_JOURNAL}", f"*/*/{_JOURNAL}", f"parsl/*/*/{_JOURNAL}")
_KEPT = 2.0  # seconds for which the list of drivers is kept: the store's lock is shared with the driver


class RunSource(Protocol):
    """A run, for a reader."""

    @property
    def directory(self) -> Path:
        """The run directory."""

    @property
    def name(self) -> str:
        """The name of the run."""

    @property
    def notes(self) -> list[str]:
        """What its reader should know, in lines."""

    def journals(self) -> list[DriverJournal]:
        """Return the journals of its drivers so far, the first one first."""

    def trainings(self) -> list[TrainingRecord]:
        """Return the state of its training jobs."""

    def drivers(self) -> int:
        """Return how many drivers it has had."""

    def log(self, training: str, tail: int) -> Iterable[LogLine]:
        """Return the last lines of a training job's log.

        Raises
        ------
        InvalidInput
            There is no such training job.
        """

    def stop(self) -> str:
        """Ask the driver to save all training jobs and end; return in one line what happens.

        Raises
        ------
        InvalidInput
            It cannot be asked, or does not run.
        """


def open_source(directory: Path) -> RunSource:
    """Open a run directory: of ``freetrain run``, of a Parsl script (``runinfo/000``), or of the demo.

    Raises
    ------
    InvalidInput
        It is neither.
    """
    directory = directory.absolute()
    if not (directory / DATABASE).exists():
        found = sorted(path for pattern in _JOURNALS for path in directory.glob(pattern))
        if len(found) == 1:
            (journal,) = found
            # Logs are in Parsl's run directory, above the executor's.
            return ScriptSource(directory if journal.parent == directory else journal.parents[1], journal)
        if found:
            raise InvalidInput(
                f"{shown(directory)} has {len(found)} journals; give the directory of one of them, such as "
                f"{shown(found[-1].parent)}"
            )
    return CampaignSource(StoredRun(directory))


class CampaignSource:
    """A run of ``freetrain run``.

    Parameters
    ----------
    store
        Its state.
    monotonic
        Clock in seconds.
    """

    def __init__(self, store: StoredRun, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._monotonic = monotonic
        self._journals: list[DriverJournal] = []
        self._read_at: float | None = None

    @property
    def directory(self) -> Path:
        """The run directory."""
        return self._store.directory

    @property
    def name(self) -> str:
        """The campaign's name."""
        return str(self._store.fact("name"))

    @property
    def notes(self) -> list[str]:
        """Whose it is, if it may be of others."""
        return self._store.notes

    def kind(self) -> RunKind | None:
        """Return the kind of the run; ``None``: a campaign at one site."""
        return kind_of(self._store)

    def journals(self) -> list[DriverJournal]:
        """Return the journals of its drivers so far, the first one first."""
        if self._read_at is None or self._monotonic() - self._read_at >= _KEPT:
            self._read_at = self._monotonic()
            drivers = self._store.drivers()
            self._journals = []
            for driver in drivers:
                alive = driver is drivers[-1] and driver_state(driver) is DriverState.ALIVE
                how = None if alive else driver.how or "killed"
                if driver.journal is not None:
                    self._journals.append(DriverJournal(Path(driver.journal), how, driver.ended))
        return self._journals

    def trainings(self) -> list[TrainingRecord]:
        """Return the state of its training jobs."""
        from freetrain_parsl.campaign.summary import trainings_of  # the page, which also reads here, does not need it

        return trainings_of(self._store)

    def drivers(self) -> int:
        """Return how many drivers it has had."""
        return len(self._store.drivers())

    def log(self, training: str, tail: int) -> Iterable[LogLine]:
        """Return the last lines of a training job's log."""
        return log_lines(self.directory, training, tail=tail)

    def stop(self) -> str:
        """Ask the driver to save all training jobs and end."""
        if self._store.distrust:
            raise InvalidInput(f"{self.directory} {self._store.distrust}; only its owner can stop it")
        if driver_state(self._store.last_driver()) is not DriverState.ALIVE:
            raise InvalidInput(f"no driver of {self.directory} runs; there is nothing to stop")
        RunStore(self.directory).request_stop()
        return "The driver was asked to stop: training jobs save their state, and batch jobs are cancelled."


class ScriptSource:
    """A run of a Parsl script with the executor.

    Parameters
    ----------
    directory
        Parsl's run directory.
    journal
        The executor's journal in it.
    """

    def __init__(self, directory: Path, journal: Path) -> None:
        self._directory = directory
        self._journal = journal

    @property
    def directory(self) -> Path:
        """The run directory."""
        return self._directory

    @property
    def name(self) -> str:
        """The last two parts of the directory, such as ``runinfo/000``."""
        return "/".join(self._directory.parts[-2:])

    @property
    def notes(self) -> list[str]:
        """Whose it is, if it may be of others."""
        with open_directory(self._journal.parent) as directory:
            why = directory.distrust(self._journal.name)
        return [f"{self._directory} {why}; it is shown from a copy"] if why else []

    def journals(self) -> list[DriverJournal]:
        """Return its journal."""
        return [DriverJournal(self._journal, None if self.is_running() else "ended")]

    def is_running(self) -> bool:
        """Return whether the script runs."""
        return any(has_writer(place / LOGS) for place in (self._directory, self._directory.parent))

    def trainings(self) -> list[TrainingRecord]:
        """Return what the journal says of its training jobs; their results are in the script's futures only.

        Raises
        ------
        InvalidInput
            The journal cannot be read.
        """
        run = state_of(self._journal)
        if not self.is_running():
            run.end_driver(time.time())
        return [
            TrainingRecord(
                item.name, item.state, item.share_done, item.nodes, {}, item.error or None, _last(item), item.where()
            )
            for item in run.trainings.values()
        ]

    def drivers(self) -> int:
        """Return one: the script itself."""
        return 1

    def log(self, training: str, tail: int) -> Iterable[LogLine]:
        """Return the last lines of a training job's log."""
        return log_lines(self._directory, training, tail=tail) if (self._directory / LOGS).is_dir() else ()

    def stop(self) -> str:
        """Refuse: only the script can end itself."""
        raise InvalidInput("this run belongs to a Parsl script; end the script to stop it")


def _last(training: TrainingState) -> str:
    """Return the remark on a training job, and the figures of its last report."""
    figures = [
        f"{key} {value:.5g}" if isinstance(value, float) else f"{key} {value}"
        for key in ("epoch", "samples", "loss")
        if (value := training.progress.get(key)) is not None
    ]
    return "; ".join(filter(None, [", ".join(figures), training.remark()]))
