"""Pause of a training job when the number of its processes changes, with FreeTrain and with torchrun.

Both train the same net of 21 million parameters with SGD and momentum, one thread per rank, the same global batch, over
gloo on this machine; both go from 2 to 4 to 3 to 2 ranks, alternating, so that the load of the machine is equal.
``ours`` are warm processes that regroup in place on the commands that the executor would send. ``torchrun`` is its
elastic restart: agents of one worker each that join and leave, with the state from a snapshot that the script writes
every 10 steps.

A pause lasts from the end of the last step before to the start of the first step after, on the slowest rank, by the
logs of both scripts; ``steps`` is the same in steps of the old group, ``transfer`` the part in which the members
compare and transfer the state, ``lost`` the number of repeated steps. Below: one of 3 ranks is killed, or hangs, which
starts the pause. Peers notice a dead process; for a hung one, the heartbeat timeout (``--heartbeat-timeout``) is part
of the pause.

``--json FILE`` saves ``pause_s_median``, ``pause_steps_median``, ``torchrun_restart_s_median``, ``ratio`` and the rows.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from _report import report
from _rescale_crew import Crew
from _rescale_elastic import measure_torchrun
from _rescale_net import pause_after, pause_between, read_marks, wait_for_steps

from freetrain_parsl.report.output import write_output
from freetrain_parsl.testing.faults import kill, stop

if TYPE_CHECKING:
    from collections.abc import Iterable

    from _rescale_net import Pause

SIZES = [2, 4, 3, 2]
STEPS = 8  # between two changes
MOST_SECONDS = 1.0
MOST_STEPS = 2.0
LEAST_RATIO = 8.0


@dataclass(frozen=True)
class Change:
    """One change of ours: its cost, and the part spent on the state, in seconds."""

    pause: Pause
    transfer: float


def measure_ours(directory: Path) -> list[Change]:
    """Change the number of members step by step, and measure each change."""
    changes = []
    with Crew(directory, max(SIZES)) as crew:
        since = time.monotonic()
        crew.start(SIZES[0])
        wait_for_steps(directory, SIZES[0], STEPS, since)
        for before, after in pairwise(SIZES):
            ordered = time.monotonic()
            reports = crew.resize(after)
            wait_for_steps(directory, after, STEPS, ordered)
            pause = pause_between(read_marks(directory, since), before, after)
            changes.append(Change(pause, max(told.transferred for told in reports)))
            since = ordered
    return changes


def measure_losses(directory: Path, victim: int, heartbeat_timeout: float) -> dict[str, Change]:
    """Let one of 3 members fail, by SIGKILL and by SIGSTOP; each time a new one replaces it afterwards."""
    changes = {}
    with Crew(directory, 4) as crew:
        since = time.monotonic()
        crew.start(3)
        for name, harm, timeout in (("1 of 3 killed", kill, None), ("1 of 3 hangs", stop, heartbeat_timeout)):
            wait_for_steps(directory, 3, STEPS, since)
            lost = crew.members[victim]
            moment = time.monotonic()
            harm(lost.process.pid)
            reports = crew.lose(lost, timeout)
            wait_for_steps(directory, 2, STEPS, moment)
            pause = pause_after(read_marks(directory, since), 3, 2, moment)
            changes[name] = Change(pause, max(told.transferred for told in reports))
            since = time.monotonic()
            if harm is kill:
                crew.resize(3)
    return changes


def _row(change: str, ours: Iterable[Change], theirs: Iterable[Pause]) -> dict[str, Any]:
    mine, torchrun = list(ours), list(theirs)
    pause = median(one.pause.seconds for one in mine)
    restart = median(one.seconds for one in torchrun) if torchrun else None
    return {
        "change": change,
        "times": len(mine),
        "pause_s": pause,
        "longest_s": max(one.pause.seconds for one in mine),
        "step_s": median(one.pause.step_seconds for one in mine),
        "steps": median(one.pause.seconds / one.pause.step_seconds for one in mine),
        "transfer_s": median(one.transfer for one in mine),
        "lost": max(one.pause.steps_lost for one in mine),
        "torchrun_s": restart,
        "torchrun_lost": max(one.steps_lost for one in torchrun) if torchrun else None,
        "ratio": restart / pause if restart is not None else None,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="number of passes of each side through all sizes")
    parser.add_argument(
        "--heartbeat-timeout", type=float, default=10.0, help="seconds after which a hung member counts as failed"
    )
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    names = [f"{before} -> {after}" for before, after in pairwise(SIZES)]
    ours: dict[str, list[Change]] = defaultdict(list)
    theirs: dict[str, list[Pause]] = defaultdict(list)
    losses: dict[str, list[Change]] = defaultdict(list)
    for number in range(arguments.rounds):
        with tempfile.TemporaryDirectory(prefix="rescale-") as scratch:
            directories = [Path(scratch, name) for name in ("ours", "torchrun", "losses")]
            for directory in directories:
                directory.mkdir()
            for name, change in zip(names, measure_ours(directories[0]), strict=True):
                ours[name].append(change)
            for name, pause in zip(names, measure_torchrun(directories[1], SIZES, STEPS), strict=True):
                theirs[name].append(pause)
            for name, change in measure_losses(directories[2], number % 3, arguments.heartbeat_timeout).items():
                losses[name].append(change)
    everything = _row("all of them", chain(*ours.values()), chain(*theirs.values()))
    rows = [*(_row(name, ours[name], theirs[name]) for name in names), everything]
    rows += [_row(name, changes, ()) for name, changes in losses.items()]
    report("Pauses of a training job of 21 M parameters when its ranks change", rows, ["freetrain-parsl", "torch"])
    figures = {
        "pause_s_median": everything["pause_s"],
        "pause_steps_median": everything["steps"],
        "torchrun_restart_s_median": everything["torchrun_s"],
        "ratio": everything["ratio"],
    }
    if arguments.json is not None:
        write_output(arguments.json, json.dumps({**figures, "rows": rows}, indent=2) + "\n")
    kept = (
        everything["pause_s"] <= MOST_SECONDS
        and everything["steps"] <= MOST_STEPS
        and everything["ratio"] >= LEAST_RATIO
        and everything["lost"] == 0
    )
    print(
        f"median pause {everything['pause_s']:.2f} s (at most {MOST_SECONDS}), {everything['steps']:.2f} steps "
        f"(at most {MOST_STEPS}), torchrun's restart {everything['ratio']:.0f} times that (at least {LEAST_RATIO}): "
        f"{'kept' if kept else 'NOT KEPT'}"
    )
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
