"""Requirements of a `LoopbackSlurm` on the machine: programs, ports, devices."""

from __future__ import annotations

import os
import random
import shutil
import socket
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from freetrain_parsl.errors import BatchSystemError, InvalidSettings

if TYPE_CHECKING:
    from collections.abc import Collection

__all__ = ["PATH", "character_devices", "choose_ports", "is_loopback_only", "listens", "slurm_version"]

PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/local/sbin", "/usr/sbin", "/sbin"])
"""Additional search path for daemons, for ordinary users."""

_FIRST_PORT, _LAST_PORT = 10240, 32000  # below the kernel's ephemeral ports


def slurm_version() -> tuple[int, int]:
    """Return the version of the installed Slurm: ``(22, 5)``."""
    command = [shutil.which("slurmctld", path=PATH) or "slurmctld", "-V"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    major, minor = printed.split()[-1].split(".")[:2]
    return int(major), int(minor)


def choose_ports(nodes: int) -> dict[str, int]:
    """Choose consecutive free ports: daemon -> port, where ``slurmd`` is the first node's and the others follow.

    Raises
    ------
    BatchSystemError
        There are none.
    """
    count = nodes + 3
    for _ in range(100):
        first = random.randrange(_FIRST_PORT, _LAST_PORT - count)
        if _are_free(range(first, first + count)):
            return dict(zip(("slurmctld", "slurmdbd", "database", "slurmd"), range(first, first + 4), strict=True))
    raise BatchSystemError(f"no {count} consecutive free ports on the loopback")


def _are_free(ports: Collection[int]) -> bool:
    with ExitStack() as sockets:
        for port in ports:
            probe = sockets.enter_context(socket.socket())
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                return False
    return True


def is_loopback_only() -> bool:
    """Return whether this machine's own name is a loopback address; otherwise Slurm listens on all interfaces."""
    try:
        return socket.gethostbyname(socket.gethostname()).startswith("127.")
    except OSError:
        return False


def listens(path: Path) -> bool:
    """Return whether a process listens on a socket."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True


def character_devices(count: int) -> list[str]:
    """Return character devices that can represent GPUs.

    Raises
    ------
    InvalidSettings
        There are too few.
    """
    devices = [f"/dev/tty{number}" for number in range(count)]
    absent = [device for device in devices if not Path(device).exists()]
    if absent:
        raise InvalidSettings(f"simulated GPUs need character devices, and there is no {absent[0]}")
    return devices
