"""Write output files named by the user: reports, figures as JSON, pictures.

A regular file is replaced once the new content is complete, so that readers never see a partial file and a full disk
leaves the old file intact. Anything else (a device, a pipe, a terminal) is written in place.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from io import BytesIO
from typing import TYPE_CHECKING

from freetrain_parsl.storage.owned_files import user_name
from freetrain_parsl.texts import shortened, storable

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.figure import Figure

__all__ = ["write_figure", "write_output"]

_MOST_LINKS = 40  # one after another, as in the kernel


def write_output(path: Path, content: str | bytes) -> None:
    """Write an output file named by the user.

    Symbolic links of this user and of root are followed. A file that belongs to another user, has several hard links,
    or is in a directory that is not writable is overwritten in place, because a replacement would change its owner or
    break the links. To a file that standard output or standard error is redirected to, the content is appended.

    Parameters
    ----------
    path
        Output file.
    content
        The whole content; text is written as UTF-8, with what it cannot encode escaped.

    Raises
    ------
    OSError
        The file cannot be written, or it is a link of another user, who could have chosen any file. A regular file that
        was to be replaced is unchanged.
    """
    data = storable(content).encode() if isinstance(content, str) else content
    target = _without_links(path)
    try:
        present = path.stat()
    except FileNotFoundError:
        present = None
    if present is not None and not stat.S_ISREG(present.st_mode):
        _write_in_place(path, data, follow=True)  # a pipe may have no path of its own
    elif present is not None and _is_standard_stream(present):
        _write_in_place(target, data, append=True)
    elif present is not None and not _may_be_replaced(present):
        _write_in_place(target, data)
    else:
        try:
            _replace(target, data, None if present is None else stat.S_IMODE(present.st_mode))
        except PermissionError:
            if present is None:
                raise
            _write_in_place(target, data)  # the directory is not writable; the file itself may be


def write_figure(path: Path, figure: Figure) -> None:
    """Write a picture in the format given by the suffix of `path`, PNG by default; see `write_output`."""
    from matplotlib import rc_context
    from matplotlib.text import Text

    picture = BytesIO()
    for text in figure.findobj(Text):  # names of nodes, training jobs and metrics: dollars in them are not formulas
        if isinstance(text, Text):
            text.set_parse_math(False)
            text.set_text(shortened(text.get_text()))
    with rc_context({"text.parse_math": False}):  # for labels that are made when the figure is drawn
        figure.savefig(picture, format=path.suffix.removeprefix(".") or "png", dpi=130)
    write_output(path, picture.getvalue())


def _without_links(path: Path) -> Path:
    """Return where the links lead.

    Raises
    ------
    OSError
        One of them belongs to another user.
    """
    for _ in range(_MOST_LINKS):
        try:
            facts = path.lstat()
        except OSError:  # a new file, or whoever writes it says what is wrong
            break
        if not stat.S_ISLNK(facts.st_mode):
            break
        if facts.st_uid not in (os.geteuid(), 0):
            raise OSError(errno.EPERM, f"it is a link of {user_name(facts.st_uid)}; name another file")
        path = path.parent / path.readlink()
    return path


def _may_be_replaced(present: os.stat_result) -> bool:
    return stat.S_ISREG(present.st_mode) and present.st_nlink == 1 and present.st_uid == os.geteuid()


def _is_standard_stream(present: os.stat_result) -> bool:
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):  # a closed descriptor is not this file
            if stat.S_ISREG(present.st_mode) and os.path.samestat(present, os.fstat(descriptor)):
                return True
    return False


def _write_in_place(path: Path, data: bytes, *, append: bool = False, follow: bool = False) -> None:
    flags = os.O_WRONLY | os.O_CREAT | (os.O_APPEND if append else os.O_TRUNC) | (0 if follow else os.O_NOFOLLOW)
    with os.fdopen(os.open(path, flags, 0o666), "wb", buffering=0) as file:
        left = memoryview(data)
        while left:
            left = left[file.write(left) or 0 :]


def _replace(target: Path, data: bytes, mode: int | None) -> None:
    partial = target.with_name(f".{target.name[:200]}.{os.getpid()}.part")
    try:
        with partial.open("xb") as file:
            file.write(data)
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
