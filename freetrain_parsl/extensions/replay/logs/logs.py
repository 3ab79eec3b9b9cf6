"""Open recorded logs of any kind as holes, if asked without the times that look like outages."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from freetrain_parsl.cluster.swf import SwfLog
from freetrain_parsl.errors import InvalidInput, InvalidSettings
from freetrain_parsl.extensions.replay.holes import Change, HoleLog, numbered_lines
from freetrain_parsl.extensions.replay.logs.idle_log import IDLE_HEADER, IdleLog
from freetrain_parsl.extensions.replay.logs.job_log import JobLog, RecordedJob
from freetrain_parsl.extensions.replay.logs.sacct import SacctLog, is_sacct_header
from freetrain_parsl.windows.hostlist import expand_hosts

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from os import PathLike

__all__ = ["LogWithoutOutages", "open_log", "read_jobs", "where_named"]

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_FIRST_YEAR = 1980  # no job log is older
_MOST_NODES = 1_000_000  # more than any cluster has


class LogWithoutOutages(HoleLog):
    """A log from which spans of time are removed, so that they do not affect any mean.

    The clock of this log is stopped during a span: its length, and every figure that is a time or a share of time,
    refers to the remaining time. A node that was idle before and after a span closes and opens at that instant.
    Spans are (start, end) on that log's clock, in order and disjoint; no node may be idle in them.
    """

    def __init__(self, log: HoleLog, spans: Sequence[tuple[float, float]]) -> None:
        self._log = log
        self._starts = [start for start, _ in spans]
        self._resumes = [log.start, *(end for _, end in spans)]
        """Times of the original clock at the beginning and after each span."""
        self._offsets = [log.start]
        """The corresponding times of this log's clock."""
        for start, resumed in zip(self._starts, self._resumes, strict=False):
            self._offsets.append(self._offsets[-1] + (start - resumed))
        self.name, self.nodes = log.name, log.nodes
        self.start, self.end = log.start, self._time(log.end)
        self.skipped, self.clipped, self.zero_length = log.skipped, log.clipped, log.zero_length
        self.has_forecasts, self.date = log.has_forecasts, log.date
        self.masked = tuple(
            (offset - self.start, end - start) for offset, (start, end) in zip(self._offsets[1:], spans, strict=True)
        )

    def changes(self, *, forecasts: bool = False) -> Iterator[Change]:
        """Yield the changes; see `HoleLog.changes`."""
        pending: Change | None = None
        for change in self._log.changes(forecasts=forecasts):
            if self._is_inside(change.time):
                continue
            moved = self._moved(change)
            if pending is not None and pending.time < moved.time:
                yield pending
            elif pending is not None:  # a span was removed at this instant: merge the changes at its start and end
                moved = replace(moved, opened=pending.opened + moved.opened, closed=pending.closed + moved.closed)
            pending = moved
        if pending is not None and pending.time < self.end:
            yield pending

    def _moved(self, change: Change) -> Change:
        now = self._time(change.time)
        opened = tuple(replace(hole, start=now, end=self._time(hole.end)) for hole in change.opened)
        if change.expected is None:
            return replace(change, time=now, opened=opened)
        later = math.nextafter(now, math.inf)
        expected = {
            node: None if closes is None else max(later, self._time(closes)) for node, closes in change.expected.items()
        }
        return replace(change, time=now, opened=opened, expected=expected)

    def _is_inside(self, time: float) -> bool:
        number = bisect_right(self._starts, time)
        return number > 0 and self._starts[number - 1] < time < self._resumes[number]

    def _time(self, time: float) -> float:
        """Convert a time of the original clock to this log's."""
        number = bisect_right(self._resumes, time) - 1
        if number < 0:
            return time
        moved = self._offsets[number] + (time - self._resumes[number])
        return min(moved, self._offsets[number + 1]) if number + 1 < len(self._offsets) else moved


def open_log(
    path: str | PathLike[str],
    *,
    nodes: int | None = None,
    lenient: bool = False,
    processors_per_node: int | None = None,
    partition: str | None = None,
    mask_idle_above: float | None = None,
    mask_longer_than: float = 3 * 3600.0,
) -> HoleLog:
    """Open an idle log (``node,start,end``), a job log in Standard Workload Format, or the text of ``sacct``.

    Parameters
    ----------
    path
        The log; decompressed if its name ends in ``.gz``. The suffixes ``.csv`` and ``.swf`` determine its format,
        otherwise its first line does.
    nodes
        Size of the machine; ``None`` to take it from the log.
    lenient
        Skip malformed lines and count them in `HoleLog.skipped` instead of rejecting the log.
    processors_per_node
        For a job log in Standard Workload Format, which counts processors; ``None`` to take it from its header.
    partition
        For a job log in Standard Workload Format: read only the jobs of this partition, by number or name. `nodes` is
        then the size of the partition, and must be given.
    mask_idle_above
        Remove times at which at least this share of the machine, 0 to 1, is idle for `mask_longer_than` seconds or
        more without interruption: such times look like outages. They are excluded from all figures, and the log is
        shorter by them. ``None`` to remove nothing.

    Raises
    ------
    InvalidInput
        The log cannot be read, has an unknown format or is malformed, or does not contain the machine's size.
    InvalidSettings
        A parameter is out of range.
    """
    if nodes is not None and nodes < 1:
        raise InvalidSettings(f"a machine must have at least one node, got {nodes}")
    if nodes is not None and nodes > _MOST_NODES:
        raise InvalidSettings(f"a machine may have up to {_MOST_NODES:,} nodes, got {nodes:,}")
    if mask_idle_above is not None and not 0 < mask_idle_above <= 1:
        raise InvalidSettings(
            f"the share of idle nodes that looks like an outage must be in (0, 1], got {mask_idle_above}"
        )
    if processors_per_node is not None and processors_per_node < 1:
        raise InvalidSettings(f"a node must have at least one processor, got {processors_per_node}")
    path = Path(path)
    kind = _kind(path)
    if kind == "swf":
        log: IdleLog | JobLog = _open_swf(path, nodes, processors_per_node, partition, lenient=lenient)
    elif processors_per_node is not None or partition is not None:
        raise InvalidSettings(
            f"{path}: processors per node and partition are for job logs in Standard Workload Format; "
            "other logs list nodes (with sacct, select a partition with 'sacct -r NAME')"
        )
    elif kind == "idle":
        log = IdleLog(path, nodes=nodes, lenient=lenient)
    else:
        log = _open_sacct(path, nodes, lenient=lenient)
    if mask_idle_above is None:
        return log
    spans = log.table.spans_above(mask_idle_above * log.nodes, mask_longer_than)
    log.table = log.table.without(spans)
    if not len(log.table):
        raise InvalidInput(f"{path}: the whole log looks like an outage; raise the share of idle nodes that does")
    return LogWithoutOutages(log, spans) if spans else log


def read_jobs(path: str | PathLike[str], *, lenient: bool = False) -> Iterator[RecordedJob]:
    """Yield the jobs of a log in Standard Workload Format, or of the text of ``sacct``, without placing them on nodes.

    Raises
    ------
    InvalidInput
        The log cannot be read, is malformed, or is no job log.
    """
    path = Path(path)
    kind = _kind(path)
    if kind == "idle":
        raise InvalidInput(f"{path}: is an idle log; give a job log: the output of 'sacct', or a .swf file")
    if kind == "swf":
        return _swf_jobs(path, SwfLog(path, lenient=lenient))
    return iter(SacctLog(path, lenient=lenient))


def where_named(path: Path, node: str) -> str | None:
    """Return file and line in which a log first names a node; ``None`` if it does not."""
    if _kind(path) == "idle":
        lines = ((number, text.partition(",")[0].strip()) for number, text in numbered_lines(path))
        return next((f"{path}:{number}" for number, name in lines if name == node), None)
    jobs = (job for job in read_jobs(path, lenient=True) if job.hosts is not None)
    return next((job.where for job in jobs if node in expand_hosts(job.hosts or "")), None)


def _swf_jobs(path: Path, swf: SwfLog) -> Iterator[RecordedJob]:
    for job in swf:
        start = job.submit + job.wait
        where = f"{path}, job {job.number}"
        yield RecordedJob(where, job.submit, start, start + job.run, job.nodes, job.requested_time)


def _kind(path: Path) -> Literal["idle", "swf", "sacct"]:
    """Determine a log's format from its name or else from its first line."""
    plain = path.with_suffix("") if path.suffix == ".gz" else path
    if plain.suffix == ".csv":
        return "idle"
    if plain.suffix == ".swf":
        return "swf"
    first = next((text for _, text in numbered_lines(path) if not text.startswith("#")), "")
    if is_sacct_header(first):
        return "sacct"
    if first.startswith(";") or len(first.split()) == 18:
        return "swf"
    if first.count(",") == 2:
        return "idle"
    raise InvalidInput(
        f"{path}: unknown format; give an idle log (CSV {IDLE_HEADER}), a job log (.swf), or the output of "
        "'sacct -a -X -P -o JobID,Submit,Start,End,NNodes,Timelimit,State,NodeList'"
    )


def _open_swf(
    path: Path, nodes: int | None, processors_per_node: int | None, partition: str | None, *, lenient: bool
) -> JobLog:
    swf = SwfLog(path, lenient=lenient, processors_per_node=processors_per_node, partition=partition)
    if partition is not None and nodes is None:
        raise InvalidInput(
            f"{path}: its header has only the size of the whole machine; give the number of nodes of partition "
            f"{partition!r}"
        )

    size = swf.nodes if nodes is None else nodes
    log = JobLog(path.name, _swf_jobs(path, swf), size, lenient=lenient, epoch=_swf_epoch(swf))
    if log.date is not None and log.date.year < _FIRST_YEAR:
        log.date = None  # UnixStartTime is 0 and times do not count from 1970
    log.skipped += swf.malformed
    return log


def _swf_epoch(swf: SwfLog) -> datetime | None:
    """Return the date of zero on the log's clock, UTC."""
    text = swf.header.get("UnixStartTime", "").split()
    try:
        return _EPOCH + timedelta(seconds=float(text[0])) if text else None
    except (ValueError, OverflowError):  # not a number or not a date
        return None


def _open_sacct(path: Path, nodes: int | None, *, lenient: bool) -> JobLog:
    if nodes is None:
        raise InvalidInput(
            f"{path}: 'sacct' does not report the size of the machine; give the number of its nodes "
            "with --nodes (with --site: nodes=…), as printed by 'sinfo -h -o %D'"
        )
    text = SacctLog(path, lenient=lenient)
    log = JobLog(path.name, text, nodes, lenient=lenient, epoch=_EPOCH.replace(tzinfo=None))
    log.skipped += text.malformed
    return log
