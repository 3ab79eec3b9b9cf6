"""For scripts: why the training job of a future waits, runs as it does, or was refused."""

from __future__ import annotations

import sqlite3
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from freetrain_parsl.errors import InvalidInput
from freetrain_parsl.report.projection.run import NO_NODES_YET, RunState
from freetrain_parsl.texts import text_of

if TYPE_CHECKING:
    from concurrent.futures import Future

    from freetrain_parsl.executor.executor import FreeTrainExecutor
    from freetrain_parsl.report.projection.run import TrainingState

__all__ = ["explain", "job_of", "state_of"]


def explain(future: Future[Any]) -> str:
    """Say why a training job waits, is not fused, cannot save or was refused; as the page and ``freetrain status`` do.

    Parameters
    ----------
    future
        What a training app returned.

    Returns
    -------
    str
        Reasons, separated by ``"; "``; of one that runs with nothing to be said about it: where. Of one that has
        finished: why it was not fused; empty if there is nothing to say.

    Raises
    ------
    InvalidInput
        It is not the future of a training app that this process has called.

    Examples
    --------
    >>> future = train(lr=0.1)  # doctest: +SKIP
    >>> freetrain_parsl.explain(future)  # doctest: +SKIP
    'waits for 2 nodes to join; idle nodes not used: n[1-2]: shorter than start-up 30 s + minimum 1 min + margin 10 s'
    """
    name, run = _run_of(future)
    if future.cancelled():
        return "cancelled"
    known, now = run.trainings.get(name), time.time()
    if future.done():
        error = future.exception()
        if error is not None:
            return f"{type(error).__name__}: {text_of(error)}"
        return "" if known is None or known.state != "finished" else known.remark(now)
    if known is None:
        return "waits for its arguments, or for Parsl to submit it"
    reasons = [known.remark(now), *(run.reasons(now) if known.state == "waiting" else ())]
    return "; ".join(filter(None, reasons)) or (NO_NODES_YET if known.state == "waiting" else known.whereabouts())


def state_of(future: Future[Any]) -> TrainingState | None:
    """Return what the journal says of the training job of a future; ``None``: nothing yet.

    Raises
    ------
    InvalidInput
        See `explain`.
    """
    name, run = _run_of(future)
    return run.trainings.get(name)


def _run_of(future: Future[Any]) -> tuple[str, RunState]:
    name, executor = job_of(future)
    journal = Path(executor.journal_path)
    try:
        return name, _FOLLOWED.state_of(journal) if journal.exists() else RunState()
    except (OSError, sqlite3.Error) as error:
        raise InvalidInput(f"the journal {journal} cannot be read: {error}") from None


class _FollowedJournals(threading.local):
    """What the newest journals say, so that each is read on from where it was read last: a script may ask in a loop.

    Each thread has its own, which no other one changes meanwhile.
    """

    def __init__(self) -> None:
        self._runs: dict[tuple[Path, int], RunState] = {}

    def state_of(self, journal: Path) -> RunState:
        """Return what a journal says now."""
        key = journal, journal.stat().st_ino
        run = self._runs.pop(key, None) or RunState()
        run.follow_reasons(journal)  # one that cannot be read is forgotten
        self._runs[key] = run
        while len(self._runs) > _MOST_JOURNALS:
            del self._runs[next(iter(self._runs))]
        return run


_MOST_JOURNALS = 4  # of executors of one process
_FOLLOWED = _FollowedJournals()


def job_of(future: object) -> tuple[str, FreeTrainExecutor]:
    """Return the name of the training job of a future, and the executor that runs it.

    Raises
    ------
    InvalidInput
        It is not the future of a training app.
    """
    from parsl.dataflow.futures import AppFuture

    from freetrain_parsl.executor.executor import FreeTrainExecutor
    from freetrain_parsl.executor.jobs.request import SPECIFICATION_KEY

    if isinstance(future, AppFuture):
        task = future.task_record
        request = task["resource_specification"].get(SPECIFICATION_KEY)
        executor = task["dfk"].executors.get(task["executor"])
        if request is not None and isinstance(executor, FreeTrainExecutor):
            return request.options.name, executor
    raise InvalidInput(f"{future!r} is not the future of a training app"[:300])
