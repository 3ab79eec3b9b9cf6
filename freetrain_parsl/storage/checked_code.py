"""Which code was checked by ``freetrain check``, and for which a check was suggested: in the user's state directory.

One line for each code: its digest and the function. The file is replaced as a whole; of two processes that write at the
same time, one line may be lost, and a check is suggested once more.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from freetrain_parsl.storage.atomic_files import replace_file

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["note_checked", "state_directory", "take_unchecked"]

_FILE = "checked-code"
_MOST = 1000  # lines; the oldest are dropped
_noted: set[str] = set()  # by this process, also if the file cannot be written


def state_directory() -> Path:
    """Return the directory for what FreeTrain remembers about a user's work, by the XDG specification."""
    given = os.environ.get("XDG_STATE_HOME", "")
    root = Path(given) if Path(given).is_absolute() else Path.home() / ".local" / "state"
    return root / "freetrain"


def note_checked(digest: str, name: str) -> None:
    """Remember that code was checked, so that a check is not suggested any more."""
    take_unchecked({digest: name})


def take_unchecked(codes: Mapping[str, str]) -> list[str]:
    """Return the digests for which a check is to be suggested, once: they were never given to this function before.

    `codes` maps digests to names of functions, for people who read the file.
    """
    try:
        lines = (state_directory() / _FILE).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):  # not there yet, unreadable, or no text
        lines = []
    known = {line.partition(" ")[0] for line in lines} | _noted
    new = [digest for digest in codes if digest not in known]
    if new:
        _noted.update(new)
        _write([*lines, *(f"{digest} {codes[digest]}" for digest in new)][-_MOST:])
    return new


def _write(lines: list[str]) -> None:
    """Replace the file; a state directory that cannot be written only means that a check is suggested again."""
    with suppress(OSError):
        directory = state_directory()
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_file(directory / _FILE, "".join(f"{line}\n" for line in lines).encode())
