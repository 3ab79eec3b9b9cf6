"""Training jobs that share a node, in a running executor: they grow inside it, and do not disturb each other."""

from __future__ import annotations

import os
import signal
import tempfile
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import torch

from freetrain_parsl.executor.journal import read_journal
from freetrain_parsl.executor.slot.neighbours import neighbours_of
from freetrain_parsl.places import node_of
from freetrain_parsl.training.fragment import run_local
from tests.executor.scenario import PLANNER, ScriptedPolicy, make_app

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.executor.scenario import Site

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

EPOCHS = 12


def test_a_job_that_is_killed_on_a_shared_node_leaves_its_neighbours_alone(
    start: Callable[..., Site], slow: Path, tmp_path: Path
) -> None:
    site = start(nodes=1, policy=ScriptedPolicy(1), slots_per_node=4)
    calls = {f"t{number}": tmp_path / f"calls-{number}" for number in range(4)}
    futures = {
        name: make_app(max_nodes=1, fuse=False).options(name=name)(epochs=EPOCHS, slow=str(slow), calls=str(file))
        for name, file in calls.items()
    }
    site.until(lambda run: len(run.trainings) == 4 and all(_step(run, name) > 2 for name in calls))
    places = [site.run.trainings[name].nodes for name in calls]
    assert sorted(places) == [(f"{node_of(places[0][0])}/{lane}",) for lane in range(4)]

    (victim,) = _pids(calls["t1"])
    # Each watches its share of the memory, and says so every few seconds: not all by now.
    pool = site.until(lambda _run: _pool_of(victim))
    jobs = {f"training job {name!r}" for name in calls}
    watched = site.until(lambda _run: watched if (watched := _watched(pool)).keys() == jobs else None)
    os.kill(victim, signal.SIGKILL)
    site.until(lambda _: len(_pids(calls["t1"])) == 2)
    step = _step(site.run, "t1")
    site.until(lambda run: _step(run, "t1") > step)
    again = site.until(lambda _: (found := _watched(pool)).keys() == watched.keys() and found)
    assert {job for job in again if again[job] != watched[job]} == {"training job 't1'"}, "in another place"
    slow.unlink()

    alone = run_local(make_app().func, epochs=EPOCHS)
    for future in futures.values():
        _is_as_alone(future.result(timeout=120), alone)
    assert [len(_pids(file)) for file in calls.values()] == [1, 2, 1, 1], "only the killed one has another process"
    fragments = list(site.until(lambda run: run.completed and run).fragments)
    failures = {name: [one.failure for one in fragments if one.training == name] for name in calls}
    assert failures == {"t0": [False], "t1": [True, False], "t2": [False], "t3": [False]}
    assert {fragment.nodes for fragment in fragments if fragment.training == "t1"} <= set(places)


def test_a_job_grows_inside_a_shared_node_and_leaves_for_a_node_of_its_own(
    start: Callable[..., Site], slow: Path
) -> None:
    policy = ScriptedPolicy(8)
    planner = replace(PLANNER, idle_timeout=timedelta(seconds=60))  # it keeps both nodes
    site = start(nodes=2, policy=policy, slots_per_node=4, planner=planner)
    future = make_app(max_nodes=8).options(name="t")(epochs=EPOCHS, slow=str(slow))
    _until_it_trains_on(site, 8)
    resumes = site.run.trainings["t"].resumes
    policy.nodes = 2
    _until_it_trains_on(site, 2)
    (node,) = {node_of(place) for place in site.run.trainings["t"].nodes}
    policy.nodes = 4
    _until_it_trains_on(site, 4)
    assert site.run.trainings["t"].nodes == tuple(f"{node}/{lane}" for lane in range(4))
    policy.avoid = frozenset(site.run.trainings["t"].nodes)
    site.until(lambda run: node not in {node_of(place) for place in run.trainings["t"].nodes or [node]})
    _until_it_trains_on(site, 4)
    slow.unlink()
    _is_as_alone(future.result(timeout=120), run_local(make_app().func, epochs=EPOCHS))
    fragments = list(site.until(lambda run: run.completed and run).fragments)
    assert not any(fragment.failure for fragment in fragments)
    assert site.run.trainings["t"].resumes == resumes, "it has moved in place"
    joined = [entry.subject for _, entry in read_journal(site.executor.journal_path) if entry.kind == "node_joined"]
    assert len(joined) == 2, "each node once"


def _until_it_trains_on(site: Site, units: int) -> None:
    site.until(lambda run: run.trainings and len(run.trainings["t"].nodes) == units)
    since = _step(site.run, "t")
    site.until(lambda run: _step(run, "t") > since + 3)


def _step(run: Any, name: str) -> int:
    return run.trainings[name].progress.get("step", 0)


def _pool_of(pid: int) -> Path | None:
    """Return the directory of the worker pool in which a training job's process runs, once that is told."""
    place = psutil.Process(pid).ppid()
    pools = Path(tempfile.gettempdir()).glob("ft-pool-*")
    return next((pool for pool in pools if place in _watched(pool).values()), None)


def _watched(pool: Path) -> dict[str, int]:
    """Return the jobs of a node that are watched, with the places that they run in."""
    return {one.job: one.place for one in neighbours_of(pool, -1)}


def _pids(calls: Path) -> list[int]:
    return [int(line) for line in calls.read_text().split()] if calls.exists() else []


def _is_as_alone(result: dict[str, Any], alone: dict[str, Any]) -> None:
    assert result["metrics"]["samples"] == alone["metrics"]["samples"] == EPOCHS * 200
    assert result["metrics"]["steps"] == alone["metrics"]["steps"]
    assert torch.allclose(torch.tensor(result["parameters"]), torch.tensor(alone["parameters"]), atol=1e-4)
