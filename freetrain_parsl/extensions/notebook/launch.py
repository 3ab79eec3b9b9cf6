"""Commands of ``freetrain`` that a notebook runs, in a session of their own: no interrupt of the kernel reaches it."""

from __future__ import annotations

import os
import re
import subprocess
from typing import TYPE_CHECKING

from freetrain_parsl.errors import InvalidInput
from freetrain_parsl.interpreters import FREETRAIN, script_command

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

__all__ = ["environment_of_user", "reason_in", "run_command"]

_OF_THE_KERNEL = re.compile(r"JPY_.*|JUPYTER.*|FORCE_COLOR|CLICOLOR(_FORCE)?|PYDEVD_.*|IPY.*|VSCODE_.*")
_INLINE = "module://"
_PREFIX = re.compile(r"^freetrain( \w+)?: ")


def environment_of_user(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without what belongs to the kernel: its server's tokens, colours, and the inline plots."""
    return {
        name: value
        for name, value in environment.items()
        if not _OF_THE_KERNEL.fullmatch(name) and not (name == "MPLBACKEND" and value.startswith(_INLINE))
    }


def run_command(arguments: Sequence[str], directory: Path | None = None) -> str:
    """Run a command that returns within seconds, and return its output.

    Raises
    ------
    InvalidInput
        It was refused; with the command's own message.
    """
    done = subprocess.run(
        [*script_command(FREETRAIN), *arguments],
        cwd=directory,
        env=environment_of_user(os.environ),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        start_new_session=True,
    )
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip() or f"it ended with code {done.returncode}").splitlines()
        raise InvalidInput(reason_in(said[-1]))
    return done.stdout


def reason_in(line: str) -> str:
    """Return the message in the last line of a command's output."""
    return _PREFIX.sub("", line)
