"""Start and end the server."""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

from freetrain_parsl.cluster.processes import NODE_STARTER
from freetrain_parsl.extensions.demo.warm_start import ADDRESS, CLIENT
from freetrain_parsl.interpreters import module_command

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

__all__ = ["WarmStart"]

# Room for the command line and the environment of a node's processes; the kernel allows 128 KiB for each string.
_LONG_ARGUMENT: Final = "-" * 2**13
_LONG_VARIABLE: Final = {"FREETRAIN_WARM_START_ROOM": "-" * 2**16}


class WarmStart:
    """Runs a server for the duration of a ``with`` block, and no longer than this process.

    Nodes of embedded clusters use it if they inherit ``environment``. It takes about a processor for some seconds,
    after which the start of a node costs next to nothing.

    Attributes
    ----------
    environment : dict
        The variables that name the server, and the module through which nodes are started.
    pid : int
        Its process.
    """

    environment: dict[str, str]
    pid: int

    def __enter__(self) -> Self:
        self._directory = tempfile.TemporaryDirectory(prefix="ft-warm-", dir="/tmp")  # a short path
        path = Path(self._directory.name) / "socket"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            listener.listen(128)
            descriptor = listener.fileno()
            self._process = subprocess.Popen(
                [*module_command("freetrain_parsl.extensions.demo.warm_start.server"), str(descriptor), _LONG_ARGUMENT],
                env={**os.environ, **_LONG_VARIABLE},
                stdin=subprocess.PIPE,
                pass_fds=[descriptor],
                start_new_session=True,
            )
        self.environment = {ADDRESS: str(path), NODE_STARTER: CLIENT}
        self.pid = self._process.pid
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._directory.cleanup()
