"""Sweeps of four in the manner of PyTorch's examples: ``fuse="auto"``, its probing included, against one by one.

Use ``--quick`` for short jobs, ``--json FILE`` to save the figures. *Auto* and *alone* are the processor time of the
four training jobs in this process, the shortest of several turns, in which both ways alternate; *ratio* is the second
over the first. *Way* says what ``auto`` has decided, `probing` if the jobs ended before that. What starting processes
takes is left out: four one by one, an array for all, and four more if it does not fuse.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from _report import report

from freetrain_parsl.extensions.fusion.slot.sizing import ArraySizing
from tests.extensions.fusion.sweep_trainings import alone, together
from tests.extensions.fusion.test_habits import HABITS

if TYPE_CHECKING:
    from collections.abc import Callable

MEMBERS = 4


def measured(work: Callable[[], Any]) -> tuple[float, Any]:
    before = time.process_time()
    result = work()
    return time.process_time() - before, result


def sweep(root: Path, function: Callable[..., Any], epochs: int, turns: int) -> dict[str, Any]:
    """Return the times of both ways, and what was decided."""
    points = [{"lr": 0.01 * (number + 1), "epochs": epochs} for number in range(MEMBERS)]
    fused, single, way = [], [], ""

    def one_by_one(turn: int) -> None:
        for number, point in enumerate(points):
            alone(root / f"alone-{turn}", str(number), point, function)

    for turn in range(turns):
        sizing = ArraySizing(MEMBERS)
        seconds, outcome = measured(lambda: together(root / f"auto-{turn}", points, function, sizing=sizing))  # noqa: B023 - called at once
        for number in range(MEMBERS):
            outcome.value(str(number))  # raises what it has raised
        fused.append(seconds)
        single.append(measured(lambda: one_by_one(turn))[0])  # noqa: B023 - called at once
        way = ("fused" if sizing.fused else "one by one") if sizing.decided else "probing"
        gain = sizing.gain
    return {"auto": min(fused), "alone": min(single), "ratio": min(single) / min(fused), "gain": gain, "way": way}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--habits", nargs="+", choices=HABITS, default=list(HABITS))
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    rows = []
    with tempfile.TemporaryDirectory() as root:  # the first training job of a process imports what all need, for 2 s
        alone(Path(root), "first", {"lr": 0.01, "epochs": 1}, HABITS["gcn"])
    for habit in options.habits:
        with tempfile.TemporaryDirectory() as root:
            epochs, turns = (4, 1) if options.quick else (options.epochs, options.turns)
            rows.append({"habit": habit, **sweep(Path(root), HABITS[habit], epochs, turns)})
    report("Habits in arrays of four", rows, ["torch", "freetrain-parsl"], options.json)


if __name__ == "__main__":
    main()
