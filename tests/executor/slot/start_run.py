"""A driver's command to start a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from freetrain_parsl.executor.payloads.payloads import pack_training
from freetrain_parsl.protocol.messages import Place, StartRun
from freetrain_parsl.protocol.options import SessionOptions

if TYPE_CHECKING:
    from pathlib import Path


def start_run(directory: Path, *, run: int, place: Place | None, **options: Any) -> StartRun:
    """Start run `run` of a training job that keeps its checkpoints in `directory`."""
    return StartRun("t", run, SessionOptions("t", directory, **options), pack_training(print, (), {}), place, 60.0)
