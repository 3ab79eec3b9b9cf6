"""A driver's order to begin a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from freetrain_parsl.executor.protocol import Message, pack_training

if TYPE_CHECKING:
    from pathlib import Path


def run_order(directory: Path, *, run: int, **changes: Any) -> Message:
    """Order run `run` of a training that keeps its checkpoints in `directory`."""
    header = {
        "trainer": "t",
        "run": run,
        "joining": False,
        "meeting_timeout": 60.0,
        "mean_time_between_losses": 3600.0,
        "checkpoint_root": str(directory),
        "checkpoint_interval": None,
        "keep": 2,
        "save_margin": 2.0,
        "seed": 0,
        "threads": None,
        "epochs": None,
        **changes,
    }
    return Message("run", header, pack_training(print, (), {}))
