"""Open a recorded log, of whatever kind, as holes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from freetrain_parsl.cluster.swf import SwfLog
from freetrain_parsl.errors import InvalidInput, InvalidSettings
from freetrain_parsl.replay.holes import numbered_lines
from freetrain_parsl.replay.idle_log import IDLE_HEADER, IdleLog
from freetrain_parsl.replay.job_log import JobLog, RecordedJob
from freetrain_parsl.replay.sacct import SacctLog, is_sacct_header

if TYPE_CHECKING:
    from collections.abc import Iterator
    from os import PathLike

    from freetrain_parsl.replay.holes import HoleLog

__all__ = ["open_log"]


def open_log(
    path: str | PathLike[str],
    *,
    nodes: int | None = None,
    lenient: bool = False,
    mask_idle_above: float | None = None,
    mask_longer_than: float = 3 * 3600.0,
) -> HoleLog:
    """Open an idle log (``node,start,end``), a job log in Standard Workload Format, or the text of ``sacct``.

    Parameters
    ----------
    path
        The log; unpacked if its name ends in ``.gz``. ``.csv`` and ``.swf`` say what it is, otherwise its first
        line does.
    nodes
        Size of the machine; ``None`` to take it from the log.
    lenient
        Skip what is malformed and count it in `HoleLog.skipped`, instead of refusing the log.
    mask_idle_above
        Leave out the times at which at least this share of the machine, 0 to 1, is idle for `mask_longer_than`
        seconds or more without a break: such times look like outages. ``None`` to leave out nothing.

    Raises
    ------
    InvalidInput
        The log cannot be read, is of no known kind or malformed, or does not tell the machine's size.
    InvalidSettings
        A parameter is out of range.
    """
    if nodes is not None and nodes < 1:
        raise InvalidSettings(f"a machine has at least one node, got {nodes}")
    if mask_idle_above is not None and not 0 < mask_idle_above <= 1:
        raise InvalidSettings(
            f"the share of idle nodes that looks like an outage lies in (0, 1], got {mask_idle_above}"
        )
    log = _open(Path(path), nodes, lenient=lenient)
    if mask_idle_above is not None:
        spans = log.table.spans_above(mask_idle_above * log.nodes, mask_longer_than)
        log.table = log.table.without(spans)
        if not len(log.table):
            raise InvalidInput(f"{path}: nothing but times that look like outages; raise the share that does")
    return log


def _open(path: Path, nodes: int | None, *, lenient: bool) -> IdleLog | JobLog:
    kind = path.with_suffix("") if path.suffix == ".gz" else path
    if kind.suffix == ".csv":
        return IdleLog(path, nodes=nodes, lenient=lenient)
    if kind.suffix == ".swf":
        return _open_swf(path, nodes, lenient=lenient)
    first = next((text for _, text in numbered_lines(path) if not text.startswith("#")), "")
    if is_sacct_header(first):
        return _open_sacct(path, nodes, lenient=lenient)
    if first.startswith(";") or len(first.split()) == 18:
        return _open_swf(path, nodes, lenient=lenient)
    if first.count(",") == 2:
        return IdleLog(path, nodes=nodes, lenient=lenient)
    raise InvalidInput(
        f"{path}: of no known kind; give an idle log (CSV {IDLE_HEADER}), a job log (.swf), or what "
        "'sacct -a -X -P -o JobID,Submit,Start,End,NNodes,Timelimit,State,NodeList' prints"
    )


def _open_swf(path: Path, nodes: int | None, *, lenient: bool) -> JobLog:
    swf = SwfLog(path, lenient=lenient)

    def jobs() -> Iterator[RecordedJob]:
        for job in swf:
            start = job.submit + job.wait
            where = f"{path}, job {job.number}"
            yield RecordedJob(where, job.submit, start, start + job.run, job.nodes, job.requested_time)

    log = JobLog(path.name, jobs(), swf.nodes if nodes is None else nodes, lenient=lenient)
    log.skipped += swf.malformed
    return log


def _open_sacct(path: Path, nodes: int | None, *, lenient: bool) -> JobLog:
    if nodes is None:
        raise InvalidInput(
            f"{path}: 'sacct' does not tell the size of the machine; give the number of its nodes, "
            "as 'sinfo -h -o %D' prints it"
        )
    text = SacctLog(path, lenient=lenient)
    log = JobLog(path.name, text, nodes, lenient=lenient)
    log.skipped += text.malformed
    return log
