"""Code shared by the verbs that coordinate several sites: the live view, the final table, and the exit code."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

import typer
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from freetrain_parsl.campaign.summary import summary
from freetrain_parsl.cli.console import Screen
from freetrain_parsl.cli.runs.campaign_view import ProgressView, print_trainings
from freetrain_parsl.errors import FreeTrainError
from freetrain_parsl.extensions.globus.sites.state import site_lines
from freetrain_parsl.screen import say, say_json
from freetrain_parsl.texts import shortened

if TYPE_CHECKING:
    from collections.abc import Sequence

    from freetrain_parsl.extensions.globus.sites.coordinator import Coordinator
    from freetrain_parsl.extensions.globus.sites.run import SitesRun
    from freetrain_parsl.extensions.globus.sites.state import TrainingPlace

__all__ = ["coordinate_and_report"]

_SECONDS = re.compile(r"\d+ s\b")
_EXIT = {"interrupted": 130, "detached": 130}


class SitesView(ProgressView):
    """Shows all sites and training jobs in one view; see `ProgressView`."""

    def show(self, coordinator: Coordinator, elapsed: float) -> None:
        """Show the state of the sites and of the training jobs."""
        lines = list(coordinator.lines(time.time()))
        if self._console.is_terminal:
            ended = sum(item.ended is not None for item in coordinator.trainings.values())
            head = f"{self._title} · {elapsed:.0f} s · {ended} of {len(coordinator.trainings)} training jobs done"
            parts: list[RenderableType] = [*(Text(line, style="cyan") for line in lines), Text(), _table(coordinator)]
            self._live.update(Panel(Group(*parts), title=Text(head)))
            return
        for site, line in zip(coordinator.sites, lines, strict=True):
            self.report_change(f"site {site}", _SECONDS.sub("", line), f"{elapsed:7.1f} s  {line}")
        for name, item in coordinator.trainings.items():
            place, state, share = _row(coordinator, name, item)
            done = f", {share} done" if share else ""
            reason = f": {item.reason}" if item.ended is None and item.reason else ""
            self.report_change(name, f"{place} {state}", f"{elapsed:7.1f} s  {name:14} {state} {place}{done}{reason}")


def _row(coordinator: Coordinator, name: str, item: TrainingPlace) -> tuple[str, str, str]:
    """Return place, state and share done of a training job."""
    if item.ended is not None:
        return (f"at {item.ended_at}" if item.ended_at else ""), item.ended.state, ""
    if item.site is None:
        return "at no site yet", "waiting", ""
    at_site = coordinator.sites[item.site].trainings.get(name)
    if at_site is None:
        return f"at {item.site}", "waiting", ""
    nodes = f" on {', '.join(at_site.nodes)}" if at_site.nodes else ""
    return f"at {item.site}{nodes}", at_site.state, "" if at_site.share is None else f"{at_site.share:.0%}"


def _table(coordinator: Coordinator) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("training", "state", "where", "done", "why"):
        table.add_column(column, header_style="dim", overflow="fold")
    for name, item in coordinator.trainings.items():
        place, state, share = _row(coordinator, name, item)
        table.add_row(shortened(name), state, place, share, item.reason if item.ended is None else "")
    return table


def coordinate_and_report(
    run: SitesRun, *, verb: str, as_json: bool, stop: bool = False, retry: Sequence[str] = ()
) -> None:
    """Coordinate the sites, then print the training jobs; exit with 0 if all have finished or were cancelled."""
    console = Screen(stderr=as_json)
    console.say(f"run directory: {run.directory}")
    if run.left_out:
        console.say(f"left out, as their names look like secrets: {', '.join(run.left_out)}")
    view = SitesView(console, run.campaign.name)
    try:
        with view.opened():
            how = run.drive(report=view.report, show=view.show, stop=stop, retry=retry)
    except FreeTrainError as error:
        say(f"freetrain {verb}: {error}", err=True)
        raise typer.Exit(2) from None
    trainings = run.store.trainings()
    if as_json:
        say_json({**summary(run.store), "sites": site_lines(run.directory)})
    else:
        print_trainings(console, trainings)
    if how in ("interrupted", "stopped"):
        others = "the other sites have stopped" if run.unstopped else "the sites have stopped"
        left_behind = "".join(f"site {name}: {why}; " for name, why in sorted(run.unstopped.items()))
        view.report(f"freetrain: {how}; {left_behind}{others}. To continue: freetrain resume {run.directory}")
    elif how == "detached":
        view.report(
            "freetrain: the training jobs continue where they are. To coordinate them again: freetrain resume "
            f"{run.directory}"
        )
    left = sum(item.state not in ("finished", "cancelled") for item in trainings)
    raise typer.Exit(_EXIT.get(how, 1 if left else 0))
