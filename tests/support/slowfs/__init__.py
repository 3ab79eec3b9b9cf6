"""A slow shared file system: a FUSE passthrough that counts metadata operations, each of which takes a set time.

It covers directories under their own names, in a mount namespace of its own process only (``unshare --mount``).
"""

from __future__ import annotations

import mmap
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from typing_extensions import Self

__all__ = ["LIKE_NFS", "SlowTrees", "missing_for_slowfs"]

SOURCE = Path(__file__).with_name("slowfs.c")
_NUMBERS = 12
_OPERATIONS = (0, 2, 3, 4, 7)  # lookups, opens, links, listings, others; reads are no metadata
_OF_EXEMPT = 11

LIKE_NFS = (30.0, 3.0)
"""Defaults of NFS on Linux, nfs(5): names, also of what does not exist, are known until attributes of their directory
expire, after 30 s at the earliest (``acdirmin``, ``lookupcache=all``); attributes of a file expire after 3 s
(``acregmin``). FUSE's library has one time for the attributes of files and directories: 3 s, the more frequent one."""


def missing_for_slowfs() -> str:
    """Return what this machine lacks; empty: nothing."""
    for program, package in (("cc", "gcc"), ("pkg-config", "pkg-config"), ("fusermount3", "fuse3")):
        if shutil.which(program) is None:
            return f"{program} is missing (Debian: {package})"
    if subprocess.run(["pkg-config", "--exists", "fuse3"], check=False).returncode:
        return "the headers of FUSE are missing (Debian: libfuse3-dev)"
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "/dev/fuse is missing, or may not be used"
    if os.geteuid() != 0:
        return "only root may mount a file system over a directory"
    return ""


class SlowTrees:
    """Directories that are slow during a ``with`` block, in a process whose mounts are its own.

    Parameters
    ----------
    trees
        The directories.
    work
        Directory for the program and its counters.
    exempt
        Session whose processes are not slow; 0: none.
    keep
        Seconds for which the kernel keeps names, and those for which it keeps attributes.
    """

    def __init__(
        self, trees: Iterable[Path], work: Path, exempt: int = 0, keep: tuple[float, float] = LIKE_NFS
    ) -> None:
        self._trees = list(trees)
        self._work, self._keep = work, keep
        self._exempt = exempt
        self._states: list[mmap.mmap] = []

    def __enter__(self) -> Self:
        program = self._work / "slowfs"
        flags = subprocess.run(
            ["pkg-config", "--cflags", "--libs", "fuse3"], capture_output=True, text=True, check=True
        ).stdout.split()
        subprocess.run(["cc", "-O2", "-D_FILE_OFFSET_BITS=64", SOURCE, "-o", program, *flags], check=True)
        for number, tree in enumerate(self._trees):
            state = self._work / f"state-{number}"
            subprocess.run([program, tree, tree, *map(str, self._keep), state], check=True)
            with state.open("r+b") as file:
                self._states.append(mmap.mmap(file.fileno(), 8 * _NUMBERS))
            self._states[-1][80:88] = struct.pack("Q", self._exempt)
        return self

    def __exit__(self, *_: object) -> None:
        self.set_latency(0)
        for tree in reversed(self._trees):
            subprocess.run(["umount", "--lazy", tree], check=False)

    def set_latency(self, milliseconds: float) -> None:
        """Set the time that each metadata operation takes."""
        for state in self._states:
            state[64:72] = struct.pack("Q", round(1000 * milliseconds))

    def reset(self) -> None:
        """Let the kernel forget the names that it knows, and set the counters to zero."""
        subprocess.run(["sh", "-c", "echo 2 > /proc/sys/vm/drop_caches"], check=True)
        try:
            for tree in self._trees:
                (tree / ".slowfs-forget").exists()
        except OSError:
            print("slowfs: Linux before 6.16 does not forget names that open files hold", file=sys.stderr)
        for state in self._states:
            state[:64] = bytes(64)
            state[88:96] = bytes(8)
        self._note("reset")

    def _note(self, what: str) -> None:
        """Write a line where the program writes the names, for whoever looks for the reason of a number."""
        if log := os.environ.get("SLOWFS_LOG"):
            with Path(log).open("a", encoding="utf-8") as file:
                file.write(f"{what}\n")

    def operations(self) -> int:
        """Return the number of metadata operations since `reset`."""
        self._note("counted")
        return self._sum(_OPERATIONS)

    def exempt_operations(self) -> int:
        """Return the same of the exempt session.

        Each may have spared one of the counted operations: that of the process that would have asked first.
        """
        return self._sum((_OF_EXEMPT,))

    def _sum(self, indices: Iterable[int]) -> int:
        numbers = [struct.unpack_from(f"{_NUMBERS}Q", state) for state in self._states]
        return sum(counts[index] for counts in numbers for index in indices)
