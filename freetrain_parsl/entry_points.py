"""Registries of extensions: the core names no extension, it finds each by its entry point.

The entry points of this package are in the file ``entry_points.txt`` beside this module, in the format of installed
distributions; a checkout needs no installation. pyproject.toml repeats them for other tools. Other distributions
must be installed.
"""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from functools import cache, cached_property
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from freetrain_parsl.errors import InvalidSettings
from freetrain_parsl.texts import text_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

logger = logging.getLogger(__name__)

__all__ = ["EntryPoints", "own_entry_points", "subclass_of"]

_OWN = "freetrain-parsl"

T = TypeVar("T")


@cache
def own_entry_points(group: str) -> Mapping[str, str]:
    """Return the entry points of this package in a group: name -> ``module:attribute``, in the order of the file."""
    text = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8")
    _, _, section = text.partition(f"[{group}]\n")
    lines = section.partition("\n[")[0].splitlines()
    return {name: value for name, _, value in (line.partition(" = ") for line in lines if line)}


def subclass_of(base: type[T]) -> Callable[[Any], type[T]]:
    """Return a reader of entry points that name subclasses of `base`; it raises `TypeError` for anything else."""

    def read(found: Any) -> type[T]:
        if not (isinstance(found, type) and issubclass(found, base)):
            raise TypeError(f"{found!r} is not a subclass of {base.__name__}")
        return found

    return read


class EntryPoints(MutableMapping[str, T], Generic[T]):
    """The objects in a group of entry points, by name; each is loaded when it is first used.

    A name can also be set, for this process only.

    Parameters
    ----------
    group
        Name of the group.
    what
        Term for its objects in messages.
    read
        Converts the object that the entry point names; raises an exception if it has the wrong type.

    Raises
    ------
    InvalidSettings
        On access to a name that several distributions register, or that cannot be loaded from another distribution.
    """

    def __init__(self, group: str, what: str, read: Callable[[Any], T] = lambda found: found) -> None:
        self._group, self._what, self._read = group, what, read
        self._loaded: dict[str, T] = {}
        self._unusable: set[str] = set()

    @cached_property
    def _registered(self) -> dict[str, dict[str, str]]:
        """Name -> distribution -> location of the object; this package's first."""
        from importlib.metadata import entry_points  # slow, and most commands do not need it

        found = {name: {_OWN: value} for name, value in own_entry_points(self._group).items()}
        for point in sorted(entry_points(group=self._group)):
            distribution = point.dist.name if point.dist is not None else point.value
            if distribution != _OWN:  # an installed version of this package may be older than its file
                found.setdefault(point.name, {})[distribution] = point.value
        return found

    def __getitem__(self, name: str) -> T:
        if name not in self._loaded:
            self._loaded[name] = self._load(name, self._registered[name])
        return self._loaded[name]

    def _load(self, name: str, places: Mapping[str, str]) -> T:
        if len(places) > 1:
            raise InvalidSettings(
                f"{self._what} {name!r} is registered by {' and '.join(places)}; uninstall all but one"
            )
        ((distribution, value),) = places.items()
        try:
            return self._read(resolve_name(value))
        except (Exception, SystemExit) as error:  # the modules of other distributions may raise any, and exit
            if distribution == _OWN:
                raise
            why = " ".join(text_of(error).split())
            raise InvalidSettings(
                f"{self._what} {name!r} of {distribution} cannot be loaded from {value}: {type(error).__name__}: {why}"
            ) from error

    def __setitem__(self, name: str, value: T) -> None:
        self._loaded[name] = value

    def __delitem__(self, name: str) -> None:
        del self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys((*self._registered, *self._loaded)))

    def __len__(self) -> int:
        return len(self._registered.keys() | self._loaded.keys())

    def __contains__(self, name: object) -> bool:
        return name in self._loaded or name in self._registered

    def usable(self) -> Iterator[T]:
        """Yield the objects that can be loaded; the log names each of the others once."""
        for name in self:
            if name in self._unusable:
                continue
            try:
                found = self[name]
            except InvalidSettings as error:
                self._unusable.add(name)
                logger.warning("%s", error)
            else:
                yield found

    def find(self, name: str) -> T:
        """Return the object of this name.

        Raises
        ------
        InvalidSettings
            There is none, or it cannot be loaded.
        """
        if name not in self:
            raise InvalidSettings(f"unknown {self._what} {name!r}; available: {', '.join(sorted(self))}")
        return self[name]
