"""What the slots of a node tell each other, in small files in their worker pool's directory; and their temporary files.

Each slot has a file, which names its training job while one runs, one that names its process, and a private directory
for temporary files. They are removed by its place when the process has ended, and by the pilot when the pool ends.
"""

from __future__ import annotations

import getpass
import json
import multiprocessing
import os
import shutil
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from freetrain_parsl.cluster.processes import process_info

__all__ = [
    "Neighbour",
    "clear_traces",
    "neighbours_of",
    "pool_directory",
    "process_of",
    "publish",
    "publish_process",
    "use_own_temporary_directory",
]

_FILE: Final = "slot-"
_PROCESS: Final = "process-"
_TEMPORARY: Final = "t"  # short: the path of a socket has at most 107 characters


@dataclass(frozen=True)
class Neighbour:
    """A slot of this node that runs a training job.

    Parameters
    ----------
    job
        The training job, or the array of several: equal for the members of one job, which do not disturb each other.
    place
        Process id of the slot's place, whose descendants belong to the slot.
    save_seconds
        Estimated time in which this process writes a checkpoint; zero if another member of the job does.
    """

    job: str
    place: int
    save_seconds: float = 0.0


def pool_directory() -> Path | None:
    """Return the directory of this process's worker pool; ``None`` without a pilot: the slot has no neighbours."""
    path = multiprocessing.current_process()._config.get("tempdir")  # type: ignore[attr-defined]  # noqa: SLF001
    return None if path is None else Path(path)


def publish(pool: Path, rank: int, own: Neighbour) -> None:
    """Tell the other slots of the node what this one runs; best effort."""
    with suppress(OSError):
        written = pool / f".{_FILE}{rank}"
        written.write_text(json.dumps(asdict(own)), encoding="utf-8")
        written.replace(pool / f"{_FILE}{rank}")


def neighbours_of(pool: Path, rank: int) -> list[Neighbour]:
    """Return the other slots of the node that run training jobs now."""
    found = []
    for path in sorted(pool.glob(f"{_FILE}*")):
        if path.name != f"{_FILE}{rank}":
            with suppress(OSError, ValueError, TypeError):  # just removed
                found.append(Neighbour(**json.loads(path.read_text(encoding="utf-8"))))
    return found


def publish_process(pool: Path, rank: int) -> None:
    """Tell a later place of this slot which process this is; best effort."""
    with suppress(OSError):
        if (own := process_info(os.getpid())) is not None:
            (pool / f"{_PROCESS}{rank}").write_text(f"{own.pid} {own.started}", encoding="ascii")


def process_of(pool: Path, rank: int) -> tuple[int, int] | None:
    """Return the id and start tick of the last process of a slot, unless its place has seen its end."""
    with suppress(OSError, ValueError):  # there is none; it was killed while it wrote
        pid, started = (pool / f"{_PROCESS}{rank}").read_text(encoding="ascii").split()
        return int(pid), int(started)
    return None


def use_own_temporary_directory(pool: Path, rank: int) -> None:
    """Let this process and its children make temporary files in a new directory, private to the user.

    torch's compiler keeps its results where it always does: the next part of the job needs them again.
    """
    with suppress(OSError, KeyError):  # the user has no name
        shared = Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}"
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(shared))
    path = pool / f"{_TEMPORARY}{rank}"
    with suppress(OSError):  # no file can be created
        path.mkdir(mode=0o700, exist_ok=True)  # of a job before, which has left what cannot be removed
        os.environ["TMPDIR"] = tempfile.tempdir = str(path)


def clear_traces(pool: Path, rank: int) -> None:
    """Remove a slot's file and its temporary files: its process has ended."""
    with suppress(OSError):
        for file in (_FILE, _PROCESS):
            (pool / f"{file}{rank}").unlink(missing_ok=True)
    temporary = pool / f"{_TEMPORARY}{rank}"
    with suppress(OSError):  # a directory
        temporary.unlink()  # a link that the job has made of it: not followed, and the next job can have a directory
    shutil.rmtree(temporary, ignore_errors=True)
