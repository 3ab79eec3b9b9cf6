"""Damage checkpoints in an episode, always leaving an intact one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from freetrain_parsl.testing.faults import corrupt_checkpoint

if TYPE_CHECKING:
    import random
    from pathlib import Path

__all__ = ["damage_newest"]


def damage_newest(root: Path, rng: random.Random) -> str | None:
    """Damage the newest checkpoint of a job that has at least two; return its name, or None if there is none."""
    trainings = sorted(path for path in root.glob("*") if len(list(path.glob("step-*"))) > 1)
    if not trainings:
        return None
    training = rng.choice(trainings)
    try:
        return f"{corrupt_checkpoint(training, rng).relative_to(root)}"
    except FileNotFoundError:
        return None  # replaced in the meantime
