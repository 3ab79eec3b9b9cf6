"""``freetrain explain RUN_DIR``: shows why each training of a run at several sites is where it is, or waits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from freetrain_parsl.campaign.summary import driver_line
from freetrain_parsl.errors import InvalidInput
from freetrain_parsl.extensions.globus.sites.coordinator_file import COORDINATOR, CoordinatorFile

if TYPE_CHECKING:
    from collections.abc import Iterator

    from freetrain_parsl.campaign.stored_run import StoredRun

__all__ = ["explain_run", "sentences"]


def explain_run(store: StoredRun) -> dict[str, Any]:
    """Describe where the trainings of a run are and why, as its coordinator has decided last.

    Returns
    -------
    dict of str to Any
        ``coordinator``: whether it runs, in words; ``sites``: a line each; ``trainings``: ``name``, ``state``,
        ``site`` (``None``: at none yet), ``reason``, ``moves``; ``starts``: site -> the last measured ones, seconds.

    Raises
    ------
    InvalidInput
        It is not a run at several sites, or its state is damaged.
    """
    if store.fact("sites", None) is None:
        raise InvalidInput(f"{store.directory} is a run at one site; give its campaign file, and --config")
    kept = CoordinatorFile.read(store.directory)
    try:
        placed = {} if kept is None else kept.document["trainings"]
        states = {item.name: item.state for item in store.trainings()}
        return {
            "coordinator": driver_line(store),
            "sites": [] if kept is None else list(kept.lines),
            "trainings": [
                {
                    "name": name,
                    "state": state,
                    "site": placed[name]["ended_at"] or placed[name]["site"] if name in placed else None,
                    "reason": placed[name]["reason"] if name in placed and state in ("waiting", "running") else "",
                    "moves": placed[name]["moves"] if name in placed else 0,
                }
                for name, state in states.items()
            ],
            "starts": {}
            if kept is None
            else {name: list(map(float, one["starts"])) for name, one in kept.document["sites"].items()},
        }
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise InvalidInput(f"{store.directory / COORDINATOR} is damaged: {error!r}") from None


def sentences(figures: dict[str, Any]) -> Iterator[str]:
    """Yield what `explain_run` has found, in lines."""
    yield figures["coordinator"]
    yield from figures["sites"]
    for name, starts in figures["starts"].items():
        if starts:
            took = ", ".join(f"{start:.0f} s" for start in starts)
            yield f"site {name}: the last starts of trainings that are new there took {took}"
    for training in figures["trainings"]:
        where = f" at {training['site']}" if training["site"] else ""
        why = training["reason"]
        if not why and training["state"] == "waiting":
            why = "no decision has been made yet"
        moved = {0: "", 1: "; moved once"}.get(training["moves"], f"; moved {training['moves']} times")
        yield f"{training['name']} {training['state']}{where}{f': {why}' if why else ''}{moved}"
