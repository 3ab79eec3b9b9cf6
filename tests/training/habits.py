"""The code blocks of the documentation page on PyTorch habits, as trainings.

In a separate module because the processes of the crew import it.
"""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import training_crew

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "pytorch-habits.md"
_BLOCK = re.compile(r"<!-- habit: (\w+) -->\n```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
BLOCKS = dict(_BLOCK.findall(PAGE.read_text(encoding="utf-8")))
COMMON = BLOCKS.pop("common")
HELD = "held"


def practise(
    session: Any, habit: str, hold_at: int | None = None, die_at: int | None = None
) -> tuple[Any, list[tuple[int, int]]]:
    """Run a block of the page; see `hold`.

    Returns
    -------
    value
        Return value of the block's function.
    sizes
        (step, number of processes) for each step that this process made.
    """
    names: dict[str, Any] = {"__name__": habit}
    exec(compile(COMMON, PAGE, "exec"), names)  # trusted: part of this repository
    exec(compile(BLOCKS[habit], PAGE, "exec"), names)
    sizes = hold(session, hold_at, die_at)
    return names["train"](session), sizes


def hold(session: Any, hold_at: int | None, die_at: int | None = None) -> list[tuple[int, int]]:
    """After step `hold_at`, wait for a command; or kill the second process in the step after `die_at`.

    Returns
    -------
    sizes
        Receives (step, number of processes) for each step of this process.
    """
    sizes: list[tuple[int, int]] = []
    step, backward = session.step, session.backward

    def die_if_asked() -> None:
        if session.metrics["steps"] == die_at and session.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)  # while the others wait for its gradients, or soon will

    def backward_or_die(loss: Any, **options: Any) -> bool:
        die_if_asked()
        return backward(loss, **options)

    def step_and_hold(*args: Any, **options: Any) -> bool:
        if args:  # a loss
            die_if_asked()
        made = step(*args, **options)
        if made:
            sizes.append((session.metrics["steps"], session.world_size))
        if made and session.metrics["steps"] == hold_at:
            (session.directory / HELD).touch()
            while training_crew.NOTICE.pending is None:
                time.sleep(0.005)
        return made

    session.step, session.backward = step_and_hold, backward_or_die
    return sizes
