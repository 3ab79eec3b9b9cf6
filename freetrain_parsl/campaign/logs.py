"""The logs of a run's training jobs, from any shell: what they print, wherever they run, in order."""

from __future__ import annotations

import time
from collections import deque
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

from freetrain_parsl.campaign.lock import DriverState, driver_state
from freetrain_parsl.campaign.stored_run import DATABASE, StoredRun
from freetrain_parsl.errors import InvalidInput, did_you_mean
from freetrain_parsl.executor.training_logs import names_in
from freetrain_parsl.report.log_reader import follow_logs, has_writer, read_logs
from freetrain_parsl.texts import shortened

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from freetrain_parsl.executor.training_logs import LogLine

__all__ = ["LOGS", "log_lines", "name_width", "shown_line", "trainings_of"]

LOGS: Final = "logs"
"""Directory of the logs in the run directory."""


def trainings_of(run_dir: Path) -> list[str]:
    """Return the names of a run's training jobs: of a campaign, or of a Parsl script.

    Parameters
    ----------
    run_dir
        Run directory of ``freetrain run``, or Parsl's (``runinfo/000``).

    Raises
    ------
    InvalidInput
        It is neither.
    """
    if (run_dir / LOGS).is_dir() and not (run_dir / DATABASE).exists():
        return names_in(run_dir / LOGS)
    return [training.name for training in StoredRun(run_dir.absolute()).trainings()]


def log_lines(
    run_dir: str | Path,
    training: str | None = None,
    *,
    follow: bool = False,
    tail: int | None = None,
    all_processes: bool = False,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterable[LogLine]:
    """Return the lines of a training job's log, or those of all training jobs, merged by time.

    Parameters
    ----------
    run_dir
        As in `trainings_of`.
    training
        Name of the training job; ``None``: all training jobs.
    follow
        Whether to continue with lines that are added, until the run has ended.
    tail
        Number of lines to begin with; ``None``: all.
    all_processes
        Whether to include the output of processes other than the first.
    sleep
        Waits for further lines.

    Raises
    ------
    InvalidInput
        There is no such run or training, or `tail` is negative.
    """
    run_dir = Path(run_dir)
    if tail is not None and tail < 0:
        raise InvalidInput(f"the number of lines to begin with must not be negative, got {tail}")
    known = trainings_of(run_dir)
    if training is not None and training not in known:
        raise InvalidInput(f"{run_dir} has no training job {training[:80]!r}{did_you_mean(training[:80], known)}")
    directory = run_dir / LOGS

    def names() -> list[str]:
        return [training] if training is not None else trainings_of(run_dir)

    if follow and not _has_ended(run_dir):
        return follow_logs(
            directory,
            names,
            ended=lambda: _has_ended(run_dir),
            sleep=sleep,
            everything=all_processes,
            tail=tail,
        )
    lines = read_logs(directory, names(), everything=all_processes)
    return lines if tail is None else deque(lines, maxlen=tail)


def _has_ended(run_dir: Path) -> bool:
    if (run_dir / DATABASE).exists():
        return driver_state(StoredRun(run_dir.absolute()).last_driver()) is not DriverState.ALIVE
    return not has_writer(run_dir / LOGS)


def name_width(names: Sequence[str]) -> int:
    """Return the width of the column with the training jobs' names; 0: it is not needed."""
    return max(len(shortened(name)) for name in names) if len(names) > 1 else 0


def shown_line(line: LogLine, width: int = 0, *, all_processes: bool = False, times: bool = False) -> str:
    """Format a line for people; `screen.say_coloured` removes what a terminal would obey.

    Parameters
    ----------
    line
        The line.
    width
        Width of the column with the training job's name; 0: no such column.
    all_processes
        Whether the lines are of all processes.
    times
        Whether to show when the line arrived.
    """
    name = f"{shortened(line.training):{width}} | " if width else ""
    at = datetime.fromtimestamp(line.time).astimezone()
    if line.is_mark:
        return f"{name}── {at:%Y-%m-%d %H:%M:%S} {line.text} ──"
    rank = line.source.lstrip("!")
    process = "" if rank == "0" or (line.is_main and not all_processes) else f"[{'joining' if rank == '?' else rank}] "
    stamp = f"{at:%H:%M:%S} " if times else ""
    return f"{name}{stamp}{process}{line.text}"
