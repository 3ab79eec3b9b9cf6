"""Breakdown of a run's offered node-time, from the executor's journal and the cluster's history."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from freetrain_parsl.executor.journal import JournalEntry
    from freetrain_parsl.report.projection.run import RunState

Span = tuple[float, float]


@dataclass
class Account:
    """Node-seconds of the offered windows by use; they add up to `offered`.

    Parameters
    ----------
    offered
        In all windows that are long enough.
    useful
        In steps that count.
    waiting
        A window is open without a block of ours: not found, requested or granted yet.
    starting
        From the start of a block until its slot has imported torch and has registered.
    unassigned
        The slot is registered but not assigned: decisions, newcomers warming up, training jobs not ready.
    paused
        Training jobs pause to change their nodes.
    between_steps
        In a training job, but not in a step: its first step's preparations, checkpoints, unfinished steps.
    leaving
        The slot has ended, but not its block.
    again
        Like ``waiting``, but after a first block in the same window.
    """

    offered: float = 0.0
    useful: float = 0.0
    waiting: float = 0.0
    starting: float = 0.0
    unassigned: float = 0.0
    paused: float = 0.0
    between_steps: float = 0.0
    leaving: float = 0.0
    again: float = 0.0
    windows: list[tuple[str, float, float]] = field(default_factory=list)
    """Node, and opening and closing of its window, seconds after the start."""
    starts: list[float] = field(default_factory=list)
    """Start-up seconds of each block."""

    @property
    def goodput(self) -> float:
        """Return the useful share of the offered node-time."""
        return self.useful / self.offered

    def rows(self) -> list[dict[str, Any]]:
        """Return one row per use."""
        uses = ("useful", "waiting", "starting", "unassigned", "paused", "between_steps", "leaving", "again")
        return [
            {
                "use": name.replace("_", " "),
                "node_seconds": getattr(self, name),
                "share": getattr(self, name) / self.offered,
            }
            for name in uses
        ]


def draw_up(
    run: RunState,
    entries: Iterable[JournalEntry],
    history: Sequence[Mapping[str, Any]],
    *,
    begin: float,
    end: float,
    least: float,
    useful: float,
) -> Account:
    """Summarize a run between two times, seconds since the epoch.

    Parameters
    ----------
    run, entries, history
        The run, its journal, and the jobs on each node.
    least
        Shorter windows do not count, and training in them is subtracted from `useful`.
    useful
        Node-seconds in steps that count, as reported by the training jobs.
    """
    joined = _joined(entries, end)
    fragments = defaultdict(list)
    for fragment in run.fragments:
        for node in fragment.nodes:
            fragments[node].append((fragment.start, min(fragment.end or end, end)))
    blocks = defaultdict(list)
    for stay in history:
        if stay["kind"] == "preemptible":
            blocks[stay["node"]].append((stay["start"], min(stay["end"] or end, end)))
    account = Account(useful=useful)
    trained = 0.0
    for node, span in _windows(history, begin, end):
        held, there, in_training = (_within(spans[node], span) for spans in (blocks, joined, fragments))
        if span[1] - span[0] < least:
            account.useful -= _length(in_training)
            continue
        account.windows.append((node, span[0] - begin, span[1] - begin))
        account.offered += span[1] - span[0]
        trained += _length(in_training)
        first = min((start for start, _ in held), default=span[1])
        account.waiting += first - span[0]
        account.again += span[1] - first - _length(held)
        for block in held:
            here = _within(there, block)
            first_slot = min((start for start, _ in here), default=block[1])
            account.starting += first_slot - block[0]
            account.starts.append(first_slot - block[0])
            account.leaving += block[1] - first_slot - _length(here)
        account.unassigned += _length(there) - _length(in_training)
    pauses = [(fragment.paused, len(fragment.nodes)) for fragment in run.fragments if fragment.in_place]
    account.paused = sum(seconds * nodes for seconds, nodes in pauses)
    account.between_steps = trained - account.useful - account.paused
    return account


def _windows(history: Sequence[Mapping[str, Any]], begin: float, end: float) -> Iterator[tuple[str, Span]]:
    """List the periods in which each node had no main job."""
    for node in sorted({stay["node"] for stay in history}):
        free_from = begin
        busy = [
            (stay["start"], stay["end"] or end) for stay in history if stay["node"] == node and stay["kind"] == "main"
        ]
        for start, stop in [*sorted(busy), (end, end)]:
            if min(start, end) > free_from:
                yield node, (free_from, min(start, end))
            free_from = max(free_from, stop)


def _joined(entries: Iterable[JournalEntry], end: float) -> dict[str, list[Span]]:
    """List the periods in which each node had slots."""
    joined: dict[str, list[Span]] = defaultdict(list)
    since: dict[str, float] = {}
    for entry in entries:
        if entry.kind == "node_joined":
            since[entry.subject] = entry.time
        elif entry.kind == "node_left" and entry.subject in since:
            joined[entry.subject].append((since.pop(entry.subject), entry.time))
    for node, time in since.items():
        joined[node].append((time, end))
    return joined


def _within(spans: Iterable[Span], bounds: Span) -> list[Span]:
    cut = ((max(start, bounds[0]), min(end, bounds[1])) for start, end in spans)
    return [(start, end) for start, end in cut if start < end]


def _length(spans: Iterable[Span]) -> float:
    return sum(end - start for start, end in spans)
