"""Which trackers a training has: a name, or a mapping from names to their options, or a list of either."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from freetrain_parsl.errors import InvalidSettings, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from freetrain_parsl.trackers.base import Tracker

__all__ = ["TrackerSpec", "parse_trackers"]


class _Kind(NamedTuple):
    """A tracker of this package: where it is, and the package that it needs."""

    reference: str
    options: tuple[str, ...]
    package: str | None = None
    extra: str = ""


_KINDS = {
    "csv": _Kind("freetrain_parsl.trackers.csv_file:CsvTracker", ("directory",)),
    "mlflow": _Kind(
        "freetrain_parsl.trackers.mlflow:MlflowTracker", ("tracking_uri", "experiment"), "mlflow", "mlflow"
    ),
    "tensorboard": _Kind(
        "freetrain_parsl.trackers.tensorboard:TensorBoardTracker", ("directory",), "tensorboard", "tensorboard"
    ),
    "wandb": _Kind("freetrain_parsl.trackers.wandb:WandbTracker", ("project", "entity", "mode"), "wandb", "wandb"),
}


@dataclass(frozen=True)
class TrackerSpec:
    """A tracker with its options.

    Parameters
    ----------
    kind
        Name of one of this package's trackers, or ``module:Class`` of another.
    options
        Keyword arguments.
    """

    kind: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def make(self) -> Tracker:
        """Create the tracker."""
        reference = _KINDS[self.kind].reference if self.kind in _KINDS else self.kind
        tracker: Tracker = _load(reference)(**self.options)
        return tracker

    def as_json(self) -> dict[str, Any]:
        """Describe it."""
        return {"kind": self.kind, "options": dict(self.options)}


def parse_trackers(value: Any) -> tuple[TrackerSpec, ...]:
    """Return the trackers that a setting names; ``None`` or an empty list: none.

    Raises
    ------
    InvalidSettings
        It names an unknown tracker or option, or one whose package is not installed.
    """
    specs = tuple(_specs(value))
    kinds = [spec.kind for spec in specs]
    for kind in kinds:
        if kinds.count(kind) > 1:
            raise InvalidSettings(f"tracker {kind!r} is named twice")
    return specs


def _specs(value: Any) -> Iterator[TrackerSpec]:
    if value is None:
        return
    if isinstance(value, str):
        yield _checked(value, {})
    elif isinstance(value, dict):
        for kind, options in value.items():
            yield _checked(kind, {} if options is None else options)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _specs(each)
    else:
        raise InvalidSettings(f"tracker is a name, or a mapping from names to options, got {value!r}")


def _checked(kind: Any, options: Any) -> TrackerSpec:
    if not isinstance(kind, str) or not isinstance(options, dict) or not all(isinstance(key, str) for key in options):
        raise InvalidSettings(f"tracker is a name, or a mapping from names to options, got {kind!r}: {options!r}")
    spec = TrackerSpec(kind, options)
    if ":" not in kind:
        _check_own(kind, options)
    try:
        spec.make()
    except InvalidSettings as error:
        raise InvalidSettings(f"tracker {kind!r}: {error}") from None
    except (ImportError, AttributeError, TypeError) as error:
        raise InvalidSettings(f"tracker {kind!r} cannot be created: {error}") from None
    return spec


def _check_own(kind: str, options: Mapping[str, Any]) -> None:
    """Check the name and the options of one of this package's trackers."""
    if kind not in _KINDS:
        known = ", ".join(_KINDS)
        raise InvalidSettings(f"there is no tracker {kind!r}{did_you_mean(kind, _KINDS)}; known: {known}, module:Class")
    own = _KINDS[kind]
    for name, given in options.items():
        if name not in own.options:
            near = did_you_mean(name, own.options)
            raise InvalidSettings(f"tracker {kind!r} has no option {name!r}{near}; it has {', '.join(own.options)}")
        if not isinstance(given, str):
            raise InvalidSettings(f"tracker {kind!r}: {name} must be a string, got {given!r}")
    if own.package is not None and importlib.util.find_spec(own.package) is None:
        raise InvalidSettings(
            f"tracker {kind!r}: the package {own.package} is not installed: pip install 'freetrain-parsl[{own.extra}]'"
        )


def _load(reference: str) -> Callable[..., Any]:
    module, _, name = reference.partition(":")
    made: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return made
