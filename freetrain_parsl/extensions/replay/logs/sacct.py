"""Reader of the output of ``sacct -a -X -P -o JobID,Submit,Start,End,NNodes,Timelimit,State,NodeList``.

Times are local, without a zone: with ``TZ=UTC sacct …`` no hour is missing or repeated when clocks change.
"""

from __future__ import annotations

import math
import re
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from freetrain_parsl.errors import InvalidInput
from freetrain_parsl.extensions.replay.holes import numbered_lines
from freetrain_parsl.extensions.replay.logs.job_log import RecordedJob
from freetrain_parsl.windows.hostlist import expand_hosts

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

__all__ = ["SacctLog", "is_sacct_header"]

_REQUIRED = ("JobID", "Submit", "Start", "End", "NNodes", "Timelimit")

_NO_TIME = frozenset({"Unknown", "None", "N/A", ""})
_NO_LIMIT = frozenset({"UNLIMITED", "Partition_Limit", "INVALID", ""})
_NO_HOSTS = frozenset({"None assigned", "None", "(null)", ""})

_LIMIT = re.compile(r"(?:(?P<days>\d+)-)?(?P<clock>\d+(?::\d+){0,2})(?:\.\d+)?")


def is_sacct_header(line: str) -> bool:
    """Return whether a line is the header of such output."""
    return "JobID" in line.split("|")


class SacctLog:
    """The jobs printed by ``sacct``, read line by line on each iteration.

    Columns may be in any order; other columns and steps (``12.batch``) are ignored. If a job is printed again with the
    same start, as in concatenated months, its last line counts; with another start it was requeued and ran again. Jobs
    cancelled before they started are included, because they waited in the queue.

    Raises
    ------
    InvalidInput
        While iterating: the log cannot be read, or a line is malformed.
    """

    def __init__(self, path: Path, *, lenient: bool = False) -> None:
        self._path = path
        self._lenient = lenient
        self.malformed = 0

    def __iter__(self) -> Iterator[RecordedJob]:
        self.malformed = 0
        columns: list[str] = []
        jobs: dict[tuple[str, float | None], RecordedJob] = {}
        for number, text in numbered_lines(self._path):
            fields = [field.strip() for field in text.split("|")]
            if is_sacct_header(text):
                columns = fields
                if missing := [name for name in _REQUIRED if name not in columns]:
                    raise InvalidInput(
                        f"{self._path}:{number}: no column {', '.join(missing)}; "
                        f"print them with 'sacct -a -X -P -o {','.join(_REQUIRED)},State,NodeList'"
                    )
                continue
            try:
                if not columns:
                    raise ValueError("expected the header JobID|Submit|Start|… before it")  # noqa: TRY301
                if len(fields) != len(columns):
                    raise ValueError(f"expected {len(columns)} fields as in the header, got {len(fields)}")  # noqa: TRY301
                row = dict(zip(columns, fields, strict=True))
                if "." not in row["JobID"]:
                    job = _read_job(f"{self._path}:{number}", row)
                    jobs[row["JobID"], job.start] = job
            except ValueError as error:
                if not self._lenient:
                    raise InvalidInput(
                        f"{self._path}:{number}: {error}; fix it, or read leniently to skip such lines"
                    ) from error
                self.malformed += 1
        yield from jobs.values()


def _read_job(where: str, row: Mapping[str, str]) -> RecordedJob:
    """Make a job from a line's fields by column; raise a ValueError that describes what is wrong."""
    submit, start, end = (_time(row[name]) for name in ("Submit", "Start", "End"))
    if submit is None:
        raise ValueError(f"job {row['JobID']} has no time of submission")
    if not row["NNodes"].isdecimal():
        raise ValueError(f"NNodes must be an integer, got {row['NNodes']!r}")
    hosts = None if (text := row.get("NodeList", "")) in _NO_HOSTS else text
    nodes = int(row["NNodes"])
    if hosts is not None:
        nodes = len(expand_hosts(hosts))
    if start is not None and end is not None and end < start:
        raise ValueError(f"job {row['JobID']} ends ({row['End']}) before it starts ({row['Start']})")
    if nodes == 0 or (start == end and not _had_nodes(row, hosts)):
        start, hosts = None, None  # cancelled while pending: sacct prints that time as both
    submit = submit if start is None else min(submit, start)
    return RecordedJob(
        where, submit, start, math.inf if end is None else end, max(1, nodes), _limit(row["Timelimit"]), hosts
    )


def _had_nodes(row: Mapping[str, str], hosts: str | None) -> bool:
    """Return whether a job that ended when it started held nodes: it may have failed immediately."""
    if "NodeList" in row:
        return hosts is not None
    return not row.get("State", "CANCELLED").startswith("CANCELLED")


def _time(text: str) -> float | None:
    """Return the seconds since 1970 of a local time taken as UTC; ``None`` if not set."""
    if text in _NO_TIME:
        return None
    if text.isdecimal():  # SLURM_TIME_FORMAT=%s
        return float(text)
    try:
        return datetime.fromisoformat(text).replace(tzinfo=timezone.utc).timestamp()
    except ValueError:
        raise ValueError(f"expected a time such as 2026-01-31T13:05:00, got {text!r}") from None


def _limit(text: str) -> float | None:
    """Return the seconds of ``days-hours:minutes:seconds``, of which only minutes are required; ``None``: no limit."""
    if text in _NO_LIMIT:
        return None
    match = _LIMIT.fullmatch(text)
    if match is None:
        raise ValueError(f"expected a Timelimit such as 1-12:00:00, got {text!r}")
    parts = [int(part) for part in match["clock"].split(":")]
    if match["days"] is not None:  # D-HH[:MM[:SS]]
        hours, minutes, seconds = [*parts, 0, 0][:3]
    elif len(parts) == 1:
        hours, minutes, seconds = 0, parts[0], 0
    else:  # [HH:]MM:SS
        hours, minutes, seconds = [0, *parts][-3:]
    return float(int(match["days"] or 0) * 86400 + hours * 3600 + minutes * 60 + seconds) or None
