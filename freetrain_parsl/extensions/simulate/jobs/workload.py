"""Reader of workloads: which jobs are submitted when. An error in a CSV file names the file and the line."""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from freetrain_parsl.errors import InvalidInput, did_you_mean
from freetrain_parsl.planning.model import CostsInSeconds

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from freetrain_parsl.extensions.simulate.application import Application

__all__ = ["CsvRow", "JobRequest", "read_rows", "read_workload"]

_COSTS = CostsInSeconds(up=30.0, down=30.0, start=30.0)  # as in Pollux' simulator
_COLUMNS = ("name", "time", "application", "num_replicas", "batch_size")


@dataclass(frozen=True)
class CsvRow:
    """A line of a file: column -> text."""

    file: Path
    line: int
    values: Mapping[str, str]

    def wrong(self, problem: str) -> InvalidInput:
        """Make the error for this line."""
        return InvalidInput(f"{self.file}:{self.line}: {problem}")

    def text(self, column: str) -> str:
        """Return a text that is not empty."""
        if not (text := self.values[column].strip()):
            raise self.wrong(f"{column!r} is empty")
        return text

    def number(self, column: str, *, positive: bool = False) -> float:
        """Return a finite number of zero or more, or a positive one."""
        text = self.values[column]
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not math.isfinite(number) or number < 0 or (positive and number == 0):
            raise self.wrong(f"{column!r} must be {'a positive number' if positive else 'zero or more'}, got {text!r}")
        return number

    def count(self, column: str) -> int:
        """Return an integer of at least one."""
        number = self.number(column, positive=True)
        if number != int(number):
            raise self.wrong(f"{column!r} must be an integer, got {self.values[column]!r}")
        return int(number)


def read_rows(file: Path, columns: Sequence[str]) -> Iterator[CsvRow]:
    """Yield the lines of a CSV file after its header, which must contain `columns`.

    Raises
    ------
    InvalidInput
        The file cannot be read, its header lacks a column, or a line has another number of values.
    """
    try:
        with file.open(encoding="utf-8", newline="") as stream:
            reader = csv.reader(stream, strict=True)
            header = [name.strip() for name in next(reader, [])]
            missing = [name for name in columns if name not in header]
            if missing:
                raise InvalidInput(f"{file}:1: the header lacks {', '.join(missing)}; expected {','.join(columns)}")
            for values in reader:
                if not values:
                    continue
                if len(values) != len(header):
                    raise InvalidInput(f"{file}:{reader.line_num}: expected {len(header)} values, got {len(values)}")
                yield CsvRow(file, reader.line_num, dict(zip(header, values, strict=True)))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or error
        raise InvalidInput(f"{file}: cannot be read: {reason}") from error


@dataclass(frozen=True)
class JobRequest:
    """A job as its user submits it; it asks for `gpus` and a global `batch`, and runs on `least` GPUs or more."""

    name: str
    time: float
    application: Application
    gpus: int
    batch: int
    least: int = 1
    costs: CostsInSeconds = _COSTS


def read_workload(file: Path, applications: Mapping[str, Application], gpus: int) -> tuple[JobRequest, ...]:
    """Read a workload for a cluster of so many GPUs, ordered by submission.

    The file is CSV with the columns ``name,time,application,num_replicas,batch_size``.

    Raises
    ------
    InvalidInput
        The file cannot be read or contains something invalid; the message names the file and the line.
    """
    jobs: dict[str, JobRequest] = {}
    for row in read_rows(file, _COLUMNS):
        name, wanted = row.text("name"), row.text("application")
        if name in jobs:
            raise row.wrong(f"a job {name!r} already exists; names must be unique")
        application = applications.get(wanted)
        if application is None:
            known = ", ".join(sorted(applications))
            raise row.wrong(f"unknown application {wanted!r}{did_you_mean(wanted, applications)}; available: {known}")
        job = JobRequest(name, row.number("time"), application, row.count("num_replicas"), row.count("batch_size"))
        if job.gpus > gpus:
            raise row.wrong(f"job {name!r} asks for {job.gpus} GPUs, the cluster has {gpus}")
        if job.batch > application.limits.largest:
            raise row.wrong(
                f"job {name!r}: batch {job.batch} is more than the {application.limits.largest} of {wanted!r}"
            )
        jobs[name] = job
    if not jobs:
        raise InvalidInput(f"{file}: contains no jobs")
    return tuple(sorted(jobs.values(), key=lambda job: job.time))
