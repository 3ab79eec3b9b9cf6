"""The best sizes of arrays of fused trainings, as earlier arrays have measured them: kept beside the checkpoints."""

from __future__ import annotations

import json
import logging
import math
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from freetrain_parsl.errors import ForeignCheckpoint
from freetrain_parsl.storage.ownership import check_owned
from freetrain_parsl.storage.staging import TEMPORARY, write_text

logger = logging.getLogger(__name__)

__all__ = ["MeasuredSize", "read_array_size", "write_array_size"]

_LARGEST = 1 << 16  # members
_LONGEST = 4096  # characters


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
    path = _path(root, key)
    try:
        check_owned(path)
        with path.open(encoding="utf-8") as file:
            content = json.loads(file.read(_LONGEST))
        return _checked(content["size"], content["gain"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, RecursionError, ForeignCheckpoint) as error:
        logger.warning("%s is not used, the size of arrays is measured anew: %s", path, error)
        return None


def _checked(size: object, gain: object) -> MeasuredSize:
    if not isinstance(size, int) or isinstance(size, bool) or not 2 <= size <= _LARGEST:
        raise ValueError(f"its size is {size!r}")
    if not isinstance(gain, float) or not (math.isfinite(gain) and gain > 0):
        raise ValueError(f"its gain is {gain!r}")
    return MeasuredSize(size, gain)


def write_array_size(root: Path, key: str, measured: MeasuredSize) -> None:
    """Keep what was measured; a failure is only logged, since the next run can measure it again."""
    path = _path(root, key)
    try:
        descriptor, name = tempfile.mkstemp(prefix=TEMPORARY, dir=root)
        os.close(descriptor)
        aside = Path(name)
        try:
            write_text(aside, json.dumps(asdict(measured)))
            aside.replace(path)
        finally:
            aside.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("%s cannot be written, the next run measures it again: %s", path, error.strerror or error)


def _path(root: Path, key: str) -> Path:
    return root / f".array-size-{key}.json"
