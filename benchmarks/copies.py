"""Copies of a sharded state in the memory of other nodes: what they cost while nothing fails.

Use ``--quick`` for a short run, ``--json FILE`` to save the figures. Two processes train with FSDP2 and AdamW; blocks
of `EVERY` steps with one copy and without alternate in the same run, and the processor time of a step is that of all
threads of a process. `reshard` has what they save after a failure.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

from _lost_process import EVERY, Processes
from _report import report

from freetrain_parsl.protocol.options import SessionOptions


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    width, blocks = (256, 12) if given.quick else (1280, 16)
    rows = [cost(width, blocks)]
    report("Copies of a sharded state", rows, ["torch", "freetrain-parsl"], given.json)


if __name__ == "__main__":
    main()
