"""RabbitMQ on the loopback interface: the real broker, with everything it writes in one directory."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from freetrain_parsl.errors import BatchSystemError, CommandNotFound
from tests.support.daemons import wait_until

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

__all__ = ["LoopbackRabbit", "broker_missing"]

# Debian's command on PATH only starts the system's own broker; this is what it starts.
_PROGRAMS = Path("/usr/lib/rabbitmq/bin")
_START_TIMEOUT = 90.0
_COMMAND_TIMEOUT = 60.0  # seconds; each command starts an Erlang machine


def broker_missing() -> str | None:
    """Return what is missing to run a broker; ``None`` if nothing is."""
    if (_PROGRAMS / "rabbitmq-server").is_file() and shutil.which("epmd"):
        return None
    return "RabbitMQ is not installed (Debian: rabbitmq-server)"


class LoopbackRabbit:
    """A RabbitMQ server on 127.0.0.1; use it as a context manager. A cold start takes about eight seconds.

    Parameters
    ----------
    directory
        Empty directory for its files.
    """

    def __init__(self, directory: Path) -> None:
        if (missing := broker_missing()) is not None:
            raise CommandNotFound(missing)
        self._directory = directory
        self._port, distribution, self._mapper = _free_ports(3)
        self._environment = {
            **os.environ,
            "HOME": str(directory),
            "RABBITMQ_CONF_ENV_FILE": os.devnull,
            "RABBITMQ_CONFIG_FILE": str(directory / "rabbitmq"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(directory / "enabled_plugins"),
            "RABBITMQ_LOG_BASE": str(directory / "log"),
            "RABBITMQ_MNESIA_BASE": str(directory / "mnesia"),
            "RABBITMQ_NODENAME": f"freetrain{secrets.token_hex(4)}@localhost",
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": str(self._port),
            "RABBITMQ_DIST_PORT": str(distribution),
            "RABBITMQ_PID_FILE": str(directory / "pid"),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "ERL_EPMD_PORT": str(self._mapper),
        }
        self._processes: list[subprocess.Popen[bytes]] = []

    @property
    def url(self) -> str:
        """AMQP address with user and password."""
        return f"amqp://guest:guest@127.0.0.1:{self._port}/%2F"

    def cut_connections(self) -> None:
        """Close all connections; clients may connect again at once."""
        subprocess.run(
            [str(_PROGRAMS / "rabbitmqctl"), "close_all_connections", "cut by a test"],
            env=self._environment,
            cwd=self._directory,
            stdout=subprocess.DEVNULL,
            check=True,
            timeout=_COMMAND_TIMEOUT,
        )

    def __enter__(self) -> Self:
        (self._directory / "rabbitmq.conf").write_text("loopback_users = none\nheartbeat = 30\n", encoding="utf-8")
        (self._directory / "enabled_plugins").write_text("[].\n", encoding="utf-8")
        self._start("epmd")  # otherwise the broker starts one, which outlives it
        wait_until(lambda: _accepts(self._mapper), _START_TIMEOUT, lambda: f"epmd to answer: {self._log()}")
        server = self._start(str(_PROGRAMS / "rabbitmq-server"))
        wait_until(
            lambda: _accepts(self._port) or server.poll() is not None,
            _START_TIMEOUT,
            lambda: f"RabbitMQ to answer: {self._log()}",
        )
        if server.poll() is not None:
            raise BatchSystemError(f"RabbitMQ ended with {server.returncode}: {self._log()}")
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        for process in self._processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # the server is a shell script; nothing of it is needed again
            process.wait()

    def _start(self, *command: str) -> subprocess.Popen[bytes]:
        with (self._directory / "daemons.log").open("ab") as log:
            process = subprocess.Popen(
                command,
                env=self._environment,
                cwd=self._directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._processes.append(process)
        return process

    def _log(self) -> str:
        lines = (self._directory / "daemons.log").read_text(encoding="utf-8", errors="replace").splitlines()
        return " | ".join(lines[-8:])


def _accepts(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()
