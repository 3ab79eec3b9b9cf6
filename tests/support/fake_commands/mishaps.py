"""Deliberate failures of a batch system's commands.

A mishap is a line ``COMMAND KIND [VALUE]`` in the file ``mishaps`` of the fakes' directory, or in the environment
variable `MISHAP_VARIABLE`, there separated by semicolons; the command ``*`` stands for all.
"""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, Literal, NoReturn

from freetrain_parsl.errors import InvalidSettings

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["MISHAP_VARIABLE", "Kind", "clear_mishaps", "set_mishap", "suffer"]

MISHAP_VARIABLE = "FREETRAIN_FAKE_MISHAPS"

Kind = Literal["slow", "hang", "garbage", "down", "refuse"]

_FILE = "mishaps"
_LONGEST_HANG = 300.0  # s; no process outlives its test for ever
_DOWN = {
    "slurm": "slurm_load_jobs error: Unable to contact slurm controller (connect failure)",
    "pbs": "Connection refused\n{command}: cannot connect to server fake (errno=111)",
}


def set_mishap(directory: Path, kind: Kind, *, command: str = "*", value: str = "") -> None:
    """Set a mishap from now on; the last one set for a command counts.

    Parameters
    ----------
    directory
        Directory of the fakes.
    kind
        ``slow``: answers after `value` seconds. ``hang``: never answers. ``garbage``: prints `value`, or invalid
        output, and succeeds. ``down``: the daemon cannot be reached. ``refuse``: fails with the message `value`.
    command
        Command; ``*`` for all.
    value
        See `kind`; one line.
    """
    if "\n" in value:
        raise InvalidSettings("a mishap's value must be one line")
    with (directory / _FILE).open("a", encoding="utf-8") as file:
        file.write(f"{command} {kind} {value}\n")


def clear_mishaps(directory: Path) -> None:
    """Remove all mishaps."""
    (directory / _FILE).unlink(missing_ok=True)


def suffer(directory: Path, system: str, command: str) -> None:
    """Carry out the mishap set for a command; ends the process unless it is only slow."""
    kind, value = _mishap(directory, command)
    if kind == "slow":
        time.sleep(float(value))
    elif kind == "hang":
        time.sleep(_LONGEST_HANG)
        _fail("the fake has hung long enough")
    elif kind == "garbage":
        print(value or "\x1b[2J{]} Segmentation fault (core dumped)")
        sys.exit(0)
    elif kind == "down":
        _fail(_DOWN[system].format(command=command))
    elif kind == "refuse":
        _fail(f"{command}: {value}")
    elif kind:
        _fail(f"{command}: the fake knows no mishap {kind!r}")


def _mishap(directory: Path, command: str) -> tuple[str, str]:
    lines = os.environ.get(MISHAP_VARIABLE, "").split(";")
    file = directory / _FILE
    if file.exists():
        lines += file.read_text(encoding="utf-8").splitlines()
    found = ("", "")
    for line in lines:
        name, _, rest = line.strip().partition(" ")
        if name in ("*", command):
            kind, _, value = rest.partition(" ")
            found = (kind, value.strip())
    return found


def _fail(complaint: str) -> NoReturn:
    print(complaint, file=sys.stderr)
    sys.exit(1)
