"""One notebook controls a run, by commands of ``freetrain``; others look at it.

The controlling process holds a POSIX lock, which the system removes with the process, so that a restarted kernel gets
it again. Commands are in a session of their own: no interrupt of the kernel reaches them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import re
import subprocess
from typing import TYPE_CHECKING, Final

from freetrain_parsl.campaign.directories import CONTROL
from freetrain_parsl.errors import InvalidInput
from freetrain_parsl.interpreters import FREETRAIN, script_command
from freetrain_parsl.storage.owned_files import open_own_file, open_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

__all__ = ["controller_of", "environment_of_user", "reason_in", "run_command", "take_control"]

_HELD: Final[dict[tuple[int, int], int]] = {}
"""Device and inode of a file -> descriptor: closing it, or another one of the file, would release the lock."""


def take_control(run_dir: Path) -> bool:
    """Make this process the one that controls a run, until it ends; return whether it does.

    On a file system without locks, each process does; in a directory that cannot be written, none.

    Raises
    ------
    InvalidInput
        The file is a link, or not this user's.
    """
    path = run_dir / CONTROL
    with contextlib.suppress(OSError):  # it may have been removed, with its directory, and made again
        if _identity(path.stat()) in _HELD:
            return True
    try:
        file = open_own_file(path, os.O_CREAT | os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        os.close(file)
        return False
    except OSError:
        pass
    with contextlib.suppress(OSError):  # the disk is full
        os.ftruncate(file, 0)
        os.pwrite(file, f"process {os.getpid()} on {platform.node()}".encode(), 0)
    _HELD[_identity(os.fstat(file))] = file
    return True


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def controller_of(run_dir: Path) -> str:
    """Describe the process that controlled a run last; empty: none did."""
    try:
        with open_text(run_dir / CONTROL) as file:
            return file.read(100)
    except (OSError, InvalidInput):
        return ""


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


def run_command(arguments: Sequence[str]) -> str:
    """Run a command that returns within seconds, and return its output.

    Raises
    ------
    InvalidInput
        It was refused; with the command's own message.
    """
    done = subprocess.run(
        [*script_command(FREETRAIN), *arguments],
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
