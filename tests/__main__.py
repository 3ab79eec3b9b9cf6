"""Run the test suite in parts: ``python -m tests [--all] [arguments of pytest]``.

Without ``--all``, which is ``make test``: all quick tests, and of the other parts those marked ``smoke``, which are at
least one path through each layer. With it, ``make test-all``: everything.

Those that use a GPU run alone and first, so that the last summary is never that of skipped tests only. Tests without
daemons use all cores, the quick ones first. Tests with daemons wait most of the time: two of them share a core, and
the slow tests run beside them with what they leave. Those that measure delays are the last, two at a time.
``python -m pytest`` runs all tests one by one.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

# Part -> maximum number of concurrent tests; those with daemons use less than half a core each.
PARTS = {"gpu": 1, "quick": 4, "daemons": 4, "slow": 4, "timed": 2}
TESTS_PER_CORE = {"daemons": 2}
BESIDE = {"daemons": "slow"}  # part -> the one that runs beside it, at a lower priority; its output is shown at its end
NICE = ["nice", "-n", "5"]
NOTHING, FAILED = int(pytest.ExitCode.NO_TESTS_COLLECTED), int(pytest.ExitCode.TESTS_FAILED)


def arguments_of(part: str, cores: int) -> list[str]:
    """Return pytest's arguments for a part."""
    workers = min(PARTS[part], cores * TESTS_PER_CORE.get(part, 1))
    return ["--part", part] + (["-n", str(workers), "--dist", "load", "--maxschedchunk", "1"] if workers > 1 else [])


def verdict(codes: list[int]) -> int:
    """Combine the exit codes of the parts: a part without tests is not a failure, unless all are."""
    return next((code for code in codes if code not in (0, NOTHING)), 0 if 0 in codes else NOTHING)


def run(part: str, arguments: list[str]) -> list[int]:
    """Run a part, and the one beside it; return their exit codes."""
    begin = time.monotonic()
    cores = len(os.sched_getaffinity(0))
    commands = {
        name: [sys.executable, "-m", "pytest", *arguments_of(name, cores), *arguments]
        for name in filter(None, (part, BESIDE.get(part)))
    }
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory) / "output"
        with output.open("wb") as file:
            running = {
                name: subprocess.Popen(command)
                if name == part
                else subprocess.Popen([*NICE, *command], stdout=file, stderr=file)
                for name, command in commands.items()
            }
            codes = []
            for name, process in running.items():
                codes.append(process.wait())
                if name != part:
                    sys.stdout.write(output.read_text(encoding="utf-8", errors="replace"))
                print(f"part {name}: {time.monotonic() - begin:.0f} s", flush=True)
    return codes


def main(arguments: list[str]) -> int:
    """Run the parts in sequence, even after a failed test, but not after an interruption or a usage error."""
    everything = "--all" in arguments
    arguments = [argument for argument in arguments if argument != "--all"] + ([] if everything else ["--smoke"])
    codes: list[int] = []
    for part in PARTS:
        if part not in BESIDE.values():
            codes += run(part, arguments)
            if not {*codes} <= {0, NOTHING, FAILED}:
                break
    return verdict(codes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
