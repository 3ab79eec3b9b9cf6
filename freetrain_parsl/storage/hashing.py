"""Checksums of files, computed while writing or by reading them."""

from __future__ import annotations

import hashlib
from typing import IO, TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_CHUNK = 1 << 20


class Sink(Protocol):
    """Receives the bytes of a state."""

    def write(self, data: bytes, /) -> int:
        """Append `data` and return its length."""

    def flush(self) -> None:
        """Write out buffered data."""


class HashingSink:
    """Passes bytes on to a file and computes their count and SHA-256.

    Parameters
    ----------
    file
        Open for writing.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self.count = 0
        self.problem: OSError | None = None

    def write(self, data: bytes, /) -> int:
        """See `Sink`."""
        self._digest.update(data)
        self.count += len(data)
        try:
            return self._file.write(data)
        except OSError as error:
            self.problem = error
            raise

    def flush(self) -> None:
        """See `Sink`."""
        self._file.flush()

    def hexdigest(self) -> str:
        """Return the SHA-256 so far."""
        return self._digest.hexdigest()

    def fill(self, write: Callable[[Sink], object]) -> None:
        """Call `write` on this sink, and raise the file system's own error instead of what C++ code turned it into.

        Raises
        ------
        OSError
            The write failed.
        """
        try:
            write(self)
        except Exception as error:
            if self.problem is not None:
                raise self.problem from error
            raise


def checksum(path: Path) -> dict[str, Any]:
    """Read a file and return its manifest entry: ``bytes`` and ``sha256``.

    Raises
    ------
    OSError
        The file cannot be read.
    """
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return {"bytes": size, "sha256": digest.hexdigest()}
