"""The site file of the current directory, which ``freetrain init`` writes: the default of ``--config``."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from freetrain_parsl.campaign.site.site import Site
from freetrain_parsl.strict_yaml import read_text

if TYPE_CHECKING:
    from freetrain_parsl.campaign.files.yaml_file import Variables

__all__ = ["SITE_FILE", "OwnSite", "find_own_site"]

SITE_FILE = Path("site.yaml")
"""Name of the file. Parent directories are not searched: what is used can be seen in the directory."""


@dataclass(frozen=True)
class OwnSite:
    """What the current directory has for a command without ``--config``.

    Parameters
    ----------
    site
        The site of `SITE_FILE`; ``None`` if there is none, or if it is not used.
    remark
        One line for the user: that the file is used, or why not; empty if there is none.
    """

    site: Site | None = None
    remark: str = ""


class _NotUsed(Exception):
    """The file could be somebody else's; the text says why."""


class _Absent(Exception):
    """There is no file."""


def find_own_site(variables: Variables, directory: Path = Path(), *, option: str = "--config") -> OwnSite:
    """Read the site file of the current directory, if it is the caller's.

    Its ``worker_init`` runs as the caller: a file of another user, or one that any user can write, is used only when
    it is named with ``--config``.

    Parameters
    ----------
    variables
        Values of ``${NAME}`` in it.
    directory
        Where to look instead of in the current directory.
    option
        What names another file, for the remark.

    Raises
    ------
    InvalidInput
        The caller's file cannot be read, or a value in it is invalid.
    """
    try:
        text = read_text(directory / SITE_FILE, "site file", opener=_open_own)
    except _Absent:
        return OwnSite()
    except _NotUsed as error:
        return OwnSite(remark=f"{SITE_FILE} is not used, {error}; to use it nevertheless, name it with {option}")
    site = Site.parse(text, str(directory / SITE_FILE), variables)
    return OwnSite(site, f"using {SITE_FILE}; {option} chooses another site")


def _open_own(name: str, flags: int) -> int:
    """Open a file as `open` does, but only the caller's own regular file: what is checked is what is read."""
    try:
        # Without waiting for the writer of a pipe.
        descriptor = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise _Absent from None
    except OSError as error:
        why = "it is a symbolic link" if Path(name).is_symlink() else f"it cannot be opened: {error.strerror or error}"
        raise _NotUsed(why) from None
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        why = "it is not a regular file"
    elif found.st_uid != os.geteuid():
        why = f"it belongs to another user (uid {found.st_uid})"
    elif found.st_mode & stat.S_IWOTH:
        why = "any user can write it"
    else:
        return descriptor
    os.close(descriptor)
    raise _NotUsed(why)
