"""At the site: trainings that a coordinator of several sites retries, because the user has asked for it.

Retries are numbered for each training. The numbers that a site has taken in are in its answers, so that the failure of
an earlier attempt is not taken for one of the last.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from freetrain_parsl.campaign.launch import read_document
from freetrain_parsl.campaign.store import RunStore
from freetrain_parsl.campaign.stored_run import StoredRun
from freetrain_parsl.report.output import write_output

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["failed_before", "retried", "take_retries"]

_RETRIES = "retries.json"
_UNSUCCESSFUL = ("failed", "cancelled")


def retried(root: Path) -> dict[str, int]:
    """Return training -> number of its last retry that was taken in, of a run's directory."""
    return read_document(root / _RETRIES) or {}


def failed_before(root: Path, run_dir: Path, attempts: Mapping[str, int]) -> list[str]:
    """Return the trainings of a run that have failed or were cancelled here before the given attempts."""
    done = retried(root)
    states = {item.name: item.state for item in StoredRun(run_dir).trainings()}
    return [
        name for name, attempt in attempts.items() if attempt > done.get(name, 0) and states.get(name) in _UNSUCCESSFUL
    ]


def take_retries(root: Path, run_dir: Path | None, attempts: Mapping[str, int]) -> None:
    """Set trainings that have failed to waiting, and note the attempts; no driver may run.

    Parameters
    ----------
    root
        Directory of the run.
    run_dir
        Its run directory; ``None`` if it has not been created.
    attempts
        Training -> number of the retry.
    """
    if run_dir is not None:
        for name in failed_before(root, run_dir, attempts):
            RunStore(run_dir).retry(name)
    done = retried(root)
    later = {name: max(attempt, done.get(name, 0)) for name, attempt in attempts.items()}
    if later != {name: done.get(name, 0) for name in later}:
        write_output(root / _RETRIES, json.dumps({**done, **later}))
