"""Which paths a run directory may have."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Final

from freetrain_parsl.errors import InvalidInput, InvalidSettings
from freetrain_parsl.storage.owned_files import open_directory, require_own_entries, user_name

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["check_new_run_directory", "check_run_directory"]

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


def check_new_run_directory(directory: Path, *, made: bool) -> None:
    """Refuse the directory of a new run that is not this user's, before anything in it is looked at.

    Parameters
    ----------
    directory
        It exists.
    made
        Whether this process has just made it.

    Raises
    ------
    InvalidInput
        It, or something in it, belongs to another user: somebody has taken its name, or the file system gives files to
        another user.
    OSError
        It cannot be accessed.
    """
    with open_directory(directory) as opened:
        if opened.owner == os.geteuid():
            os.fchmod(opened.descriptor, 0o700)  # of an empty directory, to which others may have had access
            require_own_entries(directory, "choose another directory")
            return
        owner = user_name(opened.owner)
    if made:
        raise InvalidInput(
            f"{directory} was made by {user_name(os.geteuid())} and belongs to {owner}: its file system gives files to "
            "another user; choose a run directory on another file system"
        )
    raise InvalidInput(f"{directory} belongs to {owner}, who could have put anything there; choose another directory")
