"""Trackers: their interface, their settings, and the files with the values that they get.

A setting is a tracker's name, or a mapping from names to their options, or a list of either. A file has a JSON object a
line, for each name in rising steps.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import sys
from dataclasses import dataclass, field
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, TypeAlias

from freetrain_parsl.entry_points import EntryPoints
from freetrain_parsl.errors import InvalidSettings, did_you_mean
from freetrain_parsl.texts import storable, text_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

__all__ = [
    "TRACKERS",
    "Outcome",
    "Row",
    "TrackedTraining",
    "Tracker",
    "TrackerSpec",
    "Value",
    "as_line",
    "fresh",
    "importable",
    "last_steps",
    "parse_row",
    "parse_trackers",
    "read_rows",
]

Value: TypeAlias = bool | int | float | str
"""A value of `session.log`."""

Outcome: TypeAlias = Literal["finished", "failed", "cancelled", "interrupted"]
"""How a training job ended; an interrupted one continues later, as after a stop of its campaign."""

_MOST_STEPS = 1 << 53
_LARGEST_INT = (1 << 63) - 1
_LATEST = 1e12  # seconds since the epoch

TRACKERS: Final = EntryPoints["type[Tracker]"]("freetrain.trackers", "tracker")
"""Name -> class."""


@dataclass(frozen=True)
class TrackedTraining:
    """A training job, as trackers see it.

    Parameters
    ----------
    name
        Its name.
    id
        The same in all fragments and with all drivers, and of no other training job: 16 hexadecimal digits.
    directory
        A directory for the tracker's files about it, the same each time; exists, private to the user.
    """

    name: str
    id: str
    directory: Path


@dataclass(frozen=True)
class Row:
    """The values of one step.

    Parameters
    ----------
    step
        Number of optimizer steps.
    time
        Seconds since the epoch.
    values
        Name -> value.
    """

    step: int
    time: float
    values: Mapping[str, Value]


class Tracker(Protocol):
    """Receives the values of one job; used by one thread. Any exception makes it be closed and opened again later.

    One training job has one run in the tracker. What it has of that run it knows best, after a crash, too: so `open`
    says it, and only what is missing follows.

    The class of a registered tracker may state what is checked before a training job starts: ``options``, the names of
    its parameters, which are then strings, and ``package``, the package that it imports and what ``pip install`` needs
    for it.
    """

    def open(self, training: TrackedTraining) -> Mapping[str, int]:
        """Create the training job's run, or open the one with its id.

        Returns
        -------
        steps
            The last step of each value that the run has: name -> step.
        """

    def log(self, rows: Sequence[Row]) -> None:
        """Add values; for each name, steps rise."""

    def close(self, outcome: Outcome) -> None:
        """Make everything durable and end the run; it may be opened again."""


def parse_row(text: str) -> Row | None:
    """Return a row; ``None`` if the text is not one."""
    try:
        row = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict):
        return None
    step, time, values = row.get("step"), row.get("time"), row.get("values")
    if not isinstance(step, int) or not 0 <= step < _MOST_STEPS or not isinstance(values, dict):
        return None
    if not isinstance(time, (int, float)) or not 0 <= time < _LATEST:
        return None
    return Row(
        step,
        time,
        {storable(name): _value(value) for name, value in values.items() if isinstance(value, (str, int, float))},
    )


def _value(value: Value) -> Value:
    """Return a value that every tracker can store: one that it refuses would hold up all that follow."""
    if isinstance(value, str):
        return storable(value)
    if isinstance(value, int) and abs(value) > _LARGEST_INT:
        try:
            return float(value)
        except OverflowError:
            return math.inf if value > 0 else -math.inf
    return value


def as_line(row: Row) -> str:
    """Return a row as it is in the file."""
    return json.dumps({"step": row.step, "time": row.time, "values": dict(row.values)}) + "\n"


def fresh(rows: Iterable[Row], steps: dict[str, int]) -> Iterator[Row]:
    """Yield the rows without the values whose steps do not rise; updates `steps`: name -> last step."""
    for row in rows:
        values = {name: value for name, value in row.values.items() if row.step > steps.get(name, -1)}
        if values:
            steps.update(dict.fromkeys(values, row.step))
            yield Row(row.step, row.time, values)


def read_rows(path: Path, offset: int = 0, most: int = 1 << 20) -> tuple[list[Row], int]:
    """Return the rows of a file after `offset`, in bytes, and where the next ones begin; of about `most` bytes.

    An incomplete line is left for later; one that is damaged is skipped.
    """
    try:
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read(most)
            if not data.endswith(b"\n"):
                data += file.readline()
    except FileNotFoundError:
        return [], offset
    complete = data[: data.rfind(b"\n") + 1]
    lines = complete.decode("utf-8", errors="replace").split("\n")
    return [row for line in lines if (row := parse_row(line)) is not None], offset + len(complete)


def last_steps(path: Path) -> dict[str, int]:
    """Return the last step of each name in a file."""
    steps: dict[str, int] = {}
    offset = -1
    after = 0
    while after != offset:
        offset = after
        rows, after = read_rows(path, offset)
        for _ in fresh(rows, steps):
            pass
    return steps


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
