"""The best sizes of arrays of fused jobs, as earlier arrays have measured them: kept beside the checkpoints."""

from __future__ import annotations

import math
import platform
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from freetrain_parsl import __version__
from freetrain_parsl.protocol.options import digest_of
from freetrain_parsl.storage.measurements import read_measurement, write_measurement

if TYPE_CHECKING:
    from pathlib import Path

    from freetrain_parsl.protocol.options import Code

__all__ = ["MeasuredSize", "read_array_size", "size_key", "write_array_size"]

_LARGEST = 1 << 16  # members
_LONGEST = 1000  # characters of a reason


@dataclass(frozen=True)
class MeasuredSize:
    """The best size of an array.

    Parameters
    ----------
    size
        Number of members.
    gain
        Steps per second of all of them, relative to one by one.
    turns
        Why they are not fused, but step in turns; empty: they are fused.
    """

    size: int
    gain: float
    turns: str = ""


def size_key(code: Code | None, threads: int | None, likeness: str = "") -> str:
    """Return the key of what is measured in this process, on its device.

    Parameters
    ----------
    code, threads
        Of the training jobs, as in `SessionOptions`: a member sets its threads when it begins.
    likeness
        As in `TrainingRequest`; empty: it holds whatever their arguments are.
    """
    import torch

    device = f"{platform.machine()} with {threads or torch.get_num_threads()} threads"
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    of_these = [likeness, __version__, torch.__version__] if likeness else []
    return digest_of(["" if code is None else code.identity, device, *of_these])


def read_array_size(root: Path, key: str) -> MeasuredSize | None:
    """Return what was measured; ``None`` if nothing was, or if its file cannot be used, which is logged.

    Parameters
    ----------
    root
        The checkpoint root.
    key
        See `size_key`.
    """
    return read_measurement(_path(root, key), _checked, "the size of arrays is measured anew")


def _checked(content: Any) -> MeasuredSize:
    size, gain, turns = content["size"], content["gain"], content.get("turns", "")
    if not isinstance(size, int) or isinstance(size, bool) or not 2 <= size <= _LARGEST:
        raise ValueError(f"its size is {size!r}")
    if not isinstance(gain, float) or not (math.isfinite(gain) and gain > 0):
        raise ValueError(f"its gain is {gain!r}")
    if not isinstance(turns, str):
        raise ValueError(f"its turns is {turns!r}")  # noqa: TRY004 - all of a file's faults are the same
    return MeasuredSize(size, gain, turns[:_LONGEST])


def write_array_size(root: Path, key: str, measured: MeasuredSize) -> None:
    """Keep what was measured; a failure is only logged, since the next run can measure it again."""
    write_measurement(_path(root, key), asdict(measured))


def _path(root: Path, key: str) -> Path:
    return root / f".array-size-{key}.json"
