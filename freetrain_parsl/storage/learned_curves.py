"""Throughput that trainings have measured, for later ones that are alike: kept beside the checkpoints."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from freetrain_parsl.errors import ForeignCheckpoint
from freetrain_parsl.storage.ownership import check_owned
from freetrain_parsl.storage.staging import TEMPORARY, write_text

if TYPE_CHECKING:
    from collections.abc import Mapping

logger = logging.getLogger(__name__)

__all__ = ["Rates", "read_rates", "write_rates"]

Rates: TypeAlias = "Mapping[str, Mapping[int, float]]"
"""Kind of node -> number of nodes -> samples per second. The kind is empty where there is one only."""

_MOST_NODES = 1_000_000
_LEAST_RATE, _MOST_RATE = 1e-6, 1e12  # samples per second
_LONGEST = 1 << 18  # characters


def read_rates(root: Path, key: str) -> Rates:
    """Return what was measured; nothing if there is nothing, or if its file cannot be used, which is logged.

    Parameters
    ----------
    root
        The checkpoint root.
    key
        Letters and digits, equal for trainings that are alike.
    """
    path = _path(root, key)
    try:
        return _checked(json.loads(_text(path)))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, RecursionError, ForeignCheckpoint) as error:
        logger.warning("%s is not used, the scaling curve is learned anew: %s", path, error)
        return {}


def _text(path: Path) -> str:
    check_owned(path)
    if not path.is_file():  # a pipe, for example, would make the driver wait
        raise OSError("it is not a regular file")
    with path.open(encoding="utf-8") as file:
        return file.read(_LONGEST)


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
    path = _path(root, key)
    try:
        descriptor, name = tempfile.mkstemp(prefix=TEMPORARY, dir=root)
        os.close(descriptor)
        aside = Path(name)
        try:
            write_text(aside, json.dumps({kind: dict(sorted(some.items())) for kind, some in rates.items()}))
            aside.replace(path)
        finally:
            aside.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("%s cannot be written, the next run measures it again: %s", path, error.strerror or error)


def _path(root: Path, key: str) -> Path:
    return root / f".scaling-curve-{key}.json"
