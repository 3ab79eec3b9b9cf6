"""The code blocks of the page on PyTorch habits, as trainings.

In a module of its own, not among the tests, because the processes of the crew import it.
"""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import training_crew

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "pytorch-habits.md"
_BLOCK = re.compile(r"<!-- habit: (\w+) -->\n```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
BLOCKS = dict(_BLOCK.findall(PAGE.read_text(encoding="utf-8")))
COMMON = BLOCKS.pop("common")


def practise(session: Any, habit: str, hold_at: int | None = None) -> tuple[Any, list[tuple[int, int]]]:
    """Run a block of the page; at step `hold_at` wait until there is an order to change the group.

    Returns
    -------
    value
        What the block's function returned.
    sizes
        (step, number of processes) for each step that this process made.
    """
    names: dict[str, Any] = {"__name__": habit}
    exec(compile(COMMON, PAGE, "exec"), names)  # noqa: S102 - our own page
    exec(compile(BLOCKS[habit], PAGE, "exec"), names)  # noqa: S102 - the same
    sizes: list[tuple[int, int]] = []
    step = session.step

    def step_and_hold(*args: Any, **options: Any) -> bool:
        made = step(*args, **options)
        if made:
            sizes.append((session.metrics["steps"], session.world_size))
        if session.metrics["steps"] == hold_at and sizes[0][1] == session.world_size:
            while training_crew.NOTICE.pending is None:
                time.sleep(0.005)
        return made

    session.step = step_and_hold
    return names["train"](session), sizes
