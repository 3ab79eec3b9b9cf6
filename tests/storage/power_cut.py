"""A power cut: what remains of a directory if only data that was synchronized survives.

The least that POSIX guarantees: a file has the content of its last `fsync`, or none, and a directory has the names of
its last `fsync`, or none. File systems keep more in practice, and none has to.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

_Content = bytes | dict[str, int]  # of a file; of a directory: name -> inode


class PowerCut:
    """Records what is synchronized below a directory; see `after`.

    Parameters
    ----------
    root
        The directory; what it contains now is durable.
    monkeypatch
        Replaces `os.fsync`.
    """

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._root = root.stat().st_ino
        self._kept: dict[int, _Content] = {}  # inode -> its last durable content
        self._opened: list[int] = []  # keep inodes from being reused
        for folder, _, files in os.walk(root):
            for path in (Path(folder), *(Path(folder, name) for name in files)):
                self._keep(os.open(path, os.O_RDONLY))
        sync = os.fsync

        def recorded(descriptor: int) -> None:
            sync(descriptor)
            self._keep(os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY))

        monkeypatch.setattr(os, "fsync", recorded)

    def _keep(self, descriptor: int) -> None:
        self._opened.append(descriptor)
        facts = os.fstat(descriptor)
        if stat.S_ISDIR(facts.st_mode):
            names: dict[str, int] = {}
            for name in os.listdir(descriptor):
                names[name] = os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_ino
                self._opened.append(os.open(name, os.O_PATH | os.O_NOFOLLOW, dir_fd=descriptor))
            self._kept[facts.st_ino] = names
        elif stat.S_ISREG(facts.st_mode):
            self._kept[facts.st_ino] = os.pread(descriptor, facts.st_size, 0)

    def after(self, target: Path) -> Path:
        """Create in `target`, a new directory, what remains if the power fails now; return it."""
        self._restore(self._root, target)
        return target

    def _restore(self, inode: int, target: Path) -> None:
        match self._kept.get(inode, b""):
            case bytes(data):
                target.write_bytes(data)
            case names:
                target.mkdir(mode=0o700)
                for name, child in names.items():
                    self._restore(child, target / name)

    def close(self) -> None:
        """Release the inodes."""
        for descriptor in self._opened:
            os.close(descriptor)
