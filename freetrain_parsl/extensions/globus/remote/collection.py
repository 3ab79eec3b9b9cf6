"""What of a campaign travels to a site: its file, the files that it names, and the Python files of its apps.

Data, hidden directories such as ``.git``, environments and what looks like a secret stay here.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from freetrain_parsl.campaign.files.yaml_file import Section, Variables, user_path
from freetrain_parsl.campaign.store import DATABASE
from freetrain_parsl.errors import InvalidInput
from freetrain_parsl.planning.curves.scaling import LEARN
from freetrain_parsl.strict_yaml import read_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["Collection", "collect"]

_MARKS = ("pyvenv.cfg", DATABASE)  # of a virtual environment, and of a run directory
_OTHER_DIRECTORIES = re.compile(r"\..*|__pycache__|node_modules|site-packages|.*\.egg-info|freetrain-run-.*")
_SECRET_FILES = re.compile(
    r"\..*|id_(rsa|dsa|ecdsa|ed25519).*|.*\.(pem|key|p12|pfx|jks|kdbx|gpg|asc|keytab)"
    r"|(.*[_.-])?token(\.[a-z0-9]+)?"  # but not tokens.py or token_stream.py, which prepare texts
    r"|_?netrc|(.*[_.-])?(secrets?|credentials?|passwords?|passwd|api_?keys?)([_.-].*)?",
    re.IGNORECASE,
)
_MOST_DIRECTORIES = 2000


@dataclass(frozen=True)
class Collection:
    """Files that travel.

    Parameters
    ----------
    files
        Name in the archive -> file here.
    campaign
        Name of the campaign file.
    left_out
        Python files that stay here because of their names.
    """

    files: dict[str, Path]
    campaign: str
    left_out: tuple[str, ...]


def collect(campaign: Path, variables: Variables, include: Sequence[Path] = ()) -> Collection:
    """Find the files of a campaign, and further ones to `include`; `variables` are values of ``${NAME}`` in its file.

    Raises
    ------
    InvalidInput
        A file is named by an absolute path, is missing, is a link, or looks like a secret; the message gives file
        and line of the campaign.
    """
    file = _absolute(campaign)
    directories, named = {file.parent}, {file}
    for section, key, text in _names(campaign, variables):
        path = section.checked(_relative, text, file.parent, key=key)
        named.add(path)
        if key == "app":
            directories.add(path.parent)
    named |= {_absolute(path) for path in include}
    for path in named:
        if path.is_symlink() or not path.is_file():
            raise InvalidInput(f"{path}: no such file, or a link; only regular files travel to a site")
        if _SECRET_FILES.fullmatch(path.name):
            raise InvalidInput(f"{path} looks like a secret, by its name; it does not travel to a site")
    found, left_out = _python_files(directories)
    paths = named | found
    root = Path(os.path.commonpath([path.parent for path in paths]))
    return Collection(
        files={path.relative_to(root).as_posix(): path for path in sorted(paths)},
        campaign=file.relative_to(root).as_posix(),
        left_out=tuple(sorted(path.relative_to(root).as_posix() for path in left_out)),
    )


def _names(campaign: Path, variables: Variables) -> Iterator[tuple[Section, str, str]]:
    """Yield the files that a campaign names, with their section and key."""
    top = Section.parse(read_text(campaign, "campaign file"), str(campaign), variables)
    for section in top.sections("trainings"):
        place = section.required("app", "path.py:function").rpartition(":")[0]
        if place.endswith(".py") or "/" in place:
            yield section, "app", place
        scaling = section.value("scaling")
        if isinstance(scaling, str) and scaling != LEARN:
            yield section, "scaling", scaling


def _relative(text: str, directory: Path) -> Path:
    if user_path(text).is_absolute():
        raise InvalidInput(
            f"{text[:80]!r}: give the path relative to this file; an absolute one is of this machine only"
        )
    return _absolute(directory / text)


def _python_files(directories: set[Path]) -> tuple[set[Path], set[Path]]:
    """Return the Python files below directories, and those that are left out for their names."""
    found: set[Path] = set()
    left_out: set[Path] = set()
    seen = 0
    for top in directories:
        for place, below, files in os.walk(top):
            seen += 1
            if seen > _MOST_DIRECTORIES:
                raise InvalidInput(f"{top} has more than {_MOST_DIRECTORIES} directories; give the campaign its own")
            below[:] = [
                name
                for name in below
                if not _OTHER_DIRECTORIES.fullmatch(name)
                and not any(Path(place, name, mark).exists() for mark in _MARKS)
            ]
            for path in (Path(place, name) for name in files if name.endswith(".py")):
                if not path.is_symlink():
                    (left_out if _SECRET_FILES.fullmatch(path.name) else found).add(path)
    return found, left_out


def _absolute(path: Path) -> Path:
    return Path(os.path.normpath(path.absolute()))
