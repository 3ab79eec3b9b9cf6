"""The daemons of a cluster: start, readiness, end, logs."""

from __future__ import annotations

import subprocess
import time
from typing import TYPE_CHECKING

from freetrain_parsl.errors import BatchSystemError, InvalidSettings

if TYPE_CHECKING:
    import signal
    from collections.abc import Callable, Mapping
    from pathlib import Path

__all__ = ["PERIOD", "Daemons", "wait_until"]

PERIOD = 0.02
"""Seconds between two looks at something that is awaited."""

_READY_TIMEOUT = 60.0  # seconds
_END_TIMEOUT = 30.0


class Daemons:
    """Daemons that run in the foreground, by name.

    Parameters
    ----------
    run_directory, log_directory
        Their working directory, and that of their logs.
    environment
        Their environment.
    on_its_host
        Returns the command that runs a daemon's command on its host: (daemon, command, working directory).
    """

    def __init__(
        self,
        run_directory: Path,
        log_directory: Path,
        environment: Mapping[str, str],
        on_its_host: Callable[[str, tuple[str, ...], str], list[str]],
    ) -> None:
        self._run_directory = run_directory
        self._log_directory = log_directory
        self._environment = environment
        self._on_its_host = on_its_host
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *command: str, extra: Mapping[str, str] | None = None) -> None:
        """Start a daemon, with `extra` environment variables."""
        with self._log_file(name).open("ab") as log:
            self._processes[name] = subprocess.Popen(
                self._on_its_host(name, command, str(self._run_directory)),
                env={**self._environment, **(extra or {})},
                cwd=self._run_directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def runs(self, name: str) -> bool:
        """Return whether a daemon is running."""
        return name in self._processes and self._processes[name].poll() is None

    def wait_until_ready(self, name: str, ready: Callable[[], bool]) -> None:
        """Wait until a daemon that was started is ready.

        Raises
        ------
        BatchSystemError
            It ended, or was not ready in time; the message contains the end of its log.
        """
        daemon = self._processes[name]
        wait_until(
            lambda: ready() or daemon.poll() is not None,
            _READY_TIMEOUT,
            lambda: f"{name} to answer: {self.last_words(name)}",
        )
        if daemon.poll() is not None:
            raise BatchSystemError(f"{name} ended with {daemon.returncode}: {self.last_words(name)}")

    def end(self, name: str, number: signal.Signals) -> None:
        """Send a signal to a daemon, and wait until it has ended.

        Raises
        ------
        InvalidSettings
            There is no such daemon.
        """
        if name not in self._processes:
            raise InvalidSettings(f"{name!r} is not a daemon of this cluster: {', '.join(self._processes)}")
        daemon = self._processes[name]
        daemon.send_signal(number)
        daemon.wait(_END_TIMEOUT)

    def reap(self) -> None:
        """Collect those that have ended: otherwise they stay zombies."""
        for daemon in self._processes.values():
            daemon.poll()

    def forget(self) -> None:
        """Forget all of them: they have ended."""
        self._processes.clear()

    def log(self, name: str) -> str:
        """Return the log of a daemon; empty if it has none."""
        file = self._log_file(name)
        return file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""

    def last_words(self, name: str) -> str:
        """Return the end of a daemon's log, in one line."""
        return " | ".join(self.log(name).splitlines()[-8:])

    def _log_file(self, name: str) -> Path:
        return self._log_directory / f"{name}.log"


def wait_until(ready: Callable[[], bool], timeout: float, what: Callable[[], str]) -> None:
    """Wait at most `timeout` seconds.

    Parameters
    ----------
    ready
        Returns whether it has happened.
    timeout
        Seconds.
    what
        Returns what is awaited, for the error.

    Raises
    ------
    BatchSystemError
        It did not happen in time.
    """
    deadline = time.monotonic() + timeout
    while not ready():
        if time.monotonic() > deadline:
            raise BatchSystemError(f"waited {timeout:g} s for {what()}")
        time.sleep(PERIOD)
