"""Disturbances of a training job at a chosen step, from inside."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING, Any

import training_crew

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

HELD = "held"


def hold(
    session: Any,
    *,
    hold_at: Sequence[int] = (),
    die_at: int | None = None,
    pause_at: int | None = None,
    die_agreeing: int | None = None,
) -> None:
    """Disturb a training job.

    Parameters
    ----------
    session
        Its session.
    hold_at
        Wait for a command after each of these steps, with a file `held` and the step as a sign.
    die_at
        The second process is killed in the step after this one.
    pause_at
        Pause after this step.
    die_agreeing
        The second process is killed in its first call of ``session.broadcast`` after this step.
    """
    step, backward, agree = session.step, session.backward, session.broadcast

    def agree_or_die(value: Any) -> Any:
        if die_agreeing is not None and session.metrics["steps"] >= die_agreeing and session.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return agree(value)

    def backward_or_die(*args: Any, **options: Any) -> Any:
        if session.metrics["steps"] == die_at and session.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)  # while the others wait for its gradients, or soon will
        return backward(*args, **options)

    def step_and_hold(*args: Any, **options: Any) -> bool:
        made: bool = step(*args, **options)
        steps = session.metrics["steps"]
        if made and steps == pause_at:
            training_crew.NOTICE.pause_requested.set()
        if made and steps in hold_at:
            (session.directory / f"{HELD}-{steps}").touch()
            while training_crew.NOTICE.pending is None:
                time.sleep(0.005)
        return made

    session.step, session.backward, session.broadcast = step_and_hold, backward_or_die, agree_or_die


def resize(run: Any, root: Path, sizes: Sequence[tuple[int, int]]) -> None:
    """Change the number of processes of a crew's run after steps at which it holds: (step, number)."""
    for step, size in sizes:
        held = root / "net" / "files" / f"{HELD}-{step}"
        run.until(lambda held=held: held.exists() or run.ended, 60)
        run.regroup(size)
