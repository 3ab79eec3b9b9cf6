"""What can go wrong with a batch system's commands, on purpose.

A mishap is a line ``COMMAND KIND [VALUE]`` in the file ``mishaps`` of the fakes' directory, or in the environment
variable `MISHAP_VARIABLE`, there with semicolons between; a command of ``*`` is all of them.
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
_LONGEST_HANG = 300.0  # s; nothing of a test outlives it for ever
_DOWN = {
    "slurm": "slurm_load_jobs error: Unable to contact slurm controller (connect failure)",
    "pbs": "Connection refused\n{command}: cannot connect to server fake (errno=111)",
}


def set_mishap(directory: Path, kind: Kind, *, command: str = "*", value: str = "") -> None:
    """Let something go wrong from now on; the last mishap set for a command counts.

    Parameters
    ----------
    directory
        Of the fakes.
    kind
        ``slow``: answers after `value` seconds. ``hang``: never answers. ``garbage``: prints `value`, or something that
        is no answer, and succeeds. ``down``: the daemon cannot be reached. ``refuse``: complains with `value`.
    command
        Which command; ``*`` for all.
    value
        See `kind`; one line.
    """
    if "\n" in value:
        raise InvalidSettings("a mishap's value is one line")
    with (directory / _FILE).open("a", encoding="utf-8") as file:
        file.write(f"{command} {kind} {value}\n")


def clear_mishaps(directory: Path) -> None:
    """Let everything go well again."""
    (directory / _FILE).unlink(missing_ok=True)


def suffer(directory: Path, system: str, command: str) -> None:
    """Let what is set for a command go wrong; ends the process unless it is only slow."""
    kind, value = _mishap(directory, command)
    if kind == "slow":
        time.sleep(float(value))
    elif kind == "hang":
        time.sleep(_LONGEST_HANG)
        _fail("the fake has hung long enough")
    elif kind == "garbage":
        print(value or "\x1b[2J{]} Segmentation fault (core dumped)")  # noqa: T201 - a command's answer
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
    print(complaint, file=sys.stderr)  # noqa: T201 - a command's complaint
    sys.exit(1)
