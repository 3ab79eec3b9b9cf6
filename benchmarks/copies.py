"""Copies of a sharded state in the memory of other nodes: what they cost while nothing fails.

Use ``--quick`` for a short run, ``--json FILE`` to save the figures. Two processes train with FSDP2 and AdamW; blocks
of `EVERY` steps with one copy and without alternate in the same run, and the processor time of a step is that of all
threads of a process. *Save*: for how long a periodic checkpoint stops training, from the boundary until the parts are
copied and the write is planned; without copies, and with them, where it is written from one. `reshard` has what copies
save after a failure.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

from _lost_process import EVERY, Processes
from _report import report

from freetrain_parsl.protocol.options import SessionOptions

_WARM = 4  # saves that allocate and map memory, which those after them use again


def cost(width: int, blocks: int) -> dict[str, Any]:
    """Measure the processor time of a step with copies and without."""
    processes = Processes(2)
    with tempfile.TemporaryDirectory() as root:
        options = SessionOptions("net", Path(root), snapshot_every=EVERY)
        answers = [one[0] for one in processes.run([0, 1], options, width=width, steps=blocks * EVERY, alternate=True)]
    processes.close()
    without, with_copies = (statistics.median(v for one in answers for v in one["used"][on]) for on in (False, True))
    return {
        "what": f"cost, a copy every {EVERY} steps",
        "part_mb": answers[0]["bytes"] / 1e6,
        "cpu_ms_per_step_without": without * 1e3,
        "cpu_ms_per_step_with": with_copies * 1e3,
        "more_percent": 100 * (with_copies / without - 1),
        "blocked_ms": answers[0]["costs"]["blocked"] * 1e3,
        "transfer_ms": answers[0]["costs"]["transfer"] * 1e3,
    }


def saves(width: int, steps: int) -> dict[str, Any]:
    """Measure the pauses of copies, of saves, and of saves that are written from a copy; medians, in ms."""
    pauses = {}
    for copies in (False, True):
        processes = Processes(2)
        with tempfile.TemporaryDirectory() as root:
            often = timedelta(milliseconds=1)
            every = 1000 if copies else None
            options = SessionOptions("net", Path(root), snapshot_every=every, checkpoint_interval=often, keep=steps)
            answers = [one[0] for one in processes.run([0, 1], options, width=width, steps=steps, pause=0.3)]
            manifests = sorted(Path(root).glob("net/step-*/manifest.json"))
            facts = [json.loads(path.read_text(encoding="utf-8")) for path in manifests]
        processes.close()
        taken = [one["blocked_seconds"] for one in facts if one["reason"] == "periodic"]
        pauses[copies] = statistics.median(taken[_WARM:]) * 1e3
    return {
        "what": f"a save, median of {len(taken) - _WARM}",
        "part_mb": answers[0]["bytes"] / 1e6,
        "copy_ms": answers[0]["costs"]["blocked"] * 1e3,
        "save_ms": pauses[False],
        "save_from_copy_ms": pauses[True],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    width, blocks = (256, 12) if given.quick else (1280, 16)
    rows = [cost(width, blocks), saves(width, 3 * blocks)]
    report("Copies of a sharded state", rows, ["torch", "freetrain-parsl"], given.json)


if __name__ == "__main__":
    main()
