"""The values of a training job in Weights & Biases, by default offline: ``wandb sync`` uploads them."""

from __future__ import annotations

import json
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from freetrain_parsl.errors import InvalidSettings

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from freetrain_parsl.executor.values.tracker import Outcome, Row, TrackedTraining

__all__ = ["WandbTracker", "offline_history"]

_HEADER = 7  # bytes at the beginning of a file
_BLOCK = 32768  # bytes
_PART = struct.Struct("<IHB")
_WHOLE, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
_QUIET = 2.0  # seconds without a write after which a file counts as complete
_LONGEST_WAIT = 20.0  # seconds
_EXIT_CODES = {"finished": 0, "failed": 1, "cancelled": 255, "interrupted": 1}
"""W&B shows 0 as finished, 255 as killed, and others as failed or, of a run that is marked so, as preempted."""


@dataclass
class WandbTracker:
    """Logs to a run of Weights & Biases with the training job's name and id.

    Parameters
    ----------
    project, entity
        Where the run belongs.
    mode
        ``offline`` or ``online``.
    """

    options: ClassVar = ("project", "entity", "mode")
    package: ClassVar = ("wandb", "freetrain-parsl[wandb]")
    project: str = "freetrain"
    entity: str | None = None
    mode: Literal["offline", "online"] = "offline"

    def __post_init__(self) -> None:
        if self.mode not in ("offline", "online"):
            raise InvalidSettings(f"mode must be 'offline' or 'online', got {self.mode!r}")

    def open(self, training: TrackedTraining) -> Mapping[str, int]:
        """See `Tracker.open`; each call begins another directory of the same run, in the job's own directory."""
        import wandb

        steps: dict[str, int] = {}
        paths = sorted(training.directory.glob(f"wandb/*run-*-{training.id}/run-{training.id}.wandb"))
        _await_writer(paths)
        for path in paths:
            for values in offline_history(path):
                step = int(values["_step"])
                steps |= {name: max(step, steps.get(name, 0)) for name in values if not name.startswith("_")}
        self._run: Any = wandb.init(
            project=self.project,
            entity=self.entity,
            mode=self.mode,
            id=training.id,
            name=training.name,
            resume="allow",
            dir=str(training.directory),
            reinit="create_new",
            settings=wandb.Settings(console="off", silent=True, x_disable_stats=True, disable_git=True),
        )
        return steps

    def log(self, rows: Sequence[Row]) -> None:
        """See `Tracker.log`."""
        for row in rows:
            self._run.log(dict(row.values), step=row.step)

    def close(self, outcome: Outcome) -> None:
        """See `Tracker.close`."""
        if outcome == "interrupted":
            self._run.mark_preempting()
        self._run.finish(exit_code=_EXIT_CODES[outcome])
        end = time.monotonic() + _LONGEST_WAIT
        while time.monotonic() < end and not self._is_complete():
            time.sleep(0.1)

    def _is_complete(self) -> bool:
        """Return whether the file of this run has its last record: `finish` does not wait for it."""
        path = Path(self._run.dir).parent / f"run-{self._run.id}.wandb"
        return any(record.WhichOneof("record_type") == "exit" for record in _records(path))


def offline_history(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a run's file, each with its ``_step``, up to an incomplete record."""
    for record in _records(path):
        if record.WhichOneof("record_type") == "history":
            yield {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}


def _records(path: Path) -> Iterator[Any]:
    """Read LevelDB's log format, after a header of wandb's; the package has no reader in Python.

    A record is divided where a block ends; a part is preceded by its checksum, length and kind.
    """
    from wandb.proto import wandb_internal_pb2

    data = path.read_bytes()
    position = _HEADER
    parts: list[bytes] = []
    while position + _PART.size <= len(data):
        if (left := _BLOCK - position % _BLOCK) < _PART.size:
            position += left
            continue
        _checksum, length, kind = _PART.unpack_from(data, position)
        position += _PART.size + length
        if kind not in (_WHOLE, _FIRST, _MIDDLE, _LAST) or position > len(data):
            return
        parts.append(data[position - length : position])
        if kind in (_WHOLE, _LAST):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(b"".join(parts))
            parts = []
            yield record


def _await_writer(paths: Sequence[Path]) -> None:
    """Wait until wandb's own process, which writes the files, has ended its work for an earlier process of ours."""
    end = time.monotonic() + _LONGEST_WAIT
    while time.monotonic() < end and any(time.time() - path.stat().st_mtime < _QUIET for path in paths):
        time.sleep(_QUIET / 4)
