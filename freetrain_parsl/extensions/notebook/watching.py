"""Show training jobs that were submitted in this notebook, or a run that something else drives."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from freetrain_parsl.campaign.files.yaml_file import user_path
from freetrain_parsl.errors import InvalidInput
from freetrain_parsl.extensions.notebook.run import StartedRun, WatchedRun
from freetrain_parsl.extensions.notebook.shown import ShownCampaign, ShownFutures
from freetrain_parsl.report.futures import job_of

if TYPE_CHECKING:
    from freetrain_parsl.executor.executor import FreeTrainExecutor

__all__ = ["watch"]


def watch(what: str | Path | Future[Any] | Iterable[Future[Any]] | Mapping[Any, Future[Any]]) -> WatchedRun:
    """Show a run in the output of the cell, where it continues updating; nothing can be changed by it.

    Parameters
    ----------
    what
        Futures of training apps, called in this notebook; or the run directory of a campaign.

    Returns
    -------
    WatchedRun
        For results, logs and the timeline.

    Raises
    ------
    InvalidInput
        It is neither.

    Examples
    --------
    >>> futures = train.grid(lr=[1e-3, 1e-2])  # doctest: +SKIP
    >>> view = watch(futures)  # doctest: +SKIP
    """
    run: WatchedRun
    if isinstance(what, (str, Path)):
        run = StartedRun(ShownCampaign(user_path(str(what))), controls=False)
    else:
        run = WatchedRun(_source_of(what))
    run.show()
    return run


def _source_of(what: object) -> ShownFutures:
    items = list(what.values() if isinstance(what, Mapping) else [what] if isinstance(what, Future) else _listed(what))
    if not items:
        raise InvalidInput("watch(…): there are no futures in it")
    futures: dict[str, Future[Any]] = {}
    executors: list[FreeTrainExecutor] = []
    for future in items:
        try:
            name, executor = job_of(future)
        except InvalidInput as error:
            raise InvalidInput(f"watch(…): {error}") from None
        futures[name] = future
        if executor not in executors:
            executors.append(executor)
    if len(executors) > 1:
        raise InvalidInput("watch(…): these futures are of several executors; call it once for each of them")
    return ShownFutures(futures, executors[0].journal_path, Path(executors[0].run_dir).absolute())


def _listed(what: object) -> list[Any]:
    if not isinstance(what, Iterable):
        raise InvalidInput(f"watch(…): give futures of training apps, or a run directory, got {what!r}"[:300])
    return list(what)
