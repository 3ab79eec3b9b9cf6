"""Which trackers a training has: a name, or a mapping from names to their options, or a list of either."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Final

from freetrain_parsl.entry_points import EntryPoints
from freetrain_parsl.errors import InvalidSettings, did_you_mean
from freetrain_parsl.texts import text_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from freetrain_parsl.executor.values.tracker import Tracker

__all__ = ["TRACKERS", "TrackerSpec", "importable", "parse_trackers"]


TRACKERS: Final = EntryPoints["type[Tracker]"]("freetrain.trackers", "tracker")
"""Name -> class."""


@dataclass(frozen=True)
class TrackerSpec:
    """A tracker with its options: the `kind` is the name of a registered one, or ``module:Class``."""

    kind: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def make(self) -> Tracker:
        """Create the tracker."""
        tracker: Tracker = (resolve_name(self.kind) if ":" in self.kind else TRACKERS[self.kind])(**self.options)
        return tracker

    def as_json(self) -> dict[str, Any]:
        """Describe it, with the directory from which its module was imported if it is not registered."""
        described = {"kind": self.kind, "options": dict(self.options)}
        return {**described, "import_path": _import_path(self.kind)} if ":" in self.kind else described


def parse_trackers(value: Any, beside: Path | None = None) -> tuple[TrackerSpec, ...]:
    """Return the trackers that a setting names; ``None`` or an empty list: none.

    Modules can be imported from the directory `beside`, too.

    Raises
    ------
    InvalidSettings
        It names an unknown tracker or option, or one whose package is not installed.
    """
    specs = tuple(_specs(value, beside))
    kinds = [spec.kind for spec in specs]
    for kind in kinds:
        if kinds.count(kind) > 1:
            raise InvalidSettings(f"tracker {kind!r} is named twice")
    return specs


def _specs(value: Any, beside: Path | None) -> Iterator[TrackerSpec]:
    if value is None:
        return
    if isinstance(value, str):
        yield _checked(value, {}, beside)
    elif isinstance(value, dict):
        for kind, options in value.items():
            yield _checked(kind, {} if options is None else options, beside)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _specs(each, beside)
    else:
        raise InvalidSettings(f"tracker is a name, or a mapping from names to options, got {value!r}")


def _checked(kind: Any, options: Any, beside: Path | None) -> TrackerSpec:
    if not isinstance(kind, str) or not isinstance(options, dict) or not all(isinstance(key, str) for key in options):
        raise InvalidSettings(f"tracker is a name, or a mapping from names to options, got {kind!r}: {options!r}")
    spec = TrackerSpec(kind, options)
    if ":" not in kind:
        _check_registered(kind, options)
    elif kind.startswith("__main__:"):
        raise InvalidSettings(f"tracker {kind!r}: another process uses it, so its class must be in a module")
    elif beside is not None:
        importable(beside)
    try:
        spec.make()
    except InvalidSettings as error:
        raise InvalidSettings(f"tracker {kind!r}: {error}") from None
    except (Exception, SystemExit) as error:  # noqa: BLE001 - of the user's code, which may raise anything, or exit
        raise InvalidSettings(
            f"tracker {kind!r} cannot be created: {type(error).__name__}: {' '.join(text_of(error).split())}"
        ) from None
    for name, given in options.items():
        if not _is_json(given):
            raise InvalidSettings(
                f"tracker {kind!r}: option {name!r} is of type {type(given).__name__}; options are passed to another "
                "process as JSON: use texts, numbers, lists and mappings"
            )
    return spec


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def importable(directory: Path) -> None:
    """Search the modules in a directory first when one is imported."""
    if str(directory) not in sys.path:
        sys.path.insert(0, str(directory))
    importlib.invalidate_caches()


def _import_path(reference: str) -> str | None:
    """Return the directory in which the import of a tracker's module has begun; ``None`` if it is not in a file."""
    module = reference.partition(":")[0]
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:
        return None
    levels = module.count(".") + (Path(file).stem == "__init__")
    return str(Path(file).absolute().parents[levels])


def _check_registered(kind: str, options: Mapping[str, Any]) -> None:
    """Check the name of a registered tracker, its package, and its options if its class states them."""
    if kind not in TRACKERS:
        known = ", ".join(TRACKERS)
        raise InvalidSettings(
            f"there is no tracker {kind!r}{did_you_mean(kind, TRACKERS)}; known: {known}, module:Class"
        )
    tracker = TRACKERS[kind]
    stated: Sequence[str] = getattr(tracker, "options", ())
    for name, given in options.items() if stated else ():
        if name not in stated:
            near = did_you_mean(name, stated)
            raise InvalidSettings(f"tracker {kind!r} has no option {name!r}{near}; it has {', '.join(stated)}")
        if not isinstance(given, str):
            raise InvalidSettings(f"tracker {kind!r}: {name} must be a string, got {given!r}")
    package, requirement = getattr(tracker, "package", ("", ""))
    if package and importlib.util.find_spec(package) is None:
        raise InvalidSettings(f"tracker {kind!r}: the package {package} is not installed: pip install '{requirement}'")
