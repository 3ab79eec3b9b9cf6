"""What happens to a session in the tests: a pause, a wait for a command, a death.

In a separate module because the processes of a crew import it.
"""

from __future__ import annotations

import time
from typing import Any

import training_crew
from habits import hold


def disturb(session: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Arrange the disturbances that `options` name, and return the other options.

    ``die_at``: the second process dies in the step after this one. ``pause_at``: a pause is requested after this step.
    ``gates``: after these steps, wait for a file.
    """
    options = dict(options)
    hold(session, None, options.pop("die_at", None))
    pause_at, gates = options.pop("pause_at", None), options.pop("gates", None) or {}
    step = session.step

    def disturbed_step(*args: Any, **kwargs: Any) -> bool:
        made: bool = step(*args, **kwargs)
        number = session.metrics["steps"]
        if made and number == pause_at:
            training_crew.NOTICE.pause_requested.set()
        while made and number in gates and not gates[number].exists():
            time.sleep(0.002)
        return made

    session.step = disturbed_step
    return options
