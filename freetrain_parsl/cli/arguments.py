"""Arguments that several verbs share: lists of names, and files to write."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from freetrain_parsl.errors import InvalidSettings, UsageError, did_you_mean

__all__ = ["check_output_files", "known_name", "split_names"]


def split_names(option: str, text: str) -> list[str]:
    """Split a list of names, without duplicates."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise InvalidSettings(f"{option}: no name in {text!r}")
    return list(dict.fromkeys(names))


def known_name(option: str, name: str, known: Iterable[str]) -> str:
    """Return a valid name; otherwise raise an error that lists the valid ones."""
    names = sorted(known)
    if name not in names:
        raise InvalidSettings(f"{option}: unknown {name!r}{did_you_mean(name, names)}; available: {', '.join(names)}")
    return name


def check_output_files(inputs: Sequence[Path], targets: Mapping[str, Path | None]) -> None:
    """Reject output files that cannot be written, before the work starts."""
    taken = {file.resolve(): "an input" for file in inputs}
    for option, file in targets.items():
        if file is None:
            continue
        folder = file.absolute().parent
        if not folder.is_dir():
            raise UsageError(f"{option} {file}: there is no directory {folder}; create it, or choose another")
        if file.is_dir() or not os.access(file if file.exists() else folder, os.W_OK):
            raise UsageError(f"{option} {file}: cannot be written; choose another file")
        if (other := taken.setdefault(file.resolve(), option)) != option:
            raise UsageError(f"{option} {file}: this is {other} already; choose another file")
