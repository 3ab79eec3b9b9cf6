"""What training jobs have measured, for later ones: small JSON files beside the checkpoints, which may be lost."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from freetrain_parsl.errors import ForeignCheckpoint
from freetrain_parsl.storage.atomic_files import TEMPORARY, write_text
from freetrain_parsl.storage.owned_files import check_owned

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

logger = logging.getLogger(__name__)

__all__ = [
    "Rates",
    "measurement_path",
    "read_measurement",
    "read_rates",
    "write_measurement",
    "write_rates",
]

_LONGEST = 1 << 18  # characters

T = TypeVar("T")
Rates: TypeAlias = "Mapping[str, Mapping[int, float]]"
"""Kind of node -> number of nodes -> samples per second. The kind is empty where there is one only."""

_CURVE = "scaling-curve"
_MOST_NODES = 1_000_000
_LEAST_RATE, _MOST_RATE = 1e-6, 1e12  # samples per second


def read_measurement(path: Path, parse: Callable[[Any], T], consequence: str) -> T | None:
    """Read a file of `write_measurement`; ``None`` if there is none, or if it cannot be used, which is logged.

    `parse` raises ValueError, TypeError or KeyError if the content is invalid; `consequence` is for the log.
    """
    try:
        check_owned(path)
        return parse(json.loads(_text(path)))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, RecursionError, ForeignCheckpoint) as error:
        logger.warning("%s is not used, %s: %s", path, consequence, error)
        return None


def _text(path: Path) -> str:
    if not path.is_file():  # a pipe, for example, would make the driver wait
        raise OSError("it is not a regular file")
    with path.open(encoding="utf-8") as file:
        return file.read(_LONGEST)


def write_measurement(path: Path, content: object) -> None:
    """Write a file atomically; a failure is only logged, since the next run can measure it again."""
    try:
        descriptor, name = tempfile.mkstemp(prefix=TEMPORARY, dir=path.parent)
        os.close(descriptor)
        aside = Path(name)
        try:
            write_text(aside, json.dumps(content))
            aside.replace(path)
        finally:
            aside.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("%s cannot be written, the next run measures it again: %s", path, error.strerror or error)


def read_rates(root: Path, key: str) -> Rates:
    """Return what was measured; nothing if there is nothing, or if its file cannot be used, which is logged.

    The key, letters and digits, is equal for training jobs that are alike.
    """
    path = measurement_path(root, _CURVE, key)
    return read_measurement(path, _checked, "the scaling curve is learned anew") or {}


def _checked(content: object) -> Rates:
    if not isinstance(content, dict):
        raise TypeError("it is not a mapping of kinds of nodes")
    for kind, rates in content.items():
        if not isinstance(rates, dict) or not rates:
            raise ValueError(f"it has no rates for kind {kind!r}")
    return {kind: dict(map(_point, rates.items())) for kind, rates in content.items()}


def _point(item: tuple[str, object]) -> tuple[int, float]:
    nodes, rate = item
    if not (nodes.isascii() and nodes.isdigit() and 1 <= int(nodes) <= _MOST_NODES):
        raise ValueError(f"{nodes!r} is no number of nodes")
    if not isinstance(rate, float) or not _LEAST_RATE <= rate <= _MOST_RATE:
        raise ValueError(f"the rate on {nodes} nodes is {rate!r}")
    return int(nodes), rate


def write_rates(root: Path, key: str, rates: Rates) -> None:
    """Keep what was measured; a failure is only logged, since the next run can measure it again."""
    content = {kind: dict(sorted(some.items())) for kind, some in rates.items()}
    write_measurement(measurement_path(root, _CURVE, key), content)


def measurement_path(root: Path, what: str, key: str) -> Path:
    """Return the file of a measurement of this kind, for training jobs that are alike."""
    return root / f".{what}-{key}.json"
