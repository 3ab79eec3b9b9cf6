"""The pictures of a run: its nodes over time, and its curves, from the journals of all its drivers."""

from __future__ import annotations

import sqlite3
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from freetrain_parsl.executor.journal import read_journal
from freetrain_parsl.notebook.values import Picture
from freetrain_parsl.protocol import journal as record
from freetrain_parsl.report.run import RunState
from freetrain_parsl.report.run_reader import DAMAGED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from freetrain_parsl.executor.journal import JournalEntry

__all__ = ["curves_picture", "stays_of", "timeline_picture"]

_NO_MATPLOTLIB = "for a picture: pip install 'freetrain-parsl[report]'"


def curves_picture(seen: Mapping[str, Any], title: str) -> Picture:
    """Draw loss and metrics against steps; without matplotlib, only describe them.

    Parameters
    ----------
    seen
        The run, as of `RunView.since`.
    title
        Title of the picture.
    """
    curves = seen["curves"]
    if not curves:
        return Picture(f"{title}: no loss and no metric yet")
    text = f"{title}: {', '.join(dict.fromkeys(curve['name'] for curve in curves))} against steps"
    try:
        from freetrain_parsl.report.curves import draw_curves

        return _drawn(text, lambda path: draw_curves(curves, seen["trainings"]["name"], path, title=title))
    except ImportError:
        return Picture(f"{text}; {_NO_MATPLOTLIB}")


def timeline_picture(journals: Sequence[Path], title: str) -> Picture:
    """Draw a run; without matplotlib, only describe it.

    Parameters
    ----------
    journals
        Of its drivers, the first one first.
    title
        Title of the picture.
    """
    whole = RunState()
    stays: list[dict[str, Any]] = []
    for path in journals:
        try:
            run, nodes = _read(path)
        except (OSError, sqlite3.Error, *DAMAGED) as error:
            return Picture(f"{title}: the journal {path} cannot be read: {error}")
        stays += nodes
        whole.trainings |= run.trainings
        whole.fragments += run.fragments
        whole.checkpoints += run.checkpoints
        whole.node_kinds |= run.node_kinds
    if not stays:
        return Picture(f"{title}: no node has been used yet")
    text = f"{title}: {len(whole.fragments)} fragments on {len({stay['node'] for stay in stays})} nodes"
    try:
        from freetrain_parsl.report.timeline import draw_timeline

        return _drawn(text, lambda path: draw_timeline(whole, stays, path, title=title))
    except ImportError:
        return Picture(f"{text}; {_NO_MATPLOTLIB}")


def _read(journal: Path) -> tuple[RunState, list[dict[str, Any]]]:
    """Return what a driver did, and how long its nodes were in blocks; what has no end lasts until its last entry."""
    run = RunState()
    last = 0.0

    def entries() -> Iterator[JournalEntry]:
        nonlocal last
        for _, entry in read_journal(journal):
            last = entry.time
            run.take(last, entry.record)
            yield entry

    stays = stays_of(entries())
    run.end_driver(last)
    return run, stays


def _drawn(text: str, draw: Callable[[Path], object]) -> Picture:
    with tempfile.TemporaryDirectory(prefix="freetrain-") as directory:
        path = Path(directory) / "picture.png"
        draw(path)
        return Picture(text, path.read_bytes())


def stays_of(entries: Iterable[JournalEntry]) -> list[dict[str, Any]]:
    """Return how long each node was in a block of ours, as `draw_timeline` takes it.

    Parameters
    ----------
    entries
        One journal, in order of time. A stay whose end is not recorded has the time of the last entry.
    """
    open_: dict[tuple[str, str], dict[str, Any]] = {}  # (block, node) -> stay
    stays: list[dict[str, Any]] = []
    ended: set[str] = set()
    last = 0.0

    def begin(block: str, node: str) -> None:
        if (block, node) not in open_ and block not in ended:
            stay = {"node": node, "kind": "preemptible", "job": block, "start": last, "end": None}
            open_[block, node] = stay
            stays.append(stay)

    for entry in entries:
        last = entry.time
        match entry.record:
            case record.BlockStarted(subject=block, nodes=nodes):
                for node in nodes:
                    begin(block, node)
            case record.NodeJoined(subject=node, block=block):  # before a query has shown that its block started
                begin(block, node)
            case record.BlockEnded(subject=block):
                ended.add(block)
                for key in [key for key in open_ if key[0] == block]:
                    open_.pop(key)["end"] = entry.time
    for stay in open_.values():
        stay["end"] = last
    return stays
