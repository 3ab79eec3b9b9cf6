"""The exit code of a batch job's script and the last lines of its output, read from its output files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from freetrain_parsl.texts import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

__all__ = ["TELL_EXIT_CODE", "last_words"]

_MARK = "freetrain: the script of this block exited with code"

TELL_EXIT_CODE = f"trap 'echo \"{_MARK} $?\" >&2' EXIT"
"""Shell command at the start of a block's script: batch systems report exit codes late, or only in the accounting."""

_BYTES_READ = 8192
_TRACEBACK = "Traceback (most recent call last):"
_MOST_LINES = 4
_LONGEST = 400  # characters


def last_words(resource: Mapping[str, Any] | None) -> str:
    """Describe in one line how a block's script ended.

    Parameters
    ----------
    resource
        The provider's entry for the job: ``job_stderr_path`` and ``job_stdout_path``, if it has files.

    Returns
    -------
    str
        ``exit code 1; its stderr ends with 'module: command not found'; see FILE``, or a part of it.
    """
    parts: list[str] = []
    paths = {word: (resource or {}).get(f"job_{word}_path") for word in ("stderr", "stdout")}
    for word, path in paths.items():
        if path is None:
            continue
        lines = _last_lines(Path(path))
        codes = [line.removeprefix(_MARK).strip() for line in lines if line.startswith(_MARK)]
        if codes:
            parts.append(f"exit code {codes[-1]}")
        script = str(Path(path).with_suffix(""))  # the shell puts it before its error messages
        said = [line.removeprefix(f"{script}: ") for line in lines if not line.startswith(_MARK)][-_MOST_LINES:]
        if said:
            parts += [f"its {word} ends with {' / '.join(said)[-_LONGEST:]!r}", f"see {path}"]
            break
    else:
        parts += [f"it printed nothing to {path}" for path in [paths["stderr"]] if path is not None]
    return "; ".join(parts)


def _last_lines(path: Path) -> list[str]:
    """Return the last non-empty lines of a file, without control characters and the frames of Python's tracebacks."""
    try:
        with path.open("rb") as file:
            file.seek(-min(_BYTES_READ, file.seek(0, os.SEEK_END)), os.SEEK_END)
            text = file.read(_BYTES_READ).decode(errors="replace")
    except (OSError, ValueError):  # not created yet, or removed with the script directory
        return []
    plain = (printable(line).strip() for line in _without_frames(text.splitlines()))
    return [line for line in plain if line]


def _without_frames(lines: Iterable[str]) -> Iterator[str]:
    """Leave out what is between the head of a traceback and its exception: it names files of Python and Parsl."""
    in_traceback = False
    for line in lines:
        if line == _TRACEBACK:
            in_traceback = True
        elif not (in_traceback and (line.startswith(" ") or not line)):
            in_traceback = False
            yield line
