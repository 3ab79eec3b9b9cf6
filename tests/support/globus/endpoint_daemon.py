"""The real daemon of a Globus Compute endpoint, run as an ordinary user, with the shipped configuration."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from freetrain_parsl.errors import BatchSystemError
from tests.support.daemons import wait_until

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    from typing_extensions import Self

    from tests.support.globus.compute_service import ComputeService

__all__ = ["EndpointDaemon"]

_NAME = "freetrain"
# Run by root, the daemon would serve other users too. In a user namespace root is an ordinary user, with access to its
# own files, such as the Python of a virtual environment.
_AS_ORDINARY_USER = ("unshare", "--user", "--map-user=65534", "--map-group=65534")
_START, _END = 60.0, 40.0  # seconds


class EndpointDaemon:
    """An endpoint registered at a stand-in web service; use it as a context manager.

    Parameters
    ----------
    directory
        Its home directory.
    service
        The web service.
    configuration
        Directory with the shipped template.
    extra
        Further environment variables.
    """

    def __init__(
        self,
        directory: Path,
        service: ComputeService,
        configuration: Path,
        extra: Mapping[str, str] | None = None,
    ) -> None:
        self.directory = directory
        self._service = service
        self._process: subprocess.Popen[bytes] | None = None
        self._place = directory / ".globus_compute" / _NAME
        self._place.mkdir(parents=True, mode=0o700)
        for file in configuration.iterdir():
            shutil.copy(file, self._place)
        self._environment = {
            **os.environ,
            **service.environment,
            "HOME": str(directory),
            "GLOBUS_COMPUTE_USER_DIR": str(self._place.parent),
            "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}",
            **(extra or {}),
        }
        self._prefix = _AS_ORDINARY_USER if os.getuid() == 0 else ()

    @property
    def id(self) -> str:
        """Its UUID, which stays the same when it starts again."""
        return str(json.loads((self._place / "endpoint.json").read_text())["endpoint_id"])

    def log(self) -> str:
        """Return the logs of the daemon and of its user processes."""
        return "\n".join(file.read_text(errors="replace") for file in self.directory.rglob("endpoint.log"))

    def start(self) -> None:
        """Start the daemon and wait until it is online.

        Raises
        ------
        BatchSystemError
            It ended, or it is not online in time; the message has the end of its log.
        """
        command = [*self._prefix, str(Path(sys.executable).parent / "globus-compute-endpoint"), "start", _NAME]
        with (self.directory / "daemon.log").open("ab") as log:
            self._process = subprocess.Popen(
                command,
                env=self._environment,
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        process = self._process
        wait_until(lambda: self._online() or process.poll() is not None, _START, lambda: f"the endpoint: {self.log()}")
        if process.poll() is not None:
            raise BatchSystemError(f"the endpoint ended: {(self.directory / 'daemon.log').read_text()[-2000:]}")

    def stop(self) -> None:
        """End the daemon in its own way, with its user processes, and wait until it has ended."""
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            self._process.wait(_END)
            self._process = None

    def run_command(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command as the endpoint's user, in its environment; return it with its output."""
        return subprocess.run(
            [*self._prefix, *command],
            env=self._environment,
            cwd=self.directory,
            capture_output=True,
            text=True,
            check=False,
        )

    def _online(self) -> bool:
        try:
            return self._service.is_online(self.id)
        except (FileNotFoundError, ValueError):  # it is being written
            return False

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        self.stop()
