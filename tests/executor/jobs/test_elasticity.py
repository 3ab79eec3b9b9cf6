"""Real training jobs that lose and gain nodes: planned, preempted, killed, stopped."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING

import psutil
import pytest
import torch

from freetrain_parsl import training_app
from freetrain_parsl.cluster.workload import MainJob
from freetrain_parsl.errors import TooManyRestarts
from freetrain_parsl.executor.journal import read_journal
from freetrain_parsl.training.fragment import run_local
from tests.executor.scenario import TRAININGS, ScriptedPolicy, Site, make_app

if TYPE_CHECKING:
    from collections.abc import Callable

    from freetrain_parsl.report.projection.run import Fragment, RunState

pytestmark = pytest.mark.cluster


@pytest.mark.smoke
def test_a_training_through_rescales_a_killed_worker_and_a_killed_block_ends_as_an_undisturbed_one(
    start, slow, tmp_path
) -> None:
    """1 -> 4 -> 2 -> 3 slots and a SIGKILL in place, then an administrator cancels its block."""
    train = make_app()
    policy = ScriptedPolicy(1)
    site = start(policy=policy)
    calls = tmp_path / "calls"
    future = train.options(name="t")(epochs=40, slow=str(slow), pause=0.5, calls=str(calls))

    def runs_on(nodes: int, since: int) -> Callable[[RunState], bool]:
        return lambda run: len(run.trainings["t"].nodes) == nodes and run.trainings["t"].progress["step"] > since

    site.until(lambda run: run.trainings and run.trainings["t"].progress.get("step", 0) > 5)
    processes = 1
    for before, nodes in ((1, 4), (4, 2), (2, 3)):
        policy.nodes = nodes
        site.until(runs_on(nodes, site.run.trainings["t"].progress["step"]))
        processes += max(0, nodes - before)
        assert len(calls.read_text().split()) == processes, "remaining members are not called again"
    policy.nodes = 2  # else the killed worker's replacement would join
    killed, step = time.time(), site.run.trainings["t"].progress["step"]
    os.kill(_pid_of_a_slot(site, site.run.trainings["t"].nodes[0]), signal.SIGKILL)
    site.until(lambda run: _after_the_loss(run) and run.trainings["t"].progress["step"] > step)
    recovered = _after_the_loss(site.run)[0]
    assert recovered.start - killed < 10
    assert all(fragment.in_place for fragment in site.run.fragments[1:])
    assert site.run.trainings["t"].resumes == 0
    queue = site.cluster.queue().items()
    site.cluster.cancel(job for job, status in queue if set(status["nodes"]) & set(site.run.trainings["t"].nodes))
    site.until(lambda run: run.trainings["t"].resumes)
    slow.unlink()

    result = future.result(timeout=60)
    alone = run_local(train.func, epochs=40)
    assert result["metrics"]["samples"] == alone["metrics"]["samples"] == 40 * 200
    assert result["metrics"]["steps"] == alone["metrics"]["steps"]
    assert result["lr"] == alone["lr"]
    assert torch.allclose(torch.tensor(result["parameters"]), torch.tensor(alone["parameters"]), atol=1e-4)
    progress = site.until(lambda run: run.completed and run.trainings["t"].progress)
    assert (progress["samples_lost"], progress["duplicate_samples"]) == (0, 0)


def test_a_training_whose_nodes_are_all_replaced_moves_without_a_checkpoint(start, slow) -> None:
    policy = ScriptedPolicy(2)
    site = start(nodes=2, policy=policy)
    future = make_app().options(name="t")(epochs=20, slow=str(slow), pause=0.5)
    site.until(lambda run: run.trainings and len(run.trainings["t"].nodes) == 2)
    policy.nodes = 1
    site.until(lambda run: len(run.trainings["t"].nodes) == 1)
    left = site.run.trainings["t"].nodes
    policy.avoid = frozenset(left)
    site.until(lambda run: len(run.trainings["t"].nodes) == 1 and run.trainings["t"].nodes != left)
    assert [len(fragment.nodes) for fragment in site.run.fragments][-3:] == [1, 2, 1]
    slow.unlink()
    assert future.result(timeout=60)["metrics"]["samples"] == 20 * 200
    assert site.run.trainings["t"].resumes == 0


def main_job(site: Site, *, nodes: int, seconds: int) -> None:
    """Submit another user's job, which has priority over ours."""
    walltime = timedelta(seconds=seconds)
    site.cluster.submit(["sleep", str(seconds)], nodes=nodes, walltime=walltime, preemptible=False, name="main")


def _pid_of_a_slot(site: Site, node: str) -> int:
    joined = [e for _, e in read_journal(site.executor.journal_path) if e.kind == "slot_joined"]
    return next(e.detail["pid"] for e in reversed(joined) if e.detail["node"] == node)


@pytest.mark.smoke
def test_a_main_job_that_needs_the_nodes_gets_them_at_once_and_the_training_goes_on_afterwards(start, slow) -> None:
    site = start(nodes=2)
    future = make_app(max_nodes=2).options(name="t")(epochs=20, slow=str(slow), pause=0.5)
    site.until(lambda run: run.trainings and run.trainings["t"].progress.get("step", 0) > 3)
    main_job(site, nodes=2, seconds=2)
    site.until(lambda run: run.blocks_ended)
    slow.unlink()
    assert future.result(timeout=180)["metrics"]["samples"] == 20 * 200
    run = site.run
    assert any("preempted" in reason for reason in run.blocks_ended)
    assert run.trainings["t"].resumes >= 1
    assert run.trainings["t"].progress["samples_lost"] == 0
    (delay,) = site.cluster.delays()
    assert delay["delay"] < 4.0, "at most the grace period"


def test_a_training_leaves_before_its_window_closes(start, slow) -> None:
    """A queued job that needs the whole machine is planned at the end of a running one: the window's end is known."""
    # Both are in the queue before the executor asks, and the first lasts far longer than a slot takes to start.
    long = MainJob(submit=0.0, nodes=1, run=50.0, walltime=50.0)
    head = MainJob(submit=0.3, nodes=3, run=1.0, walltime=2.0)
    site = start(nodes=3, workload=(long, head))
    source = site.executor.provider.window_source()
    site.until(lambda _: any(window.closes for window in source.survey().windows))
    future = make_app(max_nodes=2).options(name="t")(epochs=20, slow=str(slow), pause=0.5)
    site.until(lambda run: run.blocks_ended)
    slow.unlink()
    assert future.result(timeout=180)["metrics"]["samples"] == 20 * 200
    requests = [e for _, e in read_journal(site.executor.journal_path) if e.kind == "block_requested"]
    assert requests[0].detail["closes"] is not None
    assert requests[0].time + int(requests[0].detail["seconds"]) <= requests[0].detail["closes"]
    first = site.run.fragments[0]
    assert first.end is not None
    assert first.end < requests[0].detail["closes"]
    assert not first.failure
    assert max(delay["delay"] for delay in site.cluster.delays()) < 1.0


def test_a_training_that_keeps_crashing_ends_with_a_message_not_in_a_loop(start) -> None:
    start(nodes=1, trainings=replace(TRAININGS, max_restarts=1))

    def crash(session):
        import os
        import signal

        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(TooManyRestarts, match="2 crashes without a step"):
        training_app(crash)().result(timeout=60)


def test_a_stopped_worker_is_given_up_after_the_silence_and_the_other_goes_on_in_place(start, slow) -> None:
    trainings = replace(TRAININGS, heartbeat_timeout=timedelta(seconds=3))
    site = start(nodes=2, policy=ScriptedPolicy(2), trainings=trainings)
    future = make_app().options(name="t")(epochs=20, slow=str(slow), pause=0.5)
    site.until(lambda run: run.trainings and len(run.trainings["t"].nodes) == 2 and run.trainings["t"].progress)
    step, pid = site.run.trainings["t"].progress["step"], _pid_of_a_slot(site, site.run.trainings["t"].nodes[0])
    os.kill(pid, signal.SIGSTOP)
    stopped = time.time()
    try:
        site.until(lambda run: any(f.failure for f in run.fragments) and run.trainings["t"].progress["step"] > step + 5)
        lost = next(fragment for fragment in site.run.fragments if fragment.failure)
        assert lost.end - stopped < 10
        assert site.run.trainings["t"].resumes == 0
        slow.unlink()
        assert future.result(timeout=60)["metrics"]["samples"] == 4000
    finally:
        if psutil.pid_exists(pid):
            os.kill(pid, signal.SIGKILL)


def _after_the_loss(run: RunState) -> list[Fragment]:
    """Return the fragments after the first in which a member failed: it may have failed during a shrink."""
    lost = [fragment.failure for fragment in run.fragments]
    return run.fragments[lost.index(True) + 1 :] if True in lost else []
