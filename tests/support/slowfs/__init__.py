"""A slow shared file system: a FUSE passthrough that counts metadata operations, each of which takes a set time.

It covers directories under their own names, in a mount namespace of its own process only (``unshare --mount``).
"""

from __future__ import annotations

import mmap
import os
import shutil
import struct
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from typing_extensions import Self

__all__ = ["SlowTrees", "missing_for_slowfs"]

SOURCE = Path(__file__).with_name("slowfs.c")
_NUMBERS = 11
_OPERATIONS = (0, 2, 3, 4, 7)  # lookups, opens, links, listings, others; reads are no metadata


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
    cache_seconds
        For which the kernel keeps names and attributes.
    exempt
        Session whose processes are neither slow nor counted; 0: none.
    """

    def __init__(self, trees: Iterable[Path], work: Path, cache_seconds: float = 1.0, exempt: int = 0) -> None:
        self._trees = list(trees)
        self._work, self._cache = work, cache_seconds
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
            subprocess.run([program, tree, tree, str(self._cache), state], check=True)
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
        """Set the counters to zero."""
        for state in self._states:
            state[:64] = bytes(64)
        self._note("reset")

    def _note(self, what: str) -> None:
        """Write a line where the program writes the names, for whoever looks for the reason of a number."""
        if log := os.environ.get("SLOWFS_LOG"):
            with Path(log).open("a", encoding="utf-8") as file:
                file.write(f"{what}\n")

    def operations(self) -> int:
        """Return the number of metadata operations since `reset`."""
        self._note("counted")
        numbers = [struct.unpack_from("8Q", state) for state in self._states]
        return sum(counts[index] for counts in numbers for index in _OPERATIONS)
