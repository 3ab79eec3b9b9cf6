"""Code shared by the campaign verbs: the live view, the final table, and the JSON document."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from freetrain_parsl.campaign.summary import summary
from freetrain_parsl.cli.console import Screen
from freetrain_parsl.report.live import remarks, training_table
from freetrain_parsl.report.projection.run import RunState
from freetrain_parsl.screen import say, say_json
from freetrain_parsl.texts import printable, shortened

if TYPE_CHECKING:
    from freetrain_parsl.campaign.run import CampaignRun
    from freetrain_parsl.campaign.store import TrainingRecord
    from freetrain_parsl.report.projection.obstacles import FailedStarts
    from freetrain_parsl.report.projection.run import TrainingState

_STYLES = {"finished": "green", "failed": "bold red", "running": "bold", "waiting": "dim", "cancelled": "dim"}
_NUMBER = re.compile(r"[0-9][0-9.]*( [kMGT]?B)?")
_LONGEST_ERROR = 800
_FRAME_LINES = 8  # lines of the live view besides one per training job


class ProgressView:
    """Shows work in progress: redrawn in a terminal, otherwise one line per change.

    Parameters
    ----------
    console
        Output console.
    title
        Heading.
    """

    def __init__(self, console: Screen, title: str) -> None:
        self._console = console
        self._title = shortened(title)
        self._live = Live(console=console, refresh_per_second=4, transient=True)
        self._printed: dict[str, str] = {}

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Take over the terminal, and release it at the end."""
        with self._live:
            yield

    def report(self, line: str) -> None:
        """Print a line."""
        self._console.say(line)

    def report_change(self, key: str, state: str, line: str) -> None:
        """Print a line if the state of something is another than when it was last called for it."""
        if self._printed.get(key) != state:
            self._printed[key] = state
            self.report(line)


class LiveView(ProgressView):
    """Shows a run; see `ProgressView`."""

    def __init__(self, console: Screen, title: str) -> None:
        super().__init__(console, title)
        self._noted: set[str] = set()
        self._starts_printed: FailedStarts | None = None

    def show(self, run: RunState, elapsed: float, notes: Sequence[str] = ()) -> None:
        """Show the state of the run, and notes on copies to home."""
        if run.failed_starts != self._starts_printed:
            self._starts_printed = run.failed_starts
            self.report(
                f"{elapsed:7.1f} s  "
                + (f"warning: {run.failed_starts.sentence(time.time())}" if run.failed_starts else "blocks start again")
            )
        if self._console.is_terminal:
            head = f"{self._title} · {elapsed:.0f} s · {run.completed} of {len(run.trainings)} training jobs done"
            shown, more = self._fitting(run)
            parts: list[RenderableType] = [_windows_line(run), Text(), training_table(shown), *([more] if more else [])]
            parts += [*remarks(shown, time.time()), *(Text(note, style="cyan") for note in notes)]
            self._live.update(Panel(Group(*parts), title=Text(head)))
            return
        for training in run.trainings.values():
            line = training.state
            if training.state == "running" and training.nodes:
                line += f" on {training.where()}"
            if remark := training.remark():
                line += f"; {remark}"
            share = training.share_done
            done = "" if share is None else f", {share:.0%} done"
            self.report_change(training.name, line, f"{elapsed:7.1f} s  {training.name:14} {line}{done}")
        for note in notes:
            if (kind := _NUMBER.sub("", note)) not in self._noted:  # progress is not printed again and again
                self._noted.add(kind)
                self.report(f"{elapsed:7.1f} s  {note}")

    def _fitting(self, run: RunState) -> tuple[list[TrainingState], Text | None]:
        """Choose the training jobs that fit the terminal, running ones first, and count the omitted ones."""
        trainings = list(run.trainings.values())
        room = max(1, self._console.size.height - _FRAME_LINES)
        if len(trainings) <= room:
            return trainings, None
        order = ("running", "failed", "waiting", "cancelled", "finished")
        shown = sorted(trainings, key=lambda training: order.index(training.state))[:room]
        return shown, Text(f"… and {len(trainings) - room} more: freetrain status shows all", style="dim")


def _windows_line(run: RunState) -> Text:
    return Text(
        f"training on {run.training_place} · {run.idle_nodes} idle nodes in {len(run.windows)} windows · "
        f"{run.blocks_requested} blocks requested, {len(run.blocks_ended)} ended",
        style="cyan",
    )


def drive_and_report(run: CampaignRun, *, as_json: bool, resuming: bool = False) -> None:
    """Drive a run to its end and print the outcome; raise typer.Exit with the exit code."""
    console = Screen(stderr=as_json)
    console.say(f"run directory: {run.directory}")
    view = LiveView(console, run.campaign.name)
    with view.opened():
        how = run.drive(report=view.report, show=view.show, resuming=resuming)
    trainings = run.store.trainings()
    if as_json:
        say_json(summary(run.store))
    else:
        print_trainings(console, trainings)
    left = sum(item.state not in ("finished", "cancelled") for item in trainings)
    if left and how != "interrupted":
        failed = sum(item.state == "failed" for item in trainings)
        console.print(
            f"{left} of {len(trainings)} training jobs are not finished, {failed} of them failed", style="bold"
        )
    if how in ("interrupted", "stopped"):
        view.report(
            f"freetrain: {how}; everything was saved and stopped. To continue: freetrain resume {run.directory}"
        )
    raise typer.Exit(130 if how == "interrupted" else 1 if left else 0)


def print_detached(directory: Path) -> None:
    """Print where a detached driver works, and how to look at it and end it."""
    say(f"run directory: {directory}")
    say(f"the driver runs in the background: freetrain status {directory}, freetrain stop {directory}")


def print_trainings(console: Screen, trainings: list[TrainingRecord]) -> None:
    """Print one row per training job, then each error on an unwrapped line: it may contain a path or a command."""
    console.print(_table(trainings))
    for item in trainings:
        if item.error:
            console.say(f"{shortened(item.name)}: {_first_line(item.error)}", style=_STYLES[item.state])


def _table(trainings: list[TrainingRecord]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("training", "state"):
        table.add_column(column, header_style="dim", no_wrap=True)
    table.add_column("done", header_style="dim", justify="right", no_wrap=True)
    table.add_column("result, or nodes", header_style="dim", overflow="fold")
    for item in trainings:
        done = "" if item.share is None else f"{item.share:.0%}"
        table.add_row(shortened(item.name), Text(item.state, style=_STYLES[item.state]), done, printable(_detail(item)))
    return table


def _detail(item: TrainingRecord) -> str:
    return "; ".join(filter(None, [_outcome(item), item.remark]))


def _outcome(item: TrainingRecord) -> str:
    if item.error:
        return _first_line(item.error).partition(":")[0]  # its type
    if item.state == "finished":
        result = item.result
        if isinstance(result, dict):  # metrics of a training job: show the scalar ones
            plain = {key: value for key, value in result.items() if isinstance(value, (int, float, str))}
            return ", ".join(f"{key} {_short(value)}" for key, value in plain.items())
        return _short(result)
    return item.where


def _first_line(error: str) -> str:
    return error.strip().splitlines()[0][:_LONGEST_ERROR]


def _short(value: object) -> str:
    text = f"{value:.5g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 60 else f"{text[:59]}…"
