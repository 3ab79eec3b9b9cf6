"""Reader of a directory of profiles: applications, their times of a step, and their statistical efficiency."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from freetrain_parsl.errors import InvalidInput, did_you_mean
from freetrain_parsl.extensions.goodput.curve import BatchLimits
from freetrain_parsl.extensions.simulate.application import Application, Efficiency
from freetrain_parsl.extensions.simulate.jobs.step_times import MeasuredStepTimes, Measurement
from freetrain_parsl.extensions.simulate.jobs.workload import CsvRow, read_rows

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from pathlib import Path

__all__ = ["read_profiles"]

_LIMITS = ("epochs", "init_batch", "max_batch", "min_local_batch", "max_local_batch")
_THROUGHPUT = ("application", "nodes", "gpus", "placement", "local_batch", "step_time", "sync_time")
_EFFICIENCY = ("application", "batch", "epoch", "progress", "iterations", "grad_sqr", "grad_var")


def read_profiles(directory: Path) -> dict[str, Application]:
    """Read ``applications.csv``, ``throughput.csv`` and ``efficiency.csv``.

    Returns
    -------
    dict
        Name -> application.

    Raises
    ------
    InvalidInput
        A file cannot be read, or contains something invalid; the message names the file and the line.
    """
    limits = _read_applications(directory / "applications.csv")
    times = _by_application(directory / "throughput.csv", _THROUGHPUT, limits)
    worths = _by_application(directory / "efficiency.csv", _EFFICIENCY, limits)
    return {
        name: Application(
            name,
            epochs=row.count("epochs"),
            limits=BatchLimits(*(row.count(column) for column in _LIMITS[1:])),
            step_times=_step_times(row, times.get(name, ()), directory / "throughput.csv"),
            efficiency=_efficiency(row, worths.get(name, ()), directory / "efficiency.csv"),
        )
        for name, row in limits.items()
    }


def _read_applications(file: Path) -> dict[str, CsvRow]:
    rows: dict[str, CsvRow] = {}
    for row in read_rows(file, ("application", *_LIMITS)):
        name = row.text("application")
        if name in rows:
            raise row.wrong(f"application {name!r} is listed already; names must be unique")
        for least, most in (("init_batch", "max_batch"), ("min_local_batch", "max_local_batch")):
            if row.count(least) > row.count(most):
                raise row.wrong(f"{least!r} ({row.count(least)}) is more than {most!r} ({row.count(most)})")
        row.count("epochs")
        rows[name] = row
    if not rows:
        raise InvalidInput(f"{file}: contains no applications")
    return rows


def _by_application(file: Path, columns: Sequence[str], known: Collection[str]) -> dict[str, list[CsvRow]]:
    rows: dict[str, list[CsvRow]] = defaultdict(list)
    for row in read_rows(file, columns):
        name = row.text("application")
        if name not in known:
            raise row.wrong(f"unknown application {name!r}{did_you_mean(name, known)}")
        rows[name].append(row)
    return rows


def _step_times(application: CsvRow, rows: Sequence[CsvRow], file: Path) -> MeasuredStepTimes:
    name = application.text("application")
    measurements = [_measurement(row) for row in rows]
    alone = [(m.local_batch, row) for m, row in zip(measurements, rows, strict=True) if m.gpus == 1]
    if not alone:
        where = f"{file}:{rows[0].line}" if rows else str(file)
        raise InvalidInput(f"{where}: application {name!r} has no times on one GPU; add them")
    smallest, row = min(alone, key=lambda item: item[0])
    if smallest > application.count("min_local_batch"):
        raise row.wrong(
            f"application {name!r}: its times on one GPU begin at {smallest} samples; "
            f"add one at its min_local_batch, {application.count('min_local_batch')}"
        )
    return MeasuredStepTimes(measurements)


def _measurement(row: CsvRow) -> Measurement:
    nodes, gpus = row.count("nodes"), row.count("gpus")
    digits = row.values["placement"].strip()
    placement = None
    if digits:
        if not digits.isdecimal() or "0" in digits:
            raise row.wrong(f"'placement' is a digit of 1 to 9 for each node, or empty, got {digits!r}")
        placement = tuple(map(int, digits))
        if (len(placement), sum(placement)) != (nodes, gpus):
            raise row.wrong(f"placement {digits}: nodes must be {len(placement)} and gpus {sum(placement)}")
    step, sync = row.number("step_time", positive=True), row.number("sync_time")
    if sync >= step:
        raise row.wrong(f"'sync_time' is part of 'step_time' and must be less, got {sync:g} of {step:g} s")
    return Measurement(nodes, gpus, placement, row.count("local_batch"), step, sync)


def _efficiency(application: CsvRow, rows: Sequence[CsvRow], file: Path) -> Efficiency:
    name, epochs = application.text("application"), application.count("epochs")
    by_batch: dict[int, dict[int, CsvRow]] = defaultdict(dict)
    for row in rows:
        batch, epoch = row.count("batch"), row.count("epoch")
        if epoch in by_batch[batch]:
            raise row.wrong(f"epoch {epoch} of batch {batch} is listed already")
        by_batch[batch][epoch] = row
    if not by_batch:
        raise InvalidInput(f"{file}: application {name!r} has no efficiency; add its lines")
    for batch, trained in by_batch.items():
        _check_epochs(trained, epochs, f"application {name!r}, batch {batch}")
    batches = sorted(by_batch)

    def table(column: str, *, positive: bool = False) -> np.ndarray:
        return np.array(
            [[by_batch[b][e].number(column, positive=positive) for b in batches] for e in range(1, epochs + 1)]
        )

    return Efficiency(
        np.array(batches, dtype=float),
        table("progress", positive=True),
        table("iterations", positive=True),
        table("grad_sqr"),
        table("grad_var"),
    )


def _check_epochs(trained: Mapping[int, CsvRow], epochs: int, who: str) -> None:
    """Reject a training job that lacks an epoch or does not progress."""
    for epoch in range(1, epochs + 1):
        if epoch not in trained:
            nearest = trained[min(trained, key=lambda other: abs(other - epoch))]
            raise nearest.wrong(f"{who}: epoch {epoch} of {epochs} is missing; add its line")
    for before, after in pairwise(trained[epoch] for epoch in range(1, epochs + 1)):
        if after.number("progress") <= before.number("progress"):
            raise after.wrong(f"{who}: 'progress' must increase, got {after.values['progress']}")
