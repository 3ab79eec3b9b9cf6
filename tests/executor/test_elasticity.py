"""Real trainings that lose and win nodes: planned, preempted, killed, stopped."""

from __future__ import annotations

import os
import signal
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
from freetrain_parsl.training.fragment import run_alone
from tests.executor.scenario import PLANNER, ScriptedPolicy, Site, make_app

if TYPE_CHECKING:
    from freetrain_parsl.report.run import RunState

pytestmark = pytest.mark.cluster


def test_a_training_through_rescales_a_killed_block_and_a_killed_worker_ends_as_an_undisturbed_one(
    start, tmp_path
) -> None:
    """1 -> 4 -> 2 -> 3 slots, then its block is cancelled by an admin, then a worker gets SIGKILL."""
    slow = tmp_path / "slow"
    slow.touch()
    train = make_app()
    policy = ScriptedPolicy(1)
    site = start(policy=policy)
    future = train.options(name="t")(epochs=40, slow=str(slow))

    def resumed(count: int, nodes: int | None = None) -> None:
        """Wait for fragment number `count` + 1, and for its first steps."""

        def goes_on(run: RunState) -> bool:
            last = run.fragments[-1] if run.fragments else None
            return sum(f.resumed_from is not None for f in run.fragments) >= count and last.end is None

        site.until(goes_on)
        assert nodes is None or len(site.run.fragments[-1].nodes) == nodes

    site.until(lambda run: run.trainings and run.trainings["t"].progress.get("step", 0) > 5)
    for count, nodes in enumerate((4, 2, 3), start=1):
        policy.nodes = nodes
        resumed(count, nodes)
    queue = site.cluster.queue().items()
    site.cluster.cancel(job for job, status in queue if set(status["nodes"]) & set(site.run.trainings["t"].nodes))
    resumed(4)
    os.kill(_pid_of_a_slot(site, site.run.trainings["t"].nodes[0]), signal.SIGKILL)
    resumed(5)
    slow.unlink()

    result = future.result(timeout=60)
    alone = run_alone(train.func, epochs=40)
    assert result["metrics"]["samples"] == alone["metrics"]["samples"] == 40 * 200
    assert result["metrics"]["steps"] == alone["metrics"]["steps"]
    assert result["lr"] == alone["lr"]
    assert torch.allclose(torch.tensor(result["parameters"]), torch.tensor(alone["parameters"]), atol=1e-4)
    progress = site.until(lambda run: run.completed and run.trainings["t"].progress)
    assert (progress["samples_lost"], progress["duplicate_samples"]) == (0, 0)


def _pid_of_a_slot(site: Site, node: str) -> int:
    joined = [e for _, e in read_journal(site.executor.journal_path) if e.kind == "slot_joined"]
    return next(e.detail["pid"] for e in reversed(joined) if e.detail["node"] == node)


def test_a_main_job_that_needs_the_nodes_gets_them_at_once_and_the_training_goes_on_afterwards(start, tmp_path) -> None:
    slow = tmp_path / "slow"
    slow.touch()
    site = start(nodes=2, workload=(MainJob(submit=9.0, nodes=2, run=2.0, walltime=4.0),))
    future = make_app(max_nodes=2).options(name="t")(epochs=20, slow=str(slow))
    site.until(lambda run: run.blocks_ended)
    slow.unlink()
    assert future.result(timeout=60)["metrics"]["samples"] == 20 * 200
    run = site.run
    assert any("preempted" in reason for reason in run.blocks_ended)
    assert run.trainings["t"].resumes >= 1
    assert run.trainings["t"].progress["samples_lost"] == 0
    (delay,) = site.cluster.delays()
    assert delay["delay"] < 4.0, "the grace period at the very most"


def test_a_training_leaves_before_its_window_closes(start, tmp_path) -> None:
    """A queued job of the whole machine is planned at the end of a running one: the window's end is known."""
    long = MainJob(submit=0.0, nodes=1, run=16.0, walltime=16.0)
    head = MainJob(submit=0.3, nodes=3, run=1.0, walltime=2.0)
    site = start(nodes=3, workload=(long, head))
    source = site.executor.provider.window_source()
    site.until(lambda _: any(window.closes for window in source.survey().windows))
    slow = tmp_path / "slow"
    slow.touch()
    future = make_app(max_nodes=2).options(name="t")(epochs=20, slow=str(slow))
    site.until(lambda run: run.blocks_ended)
    slow.unlink()
    assert future.result(timeout=80)["metrics"]["samples"] == 20 * 200
    requests = [e for _, e in read_journal(site.executor.journal_path) if e.kind == "block_requested"]
    assert requests[0].detail["closes"] is not None
    assert requests[0].time + int(requests[0].detail["seconds"]) <= requests[0].detail["closes"]
    first = site.run.fragments[0]
    assert first.end is not None
    assert first.end < requests[0].detail["closes"]
    assert not first.lost
    assert max(delay["delay"] for delay in site.cluster.delays()) < 1.0


def test_a_training_that_keeps_crashing_ends_with_a_message_not_in_a_loop(start) -> None:
    start(nodes=1)

    def crash(session):
        import os
        import signal

        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(TooManyRestarts, match="processes died"):
        training_app(crash)().result(timeout=100)


def test_a_stopped_worker_is_given_up_after_the_silence_and_the_training_goes_on(start, tmp_path) -> None:
    slow = tmp_path / "slow"
    slow.touch()
    site = start(
        nodes=2,
        policy=ScriptedPolicy(1),
        silence=timedelta(seconds=3),
        planner=replace(PLANNER, join_timeout=5),
    )
    future = make_app().options(name="t")(epochs=20, slow=str(slow))
    site.until(lambda run: run.trainings and run.trainings["t"].checkpoints)
    pid = _pid_of_a_slot(site, site.run.trainings["t"].nodes[0])
    os.kill(pid, signal.SIGSTOP)
    try:
        site.until(lambda run: run.trainings["t"].fragments == 2)
        slow.unlink()
        assert future.result(timeout=60)["metrics"]["samples"] == 4000
    finally:
        if psutil.pid_exists(pid):
            os.kill(pid, signal.SIGKILL)
