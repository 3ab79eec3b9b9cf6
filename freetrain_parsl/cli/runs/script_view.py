"""What the campaign verbs show of the run of a Parsl script: its only state is the journal of its executor."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from freetrain_parsl.cli.console import Screen
from freetrain_parsl.cli.runs.campaign_view import print_trainings
from freetrain_parsl.errors import InvalidInput
from freetrain_parsl.report.projection.run import NO_NODES_YET
from freetrain_parsl.report.run_reader import state_of
from freetrain_parsl.texts import printable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from freetrain_parsl.campaign.run_source import RunSource, ScriptSource
    from freetrain_parsl.report.projection.run import TrainingState

__all__ = ["print_script", "reason_figures", "reason_lines", "script_figures"]


def script_figures(source: ScriptSource) -> dict[str, Any]:
    """Describe the run of a script for ``freetrain status --json``."""
    trainings = source.trainings()
    return {
        "name": source.name,
        "run_dir": str(source.directory),
        "running": source.is_running(),
        **{state: sum(item.state == state for item in trainings) for state in ("finished", "failed", "cancelled")},
        "trainings": [item.as_json() for item in trainings],
    }


def print_script(console: Screen, source: ScriptSource) -> None:
    """Print the training jobs of a script, and whether it runs."""
    trainings = source.trainings()
    finished = sum(item.state == "finished" for item in trainings)
    console.say(f"{source.name}: {finished} of {len(trainings)} training jobs finished, in {source.directory}")
    console.say(_script_line(source))
    print_trainings(console, trainings)


def reason_figures(source: RunSource) -> dict[str, Any]:
    """Describe, for ``freetrain explain RUN_DIR --json``, why each training job of the last driver is where it is.

    Raises
    ------
    InvalidInput
        It has no journal, or the journal cannot be read.
    """
    journals = source.journals()
    if not journals or not journals[-1].path.exists():
        raise InvalidInput(f"{source.directory} has no journal yet: no driver of it has started")
    run = state_of(journals[-1].path)
    lives = journals[-1].how is None
    cut_short = {item.name for item in run.trainings.values() if item.state == "running" and not lives}
    for name in cut_short:
        run.trainings[name].state, run.trainings[name].nodes = "waiting", ()
    return {
        "running": lives,
        "failed_starts": None if run.failed_starts is None else run.failed_starts.sentence(time.time()),
        "free_accelerators": (run.free_slots if lives else "") or None,
        "trainings": [
            {
                "name": item.name,
                "state": item.state,
                "nodes": list(item.nodes),
                "where": item.where(),
                "reason": _reason(item, run.why_not_more(item.name), cut_short=item.name in cut_short),
            }
            for item in run.trainings.values()
        ],
    }


def reason_lines(figures: dict[str, Any]) -> Iterator[str]:
    """Describe the figures of `reason_figures` in sentences."""
    yield "the driver runs" if figures["running"] else "no driver runs; this is what the last one has recorded"
    if figures["failed_starts"]:
        yield figures["failed_starts"]
    if figures["free_accelerators"]:
        yield figures["free_accelerators"]
    for item in figures["trainings"]:
        where = f" on {item['where']}" if item["where"] else ""
        reason = item["reason"] or (NO_NODES_YET if item["state"] == "waiting" else "")
        yield printable(f"{item['name']}: {item['state']}{where}{f': {reason}' if reason else ''}")


def _reason(training: TrainingState, why_not_more: str, *, cut_short: bool) -> str:
    if cut_short:
        return "was running when its driver ended"
    if training.state == "failed":
        return training.error.strip().partition("\n")[0]
    return "; ".join(filter(None, (training.remark(), why_not_more if training.state == "running" else "")))


def _script_line(source: ScriptSource) -> str:
    return "a Parsl script, which is running" if source.is_running() else "a Parsl script, which has ended"
