"""Windows of several kinds of nodes of one batch system: one window source for each kind, queried in turn."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from freetrain_parsl.errors import InvalidSettings
from freetrain_parsl.windows.base import BlockState, BlockStatus, Refusal, Survey, WindowSource
from freetrain_parsl.windows.hostlist import show_hosts

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from freetrain_parsl.planning.model import Window

__all__ = ["WindowsByKind"]


class WindowsByKind(WindowSource):
    """Finds the windows of each kind.

    Every source sees all jobs of the batch system, so that any of them can find and cancel our jobs. A node that
    belongs to several kinds counts as one of the first of them.
    """

    def __init__(self, sources: Mapping[str, WindowSource]) -> None:
        self._sources = dict(sources)
        self.first = next(iter(self._sources.values()))
        """The source of the first kind."""

    def survey(self, job_ids: Sequence[str] = ()) -> Survey:
        """Query each kind; the effort is that of all queries."""
        surveys: dict[str, Survey] = {}
        for kind, source in self._sources.items():
            with _named(kind):
                surveys[kind] = source.survey(job_ids)
        windows, shared = _distinct(surveys)
        idle = {node for window in windows for node in window.nodes}
        wanted: dict[str, float] = {}
        for survey in surveys.values():
            for node, start in survey.wanted.items():
                wanted[node] = min(start, wanted.get(node, start))
        counts = {kind: survey.nodes for kind, survey in surveys.items() if survey.nodes is not None}
        return Survey(
            time=max(survey.time for survey in surveys.values()),
            windows=tuple(sorted(windows, key=lambda window: (-len(window.nodes), window.nodes))),
            blocks={job: _status(job, surveys.values()) for job in job_ids},
            terms=next(iter(surveys.values())).terms,
            wanted=wanted,
            notes=tuple([f"{kind}: {note}" for kind, survey in surveys.items() for note in survey.notes] + shared),
            unused={
                node: why for survey in surveys.values() for node, why in survey.unused.items() if node not in idle
            },
            effort=sum(survey.effort for survey in surveys.values()),
            nodes=sum(counts.values()) if len(counts) == len(surveys) else None,
            terms_by_kind={kind: survey.terms for kind, survey in surveys.items()},
            nodes_by_kind=counts,
        )

    def cancel(self, job_ids: Sequence[str]) -> None:
        """Cancel jobs; see `WindowSource.cancel`."""
        self.first.cancel(job_ids)

    def find_jobs(self, prefix: str) -> dict[str, str]:
        """Find live jobs; see `WindowSource.find_jobs`."""
        return self.first.find_jobs(prefix)

    def check(self, least_walltime: float) -> None:
        """Check every kind; see `WindowSource.check`."""
        for kind, source in self._sources.items():
            with _named(kind):
                source.check(least_walltime)

    def explain_refusal(self, complaint: str) -> Refusal:
        """Explain why a submission failed; see `WindowSource.explain_refusal`."""
        return self.first.explain_refusal(complaint)


@contextmanager
def _named(kind: str) -> Iterator[None]:
    """Name the kind in an error about its settings."""
    try:
        yield
    except InvalidSettings as error:
        raise InvalidSettings(f"node kind {kind!r}: {error}") from error


def _distinct(surveys: Mapping[str, Survey]) -> tuple[list[Window], list[str]]:
    """Return the windows with each node once, and notes on the nodes that belong to several kinds."""
    windows: list[Window] = []
    seen: dict[str, str] = {}
    shared: dict[tuple[str, str], list[str]] = {}
    for kind, survey in surveys.items():
        for window in survey.windows:
            own = [node for node in window.nodes if node not in seen]
            for node in window.nodes:
                if seen.get(node, kind) != kind:
                    shared.setdefault((seen[node], kind), []).append(node)
            if own:
                windows.append(replace(window, nodes=tuple(own), node_kind=kind))
        seen |= {node: kind for window in survey.windows for node in window.nodes if node not in seen}
    notes = [
        f"{show_hosts(nodes)}: of the kinds {first!r} and {other!r}, counted as {first!r}"
        for (first, other), nodes in shared.items()
    ]
    return windows, notes


def _status(job: str, surveys: Iterable[Survey]) -> BlockStatus:
    """Return what the first source that knows a job says of it."""
    statuses = [survey.blocks[job] for survey in surveys]
    return next((status for status in statuses if status.state is not BlockState.UNKNOWN), statuses[0])
