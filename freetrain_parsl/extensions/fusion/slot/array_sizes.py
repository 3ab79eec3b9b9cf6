"""The best sizes of arrays of fused jobs, as earlier arrays have measured them: kept beside the checkpoints."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from freetrain_parsl.storage.measurements import read_measurement, write_measurement

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["MeasuredSize", "read_array_size", "write_array_size"]

_LARGEST = 1 << 16  # members


@dataclass(frozen=True)
class MeasuredSize:
    """The best size of an array.

    Parameters
    ----------
    size
        Number of members.
    gain
        Steps per second of all of them, relative to one by one.
    """

    size: int
    gain: float


def read_array_size(root: Path, key: str) -> MeasuredSize | None:
    """Return what was measured; ``None`` if nothing was, or if its file cannot be used, which is logged.

    Parameters
    ----------
    root
        The checkpoint root.
    key
        Letters and digits that identify function, code and device.
    """
    return read_measurement(_path(root, key), _checked, "the size of arrays is measured anew")


def _checked(content: Any) -> MeasuredSize:
    size, gain = content["size"], content["gain"]
    if not isinstance(size, int) or isinstance(size, bool) or not 2 <= size <= _LARGEST:
        raise ValueError(f"its size is {size!r}")
    if not isinstance(gain, float) or not (math.isfinite(gain) and gain > 0):
        raise ValueError(f"its gain is {gain!r}")
    return MeasuredSize(size, gain)


def write_array_size(root: Path, key: str, measured: MeasuredSize) -> None:
    """Keep what was measured; a failure is only logged, since the next run can measure it again."""
    write_measurement(_path(root, key), asdict(measured))


def _path(root: Path, key: str) -> Path:
    return root / f".array-size-{key}.json"
