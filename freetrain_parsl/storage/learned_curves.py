"""Throughput that trainings have measured, for later ones that are alike: kept beside the checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from freetrain_parsl.storage.measurements import read_measurement, write_measurement

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["Rates", "read_rates", "write_rates"]

Rates: TypeAlias = "Mapping[str, Mapping[int, float]]"
"""Kind of node -> number of nodes -> samples per second. The kind is empty where there is one only."""

_MOST_NODES = 1_000_000
_LEAST_RATE, _MOST_RATE = 1e-6, 1e12  # samples per second


def read_rates(root: Path, key: str) -> Rates:
    """Return what was measured; nothing if there is nothing, or if its file cannot be used, which is logged.

    Parameters
    ----------
    root
        The checkpoint root.
    key
        Letters and digits, equal for trainings that are alike.
    """
    return read_measurement(_path(root, key), _checked, "the scaling curve is learned anew") or {}


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
    write_measurement(_path(root, key), {kind: dict(sorted(some.items())) for kind, some in rates.items()})


def _path(root: Path, key: str) -> Path:
    return root / f".scaling-curve-{key}.json"
