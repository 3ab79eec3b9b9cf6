"""The files that a process has loaded: modules of Python, and libraries."""

from __future__ import annotations

import os
import sys
import time
import zlib
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["IMAGE", "IMAGE_FAULT", "loaded_files", "pack_files", "seconds_waited", "unpack_files", "waiting_counted"]

IMAGE: Final = "FREETRAIN_IMAGE"
"""Environment variable: directory of the image that this node was started from."""

IMAGE_FAULT: Final = "FREETRAIN_IMAGE_FAULT"
"""Environment variable: why this node was not started from its image."""

_waited = 0.0
_LARGEST: Final = 8 << 20  # bytes of names


@contextmanager
def waiting_counted() -> Iterator[None]:
    """Count the time that imports wait for files: what has neither a processor nor waits for one."""
    global _waited  # noqa: PLW0603 - for the processes that are forked from this one
    begin, busy = time.monotonic(), time.process_time() + _queued()
    yield
    _waited += max(0.0, time.monotonic() - begin - (time.process_time() + _queued() - busy))


def seconds_waited() -> float:
    """Return the seconds that `waiting_counted` has counted in this process and those that it was forked from."""
    return _waited


def _queued() -> float:
    """Return the seconds for which this thread could have run, but others had the processors."""
    with suppress(OSError, IndexError, ValueError):  # a kernel without these statistics
        return int(Path("/proc/thread-self/schedstat").read_text(encoding="ascii").split()[1]) / 1e9
    return 0.0


def loaded_files() -> set[str]:
    """Return the files of this process's modules, sources and compiled ones, and of its mapped libraries."""
    found = set()
    for module in list(sys.modules.values()):
        spec = getattr(module, "__spec__", None)
        for path in (getattr(module, "__file__", None), getattr(spec, "cached", None)):
            if isinstance(path, str):
                found.add(str(Path(path).absolute()))
    with Path("/proc/self/maps").open("rb") as maps:
        found |= {os.fsdecode(line.split(None, 5)[5].rstrip(b"\n")) for line in maps if b" /" in line}
    return {name for name in found if "\n" not in name}


def pack_files(files: set[str]) -> bytes:
    """Compress names of files for a message."""
    return zlib.compress(os.fsencode("\n".join(sorted(files))))


def unpack_files(payload: bytes) -> list[str]:
    """Return the names that `pack_files` has compressed.

    Raises
    ------
    ValueError
        The payload is damaged, or too large.
    """
    reader = zlib.decompressobj()
    try:
        text = reader.decompress(payload, _LARGEST)
    except zlib.error as error:
        raise ValueError(f"the names of files are damaged: {error}") from None
    if reader.unconsumed_tail:
        raise ValueError("there are too many names of files")
    return os.fsdecode(text).split("\n")
