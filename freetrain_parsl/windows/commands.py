"""Running a batch system's commands: argument lists, never a shell; each with a time-out and one-line errors."""

from __future__ import annotations

import os
import subprocess
from datetime import timedelta
from typing import Protocol

from freetrain_parsl.errors import BatchSystemError, CommandNotFound

__all__ = ["Commands", "Runner"]


class Runner(Protocol):
    """What runs a command and gives its standard output."""

    def __call__(self, *arguments: str) -> str:
        """Run the command `arguments`."""


class Commands:
    """Runs commands of the batch system on this machine.

    Parameters
    ----------
    timeout
        A command that takes longer is killed.
    """

    def __init__(self, timeout: timedelta = timedelta(seconds=30)) -> None:
        self.timeout = timeout

    def __call__(self, *arguments: str) -> str:
        """Run a command and return what it printed.

        Raises
        ------
        CommandNotFound
            It is not on PATH.
        BatchSystemError
            It could not be started, failed, hung or printed what is not text; the message carries its own first line
            of complaint.
        """
        command = arguments[0]
        try:
            done = subprocess.run(
                arguments,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=self.timeout.total_seconds(),
                check=False,
                env={**os.environ, "LC_ALL": "C", "SLURM_TIME_FORMAT": "%s"},
            )
        except FileNotFoundError:
            raise CommandNotFound(
                f"{command} is not on PATH; run this where the batch system's commands are (a login node)"
            ) from None
        except PermissionError:
            raise CommandNotFound(f"{command} is on PATH but may not be executed") from None
        except OSError as error:  # no descriptors, memory or processes are left on this host
            raise BatchSystemError(f"{command} could not be started: {error.strerror or error}") from error
        except subprocess.TimeoutExpired:
            raise BatchSystemError(f"{command} did not answer within {self.timeout.total_seconds():g} s") from None
        if done.returncode:
            raise BatchSystemError(f"{command} failed: {_complaint(done.stderr, done.stdout, done.returncode)}")
        try:
            return done.stdout.decode()
        except UnicodeDecodeError:
            raise BatchSystemError(f"{command} answered with bytes that are not text") from None


def _complaint(stderr: bytes, stdout: bytes, code: int) -> str:
    lines = (line.strip() for text in (stderr, stdout) for line in text.decode(errors="replace").splitlines())
    return next((line for line in lines if line), f"exit code {code}")
