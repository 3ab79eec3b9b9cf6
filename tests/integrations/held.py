"""Disturbances of a training at a chosen step, from inside."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import training_crew

HELD = "held"


def hold(session: Any, *, hold_at: int | None = None, die_at: int | None = None, pause_at: int | None = None) -> None:
    """After step `hold_at`, wait for a command; after `pause_at`, pause; kill the second process in the step `die_at`."""
    step, backward = session.step, session.backward

    def backward_or_die(*args: Any, **options: Any) -> Any:
        if session.metrics["steps"] == die_at and session.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)  # while the others wait for its gradients, or soon will
        return backward(*args, **options)

    def step_and_hold(*args: Any, **options: Any) -> bool:
        made: bool = step(*args, **options)
        steps = session.metrics["steps"]
        if made and steps == pause_at:
            training_crew.NOTICE.pause_requested.set()
        if made and steps == hold_at:
            (session.directory / HELD).touch()
            while training_crew.NOTICE.pending is None:
                time.sleep(0.005)
        return made

    session.step, session.backward = step_and_hold, backward_or_die
