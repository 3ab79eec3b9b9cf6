"""Where the state of a run is read: the run directory of a campaign, or the journal of an executor in this process."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from freetrain_parsl.campaign.detached import driver_process, local_status
from freetrain_parsl.campaign.run_source import CampaignSource
from freetrain_parsl.campaign.store import plain_scalar
from freetrain_parsl.campaign.stored_run import DATABASE, StoredRun
from freetrain_parsl.campaign.summary import driver_line, failures_line, home_lines, trainings_of
from freetrain_parsl.errors import InvalidInput
from freetrain_parsl.extensions.notebook.control import reason_in
from freetrain_parsl.extensions.notebook.pictures import timeline_picture
from freetrain_parsl.extensions.notebook.snapshot import RunSnapshot, TrainingRow, short_path
from freetrain_parsl.extensions.notebook.values import outcome_row
from freetrain_parsl.extensions.pages.run_view import RunView
from freetrain_parsl.report.run_reader import DriverJournal, RunReader
from freetrain_parsl.texts import storable, text_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from concurrent.futures import Future
    from pathlib import Path

    from freetrain_parsl.campaign.store import TrainingRecord
    from freetrain_parsl.extensions.notebook.values import Picture
    from freetrain_parsl.report.projection.run import RunState, TrainingState

__all__ = ["ShownCampaign", "ShownFutures", "ShownRun"]


class ShownRun(ABC):
    """What a run in a notebook is read from."""

    directory: Path
    """Run directory of the campaign, or Parsl's."""
    _reader: RunReader[RunView]

    def __init__(self) -> None:
        self._lock = threading.RLock()  # cells and the thread of the live display read the same journal

    def snapshot(self) -> RunSnapshot:
        """Return the state of the run."""
        with self._lock:
            return self._snapshot()

    def results(self) -> list[dict[str, Any]]:
        """Return one row for each training job, see `outcome_row`."""
        with self._lock:
            return self._results()

    def explanation(self) -> list[str]:
        """Return why training jobs wait, and why the others ended."""
        with self._lock:
            return self._explanation()

    def changes(self, version: int = 0) -> dict[str, Any]:
        """Read what is new, and return what has changed after a version; see `RunView.since`."""
        with self._lock:
            return self._view().since(version)

    def timeline(self, title: str) -> Picture:
        """Draw the nodes over time."""
        with self._lock:
            return timeline_picture(self._view(), title)

    @abstractmethod
    def _snapshot(self) -> RunSnapshot: ...

    @abstractmethod
    def _results(self) -> list[dict[str, Any]]: ...

    @abstractmethod
    def _explanation(self) -> list[str]: ...

    @abstractmethod
    def _driver_journals(self) -> list[DriverJournal]: ...

    def _view(self) -> RunView:
        """Read what is new."""
        return self._reader.refresh()


class ShownCampaign(ShownRun):
    """A run of a campaign, whose driver is another process, and may yet have to create the run.

    Parameters
    ----------
    run_dir
        Its run directory.
    clock
        Seconds since the epoch.
    name, training jobs
        What is shown until the run has been created.

    Raises
    ------
    InvalidInput
        It is not a run directory, and will not become one.
    """

    def __init__(
        self,
        run_dir: Path,
        clock: Callable[[], float] = time.time,
        *,
        name: str = "",
        trainings: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.directory = run_dir.absolute()
        self._clock = clock
        self._name = name or self.directory.name
        self._expected = tuple(trainings)
        self._store: StoredRun | None = None
        self._campaign: CampaignSource | None = None
        if self._open() is None and driver_process(self.directory) is None:
            StoredRun(self.directory)  # it refuses by name
        self._reader = RunReader(RunView(self._name), self._driver_journals, clock)

    @property
    def store(self) -> StoredRun:
        """The state of the run.

        Raises
        ------
        InvalidInput
            The run has not been created: its driver starts, or has refused it.
        """
        store = self._open()
        if store is None:
            status = local_status(self.directory, None)
            raise InvalidInput(reason_in(status.message) if status.over else f"{self.directory} is {status.state}")
        return store

    def _open(self) -> StoredRun | None:
        """Return the state of the run, once it has been created."""
        if self._store is None and (self.directory / DATABASE).exists():
            self._store = StoredRun(self.directory)
            self._campaign = CampaignSource(self._store)
            self._name = str(self._store.fact("name"))
        return self._store

    def _snapshot(self) -> RunSnapshot:
        """Return the state in the store, with progress from the journals."""
        run = self._view()
        store = self._open()
        status = local_status(self.directory, store)
        notes = [reason_in(status.message)] if status.message else []
        if run.failed_starts is not None and not status.over:
            notes.append(run.failed_starts.sentence(self._clock()))
        if failures := failures_line(run.incidents.failures):
            notes.append(failures)
        return RunSnapshot(
            title=self._name,
            state=status.state,
            place=short_path(self.directory),
            rows=tuple(TrainingRow(name, "waiting") for name in self._expected)
            if store is None
            else tuple(_campaign_row(item, run.progress.get(item.name, {})) for item in trainings_of(store)),
            taken=self._clock(),
            notes=(*notes, *([] if store is None else home_lines(store))),
            over=status.over,
        )

    def _results(self) -> list[dict[str, Any]]:
        """Return the results in the store."""
        return [
            outcome_row(item.name, item.state, item.share, item.result, item.error) for item in trainings_of(self.store)
        ]

    def _explanation(self) -> list[str]:
        """Return the state of the driver, of the windows, and of each training job that has not finished."""
        store = self._open()
        status = local_status(self.directory, store)
        if store is None:
            return [reason_in(status.message) or "the driver is starting"]
        lines = ["the driver is starting"] if status.state == "starting" else [driver_line(store)]
        view = self._view()
        run = None if status.over or view.ended is not None or view.origin is None else view.state
        if run is not None:
            lines += _machine_lines(run, self._clock())
        for item in trainings_of(store):
            if item.error:
                lines.append(f"{item.name}: {item.state}: {' '.join(item.error.split())}")
            elif item.state not in ("finished", "cancelled"):
                known = None if run is None else run.trainings.get(item.name)
                lines.append(f"{item.name}: {item.state}{_reason(known, run, self._clock(), item.remark or '')}")
        return [*lines, *home_lines(store)]

    def _driver_journals(self) -> list[DriverJournal]:
        self._open()
        return [] if self._campaign is None else self._campaign.journals()


class ShownFutures(ShownRun):
    """Training jobs that were submitted in this process."""

    def __init__(
        self, futures: Mapping[str, Future[Any]], journal: Path, directory: Path, clock: Callable[[], float] = time.time
    ) -> None:
        super().__init__()
        self.directory = directory
        self._futures = dict(futures)
        self._path = journal
        self._clock = clock
        self._reader = RunReader(RunView(directory.name), self._driver_journals, clock)

    def _snapshot(self) -> RunSnapshot:
        """Return the state of the futures, with progress from the journal."""
        run = self._view()
        rows = tuple(_future_row(name, future, run.state.trainings.get(name)) for name, future in self._futures.items())
        over = all(future.done() for future in self._futures.values())
        failed = None if over else run.failed_starts
        notes = ("" if failed is None else failed.sentence(self._clock()), failures_line(run.incidents.failures))
        return RunSnapshot(
            title=f"{len(rows)} training jobs of this notebook",
            state="ended" if over else "running",
            place=short_path(self.directory),
            rows=rows,
            taken=self._clock(),
            notes=tuple(filter(None, notes)),
            over=over,
        )

    def _results(self) -> list[dict[str, Any]]:
        """Return the results of the futures that are done."""
        rows = []
        run = self._view().state
        for name, future in self._futures.items():
            row = _future_row(name, future, run.trainings.get(name))
            error = _error_of(future)
            result = future.result() if future.done() and error is None else None
            rows.append(outcome_row(name, row.state, row.share, result, error))
        return rows

    def _explanation(self) -> list[str]:
        """Return the state of the windows and of each training job that has not finished."""
        run = self._view().state
        lines = _machine_lines(run, self._clock())
        for name, future in self._futures.items():
            known = run.trainings.get(name)
            row = _future_row(name, future, known)
            if (error := _error_of(future)) is not None:
                lines.append(f"{name}: {row.state}: {' '.join(error.split())}")
            elif not future.done():
                lines.append(f"{name}: {row.state}{_reason(known, run, self._clock(), '')}")
        if all(future.done() for future in self._futures.values()):
            lines.append(f"all {len(self._futures)} training jobs have ended")
        return lines

    def _driver_journals(self) -> list[DriverJournal]:
        return [DriverJournal(self._path)]


def _campaign_row(item: TrainingRecord, progress: Mapping[str, Any]) -> TrainingRow:
    parts = [item.where, _one_line(item.error), _short_result(item.result), item.remark or ""]
    return TrainingRow(
        item.name, item.state, item.share, progress.get("epoch"), progress.get("loss"), "; ".join(filter(None, parts))
    )


def _future_row(name: str, future: Future[Any], known: TrainingState | None) -> TrainingRow:
    state = "waiting" if known is None else known.state
    error = _error_of(future)
    if future.done():
        state = "cancelled" if future.cancelled() or state == "cancelled" else "finished" if error is None else "failed"
    if known is None:
        return TrainingRow(name, state, note=_one_line(error))
    result = _short_result(future.result()) if future.done() and error is None else ""
    parts = [known.where(), _one_line(error), result, known.remark()]
    return TrainingRow(
        name,
        state,
        1.0 if state == "finished" else known.share_done,
        known.progress.get("epoch"),
        known.progress.get("loss"),
        "; ".join(filter(None, parts)),
    )


def _error_of(future: Future[Any]) -> str | None:
    if not future.done():
        return None
    if future.cancelled():
        return "cancelled"
    error = future.exception()
    return None if error is None else f"{type(error).__name__}: {text_of(error)}"


def _one_line(error: str | None) -> str:
    return "" if not error else error.strip().splitlines()[0]


def _short_result(result: Any) -> str:
    result = plain_scalar(result)
    if isinstance(result, dict):
        values = {key: plain_scalar(value) for key, value in result.items()}
        plain = {key: value for key, value in values.items() if isinstance(value, (int, float, str))}
        return ", ".join(f"{key} {_short(value)}" for key, value in plain.items())
    return "" if result is None else _short(result)


def _short(value: object) -> str:
    text = f"{value:.5g}" if isinstance(value, float) else storable(str(value))
    return text if len(text) <= 60 else f"{text[:59]}…"


def _machine_lines(run: RunState, now: float) -> list[str]:
    blocks = f"{run.blocks_requested} blocks requested, {len(run.blocks_ended)} ended"
    use = f"training jobs run on {run.training_place}; {blocks}"
    return [f"{run.idle_nodes} idle nodes in {len(run.windows)} windows; {use}", *run.reasons(now)]


def _reason(known: TrainingState | None, run: RunState | None, now: float, remark: str) -> str:
    if known is None or run is None:
        return f"; {remark}" if remark else ""
    if known.state == "running":
        return "; ".join(filter(None, [f" on {known.where()}", known.remark(now)]))
    if why := known.remark(now) or remark:
        return f"; {why}"
    idle, needed = run.idle_nodes, -(-known.min_nodes // run.slots_per_node)
    if idle < needed:
        return f"; waits for nodes: it needs at least {needed}, and {idle} are idle"
    return f"; waits for nodes: {idle} are idle, a block may be starting or the planner prefers others"
