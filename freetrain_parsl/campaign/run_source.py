"""What a run directory has for a reader: the journals of its drivers, the logs, and a way to stop the run."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from freetrain_parsl.campaign.lock import DriverState, driver_state
from freetrain_parsl.campaign.logs import LOGS, log_lines
from freetrain_parsl.campaign.store import DATABASE, RunStore
from freetrain_parsl.errors import InvalidInput
from freetrain_parsl.executor.logs.reader import has_writer
from freetrain_parsl.report.run_reader import DriverJournal
from freetrain_parsl.strict_yaml import shown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from freetrain_parsl.executor.logs.lines import LogLine

__all__ = ["CampaignSource", "RunSource", "ScriptSource", "open_source", "without_colours"]

_JOURNAL = "journal.sqlite"
_KEPT = 2.0  # seconds for which the list of drivers is kept: the store's lock is shared with the driver


class RunSource(Protocol):
    """A run, for a reader."""

    @property
    def directory(self) -> Path:
        """The run directory."""

    @property
    def name(self) -> str:
        """The name of the run."""

    def journals(self) -> list[DriverJournal]:
        """Return the journals of its drivers so far, the first one first."""

    def log(self, training: str, tail: int) -> Iterable[LogLine]:
        """Return the last lines of a training's log.

        Raises
        ------
        InvalidInput
            There is no such training.
        """

    def stop(self) -> str:
        """Ask the driver to save all trainings and end; return in one line what happens.

        Raises
        ------
        InvalidInput
            It cannot be asked, or does not run.
        """


def open_source(directory: Path) -> RunSource:
    """Open a run directory: of ``freetrain run``, or of a Parsl script (``runinfo/000``).

    Raises
    ------
    InvalidInput
        It is neither.
    """
    directory = directory.absolute()
    if not (directory / DATABASE).exists():
        found = sorted([*directory.glob(_JOURNAL), *directory.glob(f"*/{_JOURNAL}")])
        if len(found) == 1:
            return ScriptSource(directory, found[0])
        if found:
            raise InvalidInput(f"{shown(directory)} has {len(found)} journals; give the directory of one of them")
    return CampaignSource(RunStore(directory))


class CampaignSource:
    """A run of ``freetrain run``.

    Parameters
    ----------
    store
        Its state.
    monotonic
        Clock in seconds.
    """

    def __init__(self, store: RunStore, monotonic: Callable[[], float] = time.monotonic) -> None:
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

    def log(self, training: str, tail: int) -> Iterable[LogLine]:
        """Return the last lines of a training's log."""
        return log_lines(self.directory, training, tail=tail)

    def stop(self) -> str:
        """Ask the driver to save all trainings and end."""
        if driver_state(self._store.last_driver()) is not DriverState.ALIVE:
            raise InvalidInput(f"no driver of {self.directory} runs; there is nothing to stop")
        self._store.request_stop()
        return "The driver was asked to stop: trainings save their state, and jobs are withdrawn."


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

    def journals(self) -> list[DriverJournal]:
        """Return its journal."""
        alive = any(has_writer(place / LOGS) for place in (self._directory, self._directory.parent))
        return [DriverJournal(self._journal, None if alive else "ended")]

    def log(self, training: str, tail: int) -> Iterable[LogLine]:
        """Return the last lines of a training's log."""
        return log_lines(self._directory, training, tail=tail) if (self._directory / LOGS).is_dir() else ()

    def stop(self) -> str:
        """Refuse: only the script can end itself."""
        raise InvalidInput("this run belongs to a Parsl script; end the script to stop it")


_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b")


def without_colours(text: str) -> str:
    """Return a line without the escape sequences of terminals."""
    return _COLOURS.sub("", text)
