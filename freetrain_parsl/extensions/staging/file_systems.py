"""Which file systems the nodes of a cluster share."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

__all__ = ["file_system_of", "is_shared"]

_LOCAL: Final = "ext2 ext3 ext4 xfs btrfs zfs f2fs jfs tmpfs ramfs rootfs overlay squashfs erofs iso9660 devtmpfs"


def file_system_of(path: str, mounts: Path = Path("/proc/self/mounts")) -> str:
    """Return the type of the file system that a path is on, empty: unknown."""
    best, kind = "", ""
    real = f"{os.path.realpath(path)}/"
    try:
        lines = mounts.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return ""
    for line in lines:
        _, point, found, *_ = line.split(" ")
        point = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), point)
        if real.startswith(f"{point.rstrip('/')}/") and len(point) >= len(best):
            best, kind = point, found
    return kind


def is_shared(kind: str) -> bool:
    """Return whether nodes may share a file system of a type: of any that is not known to be a node's own."""
    return kind != "" and kind not in _LOCAL.split()
