"""At the site: what a coordinator of several sites asks about a run and its site. Nothing is changed."""

from __future__ import annotations

import json
import os
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from freetrain_parsl.campaign.files.yaml_file import Variables
from freetrain_parsl.campaign.launch import scrubbed
from freetrain_parsl.campaign.lock import DriverState, driver_state
from freetrain_parsl.campaign.site.site import Site
from freetrain_parsl.campaign.stored_run import DATABASE, StoredRun
from freetrain_parsl.campaign.summary import journal_state_of
from freetrain_parsl.errors import DamagedCheckpoint, InvalidInput
from freetrain_parsl.extensions.globus.storage.home import GlobusHome
from freetrain_parsl.extensions.globus.storage.mover_directory import MoverState
from freetrain_parsl.interpreters import FREETRAIN, script_command
from freetrain_parsl.storage.posix import CheckpointDirectory

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["planned_blocks", "run_facts", "site_facts"]

_PLAN_TIMEOUT = 90.0  # seconds
_LONGEST = 500  # characters of an error


def site_facts(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Describe the site of a request (``config`` and ``settings``, as for ``freetrain run``): its home and its lease.

    Raises
    ------
    InvalidInput
        The site file is invalid, or has no home.
    """
    site = Site.load(stored["config"], Variables.parse(stored["settings"]))
    if not isinstance(site.home, GlobusHome):
        raise InvalidInput(
            f"{site.file}: has no checkpoints.globus; training jobs move between sites through a home on Globus"
        )
    return {"home": str(site.home.settings.home), "lease": site.home.settings.lease.total_seconds()}


def planned_blocks(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Ask the planner for the blocks that it would submit now, with ``freetrain plan --json``.

    Returns
    -------
    dict of str to Any
        ``plan``, or ``plan_error``: why there is none.
    """
    command = ["plan", stored["campaign"], "--config", stored["config"], "--json"]
    for setting in stored["settings"]:
        command += ["--set", setting]
    try:
        done = subprocess.run(
            [*script_command(FREETRAIN), *command],
            cwd=Path(stored["campaign"]).parent,
            env=scrubbed(os.environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PLAN_TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"plan_error": f"freetrain plan did not answer within {_PLAN_TIMEOUT:.0f} s"}
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"freetrain plan exited with code {done.returncode}"]
        return {"plan_error": lines[-1][:_LONGEST]}
    plan = json.loads(done.stdout)
    blocks = [{key: block[key] for key in ("nodes", "walltime")} for block in plan["blocks"]]
    return {"plan": {"blocks": blocks, **{key: plan[key] for key in ("slots_per_node", "units_per_node")}}}


def run_facts(run_dir: Path) -> dict[str, Any]:
    """Describe a run: nodes of its blocks, samples left and sizes of its training jobs, and its copies.

    Returns
    -------
    dict of str to Any
        ``held``: pairs of nodes and seconds; ``samples_left`` and ``sizes`` (bytes) by training; ``measured``: copies
        as (whether from home, bytes, seconds); ``copying``: what the mover does, in lines.
    """
    facts: dict[str, Any] = {"held": [], "samples_left": {}, "sizes": {}, "measured": [], "copying": []}
    if not (run_dir / DATABASE).is_file():
        return facts
    store = StoredRun(run_dir)
    mover = MoverState.read(run_dir)
    facts["measured"] = [[copy.from_home, copy.size, copy.seconds] for copy in mover.measured]
    site = Site.parse(store.fact("site_text"), store.fact("site_file"), Variables(store.fact("variables")))
    root = site.checkpoint_dir or run_dir / "checkpoints"
    facts["sizes"] = {
        item.name: size for item in store.trainings() if (size := _newest_size(CheckpointDirectory(root, item.name)))
    }
    if driver_state(store.last_driver()) is not DriverState.ALIVE:
        return facts
    facts["copying"] = list(mover.lines)
    if (run := journal_state_of(store)) is not None:
        facts["held"] = run.blocks.held(time.time())
        for name, training in run.trainings.items():
            total, done = training.progress.get("samples_total"), training.progress.get("samples")
            if total and done is not None:
                facts["samples_left"][name] = max(0, total - done)
    return facts


def _newest_size(directory: CheckpointDirectory) -> int:
    """Return the bytes of the newest checkpoint; 0 if there is none."""
    for entry in directory.entries():
        with suppress(DamagedCheckpoint):
            return int(entry.check_sizes()["bytes"])
    return 0
