"""Check the result of a training job, regardless of the faults during it."""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch

from freetrain_parsl.executor.journal import read_kinds
from freetrain_parsl.protocol.journal import Assign, FragmentEnded, Grow, Shrink
from freetrain_parsl.training.fragment import run_local
from tests.support.chaos.trainings import BATCH, Subject, train

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

__all__ = ["problems_of", "reference", "unexplained_failures"]

_LOSS_TOLERANCE = 0.15  # relative: replicas draw other dropout masks without deterministic=True
_ROUNDING = 1e-9  # absolute: of parameters in float64, with gradients that are summed in another order
_LOSS_ROUNDING = 1e-6  # relative
_STATISTICS_TOLERANCE = 0.15  # relative: running statistics are those of the local parts of each batch


@cache
def reference(subject: Subject, epochs: int, samples: int) -> dict[str, Any]:
    """Train without faults, in this process, and return the saved result.

    Uses one thread, as the slots do: the number of threads affects the exact bits.
    """
    with TemporaryDirectory(prefix="freetrain-reference-") as directory:
        out = Path(directory) / "out.pt"
        arguments = {**subject.arguments(epochs, samples), "pace": 0.0, "leak": 0, "sharded": False}
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            run_local(train.func, seed=subject.seed, out=str(out), **arguments)
        finally:
            torch.set_num_threads(threads)
        return _load(out)


def problems_of(subject: Subject, out: Path, epochs: int, samples: int) -> list[str]:
    """List the problems of a training job's saved result, one line each.

    Parameters
    ----------
    subject
        The training job.
    out
        File with its saved result.
    epochs, samples
        Its arguments.
    """
    if not out.exists():
        return [f"{subject.name}: saved no result"]
    got, expected = _load(out), reference(subject, epochs, samples)
    problems = _miscounted(got["model"]["counts"])
    steps = epochs * samples // BATCH
    metrics = got["metrics"]
    if (metrics["steps"], metrics["samples"]) != (steps, epochs * samples):
        problems.append(f"metrics count {metrics['steps']} steps and {metrics['samples']} samples")
    if [row["lr"] for row in metrics["history"]] != [row["lr"] for row in expected["metrics"]["history"]]:
        problems.append("the learning rate schedule differs")
    if subject.deterministic or subject.sharded:
        problems += _different(got["model"], expected["model"], 0.0 if subject.deterministic else _ROUNDING)
    if subject.sharded:
        ours, theirs = ([row["loss"] for row in one["metrics"]["history"]] for one in (got, expected))
        if not torch.allclose(torch.tensor(ours), torch.tensor(theirs), rtol=_LOSS_ROUNDING, atol=0.0):
            problems.append(f"losses {ours}, undisturbed {theirs}")
    elif not subject.deterministic:
        ours, theirs = metrics["history"][-1]["loss"], expected["metrics"]["history"][-1]["loss"]
        if abs(ours - theirs) > _LOSS_TOLERANCE * abs(theirs):
            problems.append(f"final loss {ours:.4f}, undisturbed {theirs:.4f}")
    return [f"{subject.name}: {problem}" for problem in problems]


def unexplained_failures(journal: Path, hit: Collection[str]) -> list[str]:
    """List the groups of training jobs that have failed although no fault has hit their units, one line each.

    Parameters
    ----------
    journal
        The journal of a driver.
    hit
        The units that faults have hit: nodes, or slots of shared ones.
    """
    try:
        entries = list(read_kinds(journal, [Assign, Grow, Shrink, FragmentEnded]))
    except sqlite3.OperationalError as error:
        if "no such table" not in str(error):
            raise
        return []  # its driver was killed before it had made any
    problems, units = [], defaultdict(set)
    assigned: dict[str, Sequence[str]] = {}
    for entry in entries:
        match entry.record:
            case Assign(subject=job, nodes=nodes) | Grow(subject=job, nodes=nodes) | Shrink(subject=job, nodes=nodes):
                assigned[job] = nodes
                units[job].update(nodes)  # a newcomer there may fail, and the group that it joins with it
            case FragmentEnded(subject=job, nodes=nodes, failure=failure):
                units[job].update(nodes)
                if failure and units[job].isdisjoint(hit):
                    problems.append(f"{job}: failed on {', '.join(sorted(units[job]))}, which no fault has hit")
                units[job] = set(assigned.get(job, ()))
    return problems


def _miscounted(counts: torch.Tensor) -> list[str]:
    problems = []
    for epoch, row in enumerate(-counts.double()):
        missing, repeated = int((row < 0.5).sum()), int((row > 1.5).sum())
        inexact = int(((row - 1).abs() > 1e-3).sum()) - missing - repeated
        if missing or repeated or inexact:
            problems.append(f"epoch {epoch}: {missing} samples missing, {repeated} repeated, {inexact} partial")
    return problems


def _different(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], rounding: float) -> list[str]:
    problems = []
    for name, expected in theirs.items():
        difference = (ours[name].double() - expected.double()).abs().max().item()
        is_statistic = "running" in name
        limit = _STATISTICS_TOLERANCE * (expected.double().abs().max().item() + 0.1) if is_statistic else rounding
        if difference > limit and not name.endswith("num_batches_tracked"):
            problems.append(f"{name} differs by {difference:.3g} from the undisturbed run")
    return problems


def _load(path: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(path, weights_only=True)
    return state
