"""Linux namespaces of a node, which a forked process enters: network, host name, System V IPC and mounts."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["ENTERED", "FIXED", "descriptors", "enter"]

ENTERED: Final = ("net", "uts", "ipc", "mnt")
"""Kinds that a process without threads can change, if it may administer them."""

FIXED: Final = ("cgroup", "pid", "user")
"""Kinds that a process keeps, or must not change: its parent has to be in the same."""


def descriptors() -> list[int]:
    """Open the namespaces that another process would have to enter to be where this one is."""
    return [os.open(f"/proc/self/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC) for kind in ENTERED]


def enter(namespaces: Sequence[int]) -> None:
    """Enter the namespaces of these descriptors; no effect for those that this process is in already.

    Raises
    ------
    OSError
        This process must not: it is neither root, nor has it the capability.
    """
    own = [Path("/proc/self/ns", kind).stat() for kind in ENTERED]
    library = ctypes.CDLL(None, use_errno=True)  # os.setns is in Python since 3.12
    for kind, descriptor, here in zip(ENTERED, namespaces, own, strict=True):
        there = os.fstat(descriptor)
        if (there.st_dev, there.st_ino) != (here.st_dev, here.st_ino) and library.setns(descriptor, 0):
            raise OSError(ctypes.get_errno(), f"{os.strerror(ctypes.get_errno())}: the {kind} namespace of the node")
