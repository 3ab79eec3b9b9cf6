"""Files that checkpoints of several training jobs have in common: written once, and linked into each of them.

``<root>/.common/<key>-<SHA-256>`` is a further name of such a file. The file system counts its names: a checkpoint that
is removed takes its own name away, and the file is removed here once no checkpoint has it. So every checkpoint is
complete by itself, no list of references can be wrong, and no lock is needed: who links a file at the moment when it is
removed here has it, or finds nothing and writes it anew.
"""

from __future__ import annotations

import contextlib
import errno
import os
from typing import TYPE_CHECKING, Any

from freetrain_parsl.storage.entry import checksum
from freetrain_parsl.storage.owned_files import check_owned, make_private

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["CommonFiles"]

_FOLDER = ".common"
# Of file systems without hard links, between two of them, and where a file has as many names as it may have.
_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV, errno.EMLINK})


class CommonFiles:
    """The files that the checkpoints below a root have in common. All methods raise OSError if the file system does.

    Parameters
    ----------
    root
        The checkpoint root.
    """

    def __init__(self, root: Path) -> None:
        self._path = root / _FOLDER
        self._checked: dict[tuple[str, int, int, int], dict[str, Any]] = {}  # name, inode, size, mtime -> facts

    def link(self, key: str, target: Path) -> dict[str, Any] | None:
        """Make `target` a name of the file with a key.

        Its content is compared with its checksum the first time. If it is damaged, it is no longer common.

        Parameters
        ----------
        key
            Letters and digits that identify the content.
        target
            Does not exist.

        Returns
        -------
        dict or None
            ``bytes`` and ``sha256``; ``None`` if there is no such file, or it cannot be linked: write it.
        """
        for known in self._path.glob(f"{key}-*"):
            with contextlib.suppress(FileNotFoundError):  # its last checkpoint has just been removed
                check_owned(self._path)
                facts = self._facts(known)
                if known.name == f"{key}-{facts['sha256']}":
                    return facts if _link(known, target) else None
                known.unlink()
        return None

    def add(self, key: str, source: Path, sha256: str) -> None:
        """Make a file that has been written, durably, common; does nothing in a file system without hard links.

        Parameters
        ----------
        key
            See `link`.
        source
            The file.
        sha256
            Of its content.
        """
        make_private(self._path)
        check_owned(self._path)
        with contextlib.suppress(FileExistsError):  # another training job was faster
            _link(source, self._path / f"{key}-{sha256}")

    def remove_unused(self) -> None:
        """Remove the files that no checkpoint has."""
        for known in self._path.glob("*-*"):
            with contextlib.suppress(FileNotFoundError):  # another training job was faster
                if known.stat().st_nlink == 1:
                    known.unlink()

    def _facts(self, known: Path) -> dict[str, Any]:
        found = known.stat()
        mark = known.name, found.st_ino, found.st_size, found.st_mtime_ns
        if mark not in self._checked:
            self._checked = {mark: checksum(known)}
        return self._checked[mark]


def _link(file: Path, name: Path) -> bool:
    """Give a file a further name; return whether it could be."""
    try:
        os.link(file, name)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        return False
    return True
