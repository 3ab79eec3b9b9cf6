"""Which code is the user's: not Python's, not an installed package's, and not FreeTrain's."""

from __future__ import annotations

import site
import sys
import sysconfig
from functools import cache
from pathlib import Path

from freetrain_parsl.location import PACKAGE

__all__ = ["is_users_file", "is_users_type"]

_APPS = PACKAGE / "apps"  # the example apps are installed there, but are written as users write theirs


@cache
def is_users_file(file: str) -> bool:
    """Return whether code of this file is the user's; cells of notebooks are."""
    if file.startswith("<frozen"):
        return False
    path = Path(file)
    if path.is_relative_to(_APPS):
        return True
    return not any(path.is_relative_to(place) for place in _library_places())


def is_users_type(kind: type) -> bool:
    """Return whether a class is defined in the user's code."""
    if kind.__module__ == "__main__":
        return True
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return file is not None and is_users_file(file)


@cache
def _library_places() -> tuple[Path, ...]:
    places = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    places += [*site.getsitepackages(), site.getusersitepackages(), str(PACKAGE)]
    found = {Path(place) for place in places if place}
    return tuple(found | {place.resolve() for place in found})
