"""Run a batch system's commands: argument lists, never a shell, with a timeout and one-line errors."""

from __future__ import annotations

import os
import subprocess
import threading
from collections import Counter
from datetime import timedelta
from typing import Final, Protocol

from freetrain_parsl.errors import BatchSystemError, CommandNotFound

__all__ = ["COMMAND_COUNTS", "CommandCounts", "Commands", "Runner"]


class CommandCounts:
    """Counts commands by name, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, command: str) -> None:
        """Count a command; `command`: its name or path."""
        with self._lock:
            self._counts[os.path.basename(command)] += 1  # noqa: PTH119 - a name, not a path to open

    def take(self) -> dict[str, int]:
        """Return the counts, and begin anew."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
        return dict(counts)


_PREFERENCES = ("SQUEUE_", "SINFO_", "SACCT_", "SCANCEL_")
"""Begin variables with which users choose what these commands show or cancel if no option says so: their own jobs."""

COMMAND_COUNTS: Final = CommandCounts()
"""The batch system's commands that this process has run, or tried to run."""


class Runner(Protocol):
    """Runs a command and returns its standard output."""

    def __call__(self, *arguments: str) -> str:
        """Run the command `arguments`."""


class Commands:
    """Runs the batch system's commands on this machine.

    Those that take longer than the timeout are killed.
    """

    def __init__(self, timeout: timedelta = timedelta(seconds=30)) -> None:
        self.timeout = timeout

    def __call__(self, *arguments: str) -> str:
        """Run a command and return its standard output.

        Raises
        ------
        CommandNotFound
            It is not on PATH.
        BatchSystemError
            It could not be started, failed or timed out; the message contains the first line of its error output.
        """
        command = arguments[0]
        plain = {name: value for name, value in os.environ.items() if not name.startswith(_PREFERENCES)}
        COMMAND_COUNTS.add(command)
        try:
            done = subprocess.run(
                arguments,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=self.timeout.total_seconds(),
                check=False,
                env={**plain, "LC_ALL": "C", "SLURM_TIME_FORMAT": "%s"},
            )
        except FileNotFoundError:
            raise CommandNotFound(
                f"{command} is not on PATH; run this on a host with the batch system's commands (a login node)"
            ) from None
        except PermissionError:
            raise CommandNotFound(f"{command} is on PATH but is not executable") from None
        except OSError as error:  # this host is out of descriptors, memory or processes
            raise BatchSystemError(f"{command} could not be started: {error.strerror or error}") from error
        except subprocess.TimeoutExpired:
            raise BatchSystemError(f"{command} did not answer within {self.timeout.total_seconds():g} s") from None
        if done.returncode:
            raise BatchSystemError(f"{command} failed: {_complaint(done.stderr, done.stdout, done.returncode)}")
        return done.stdout.decode(errors="replace")  # squeue cuts names anywhere, and anybody may name a job


def _complaint(stderr: bytes, stdout: bytes, code: int) -> str:
    lines = (line.strip() for text in (stderr, stdout) for line in text.decode(errors="replace").splitlines())
    return next((line for line in lines if line), f"exit code {code}")
