"""Which paths a run directory may have."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from freetrain_parsl.errors import InvalidSettings

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["check_run_directory"]

_PLAIN: Final = re.compile(r"[\w@%+=:,./~-]+")  # shells leave letters of all languages unchanged


def check_run_directory(directory: Path) -> None:
    """Refuse a run directory that shells would change: Parsl puts it unquoted into job scripts and commands.

    Raises
    ------
    InvalidSettings
        The path has a blank, a quote or another special character.
    """
    if not _PLAIN.fullmatch(str(directory)):
        raise InvalidSettings(
            f"run directory {str(directory)!r} may hold letters, digits and @%+=:,./_~- only, because it is part of "
            "job scripts; choose another run directory"
        )
