"""The run directory: which paths it may have, and its files, which are private to the user."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import stat
import sys
from typing import IO, TYPE_CHECKING, Final

from freetrain_parsl.errors import InvalidInput, InvalidSettings
from freetrain_parsl.screen import say
from freetrain_parsl.storage.owned_files import open_directory, require_own_entries, user_name

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["RunLog", "check_new_run_directory", "check_run_directory", "keep_private", "log_to"]

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

    It exists; `made`: this process has just made it.

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


class RunLog(logging.FileHandler):
    """A handler that logs to a private file; write errors are reported once on standard error, not for each line."""

    def __init__(self, path: Path) -> None:
        self._reported = False
        super().__init__(path, encoding="utf-8", errors="backslashreplace")  # names of files may be any bytes

    def _open(self) -> IO[str]:  # type: ignore[override]  # typeshed promises a TextIOWrapper
        stream = super()._open()
        os.fchmod(stream.fileno(), 0o600)
        return stream

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's own name
        """Report the first failure to write, and continue."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._reported:
            self._reported = True
            with contextlib.suppress(OSError, ValueError):  # standard error may be closed, or on the same disk
                say(f"freetrain: cannot log to {self.baseFilename}: {error.strerror or error}", err=True)

    def close(self) -> None:
        """Close the file, whether or not its last lines can be written."""
        with contextlib.suppress(OSError):
            super().close()


def log_to(path: Path) -> logging.Handler:
    """Write this package's log messages to a file; Parsl's logs contain only Parsl's messages."""
    handler = RunLog(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(threadName)s %(name)s: %(message)s"))
    ours = logging.getLogger("freetrain_parsl")
    ours.addHandler(handler)
    if ours.level == logging.NOTSET:
        ours.setLevel(logging.INFO)
    return handler


def keep_private(directory: Path) -> None:
    """Make the user's files in a directory private; Parsl creates its logs and scripts with the umask."""
    for folder, _, names in os.walk(directory):
        for path in (folder, *(os.path.join(folder, name) for name in names)):  # noqa: PTH118 - as os.walk gives them
            with contextlib.suppress(OSError):  # it has been removed meanwhile
                facts = os.lstat(path)
                if not stat.S_ISLNK(facts.st_mode) and facts.st_uid == os.geteuid() and facts.st_mode & 0o077:
                    os.chmod(path, stat.S_IMODE(facts.st_mode) & 0o700)  # noqa: PTH101 - as above
