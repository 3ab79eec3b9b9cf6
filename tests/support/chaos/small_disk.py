"""A file system small enough to be filled."""

from __future__ import annotations

import subprocess
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["small_disk"]


@contextmanager
def small_disk(directory: Path, size: int | None) -> Iterator[Path]:
    """Make a directory; with a `size` in bytes, mount a ``tmpfs`` of that size on it inside the block (needs root)."""
    directory.mkdir(mode=0o700)
    if size is None:
        yield directory
        return
    options = f"size={size},mode=0700"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(directory)], check=True, capture_output=True)
    try:
        yield directory
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True, capture_output=True)
