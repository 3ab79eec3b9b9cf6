"""A training job with FSDP2 on the embedded cluster: resized in place."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch

from freetrain_parsl import CheckpointSettings, TrainingApp, training_app
from freetrain_parsl.campaign.logs import log_lines
from freetrain_parsl.executor.journal import read_journal
from freetrain_parsl.testing.faults import partition, slots_on_this_machine
from freetrain_parsl.training.fragment import run_local
from tests.executor.scenario import PLANNER, TRAININGS, ScriptedPolicy

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from freetrain_parsl.report.projection.run import RunState, TrainingState

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),  # by torch 2.8 itself
]


def make_app() -> TrainingApp:
    """Create a small sharded regression app that returns its parameters; see `tests.executor.scenario.make_app`."""

    @training_app(max_nodes=3)
    def train(session, *, epochs, slow=None, calls=None):
        import os
        import time
        from pathlib import Path

        import torch
        from torch.distributed.fsdp import fully_shard
        from torch.nn.functional import mse_loss
        from torch.utils.data import TensorDataset

        if calls is not None:
            with Path(calls).open("a") as file:
                file.write(f"{os.getpid()}\n")
        generator = torch.Generator().manual_seed(7)
        x = torch.randn(200, 6, generator=generator)
        y = x @ torch.randn(6, 1, generator=generator)
        net = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
        fully_shard(net, mesh=session.mesh)
        model, _ = session.prepare(net, torch.optim.Adam, lr=0.02)
        data = session.loader(TensorDataset(x, y), batch_size=16)
        for _ in session.epochs(epochs):
            for a, b in data:
                time.sleep(1.0 if slow is not None and Path(slow).exists() else 0.005)
                session.step(mse_loss(model(a), b))
        return torch.cat([p.detach().full_tensor().flatten() for p in net.parameters()]).tolist()

    return train


def test_a_sharded_training_changes_in_place_and_survives_a_loss_through_its_checkpoint(start, tmp_path: Path) -> None:
    """1 -> 2 -> 3 -> 2 slots in the same processes, without a checkpoint; after a SIGKILL it starts again."""
    slow, calls = tmp_path / "slow", tmp_path / "calls"
    slow.touch()
    train = make_app()
    policy = ScriptedPolicy(1)
    site = start(nodes=3, policy=policy, checkpoints=CheckpointSettings(interval=timedelta(seconds=1)))
    future = train.options(name="t")(epochs=30, slow=str(slow), calls=str(calls))

    def step() -> int:
        return site.run.trainings["t"].progress.get("step", 0)

    def goes_on_with(nodes: int) -> Callable[[RunState], bool]:
        return lambda run: len(run.trainings["t"].nodes) == nodes and run.fragments[-1].in_place

    site.until(lambda run: run.trainings and step() > 3)
    for nodes in (2, 3, 2):
        policy.nodes = nodes
        site.until(goes_on_with(nodes))
    assert [len(fragment.nodes) for fragment in site.run.fragments] == [1, 2, 3, 2]
    assert all(fragment.resumed_from is None for fragment in site.run.fragments)
    pids = [int(line) for line in calls.read_text().split()]
    assert len(pids) == len(set(pids)) == 3, "each process has called the function once"

    at = step()
    site.until(lambda run: step() > at and run.trainings["t"].progress["checkpoint_step"] >= at)
    saved = site.run.trainings["t"].progress["checkpoint_step"]
    os.kill(_pid_of_a_slot(site, site.run.trainings["t"].nodes[0]), signal.SIGKILL)
    site.until(lambda run: (run.trainings["t"].progress["resumed_from"] or 0) >= saved)
    assert site.run.fragments[-2].failure
    slow.unlink()

    result = torch.tensor(future.result(timeout=180))
    assert torch.allclose(result, torch.tensor(run_local(train.func, epochs=30)), atol=1e-4)
    progress = site.until(lambda run: run.completed and run.trainings["t"].progress)
    assert (progress["samples"], progress["samples_lost"], progress["duplicate_samples"]) == (30 * 200, 0, 0)


def test_nodes_are_exchanged_in_place_and_the_log_says_what_moved(start, tmp_path: Path) -> None:
    """One leaves and one joins with the same command; also if the one that leaves was to stay when the other began."""
    slow, calls = tmp_path / "slow", tmp_path / "calls"
    slow.touch()
    train = make_app().options(name="t", min_nodes=2)
    policy = ScriptedPolicy(3)
    site = start(nodes=3, policy=policy, planner=replace(PLANNER, idle_timeout=timedelta(minutes=5)))
    future = train(epochs=30, slow=str(slow), calls=str(calls))

    def runs_on(*nodes: str) -> Callable[[RunState], bool]:
        return lambda run: bool(run.trainings) and run.trainings["t"].nodes == nodes

    site.until(runs_on("n00", "n01", "n02"))
    site.until(lambda run: run.trainings["t"].progress.get("step", 0) > 1)
    policy.avoid, policy.nodes = frozenset(["n02"]), 2
    site.until(runs_on("n00", "n01"))
    policy.avoid = frozenset(["n00"])
    site.until(runs_on("n01", "n02"))
    assert [len(fragment.nodes) for fragment in site.run.fragments[-2:]] == [2, 2], "at once"
    called = len(calls.read_text().split())
    policy.avoid, policy.nodes = frozenset(), 3
    site.until(lambda run: len(calls.read_text().split()) > called)
    policy.avoid, policy.nodes = frozenset(["n01"]), 2
    site.until(runs_on("n00", "n02"))
    assert all(fragment.in_place for fragment in site.run.fragments[1:])
    slow.unlink()

    result = torch.tensor(future.result(timeout=180))
    assert torch.allclose(result, torch.tensor(run_local(train.func, epochs=30)), atol=1e-4)
    progress = site.until(lambda run: run.completed and run.trainings["t"].progress)
    assert (progress["samples"], progress["samples_lost"], progress["duplicate_samples"]) == (30 * 200, 0, 0)
    assert site.run.trainings["t"].resumes == 0
    marks = [line.text for line in log_lines(site.executor.run_dir, "t") if line.is_mark]
    assert len([mark for mark in marks if "in place after" in mark and "MB moved" in mark]) >= 3


def test_sharded_members_that_cannot_hear_each_other_start_again_from_their_checkpoint(start, tmp_path: Path) -> None:
    """No traffic between two live members: the model's own collectives would wait for half an hour."""
    slow = tmp_path / "slow"
    slow.touch()
    train = make_app()
    site = start(
        nodes=2,
        policy=ScriptedPolicy(2),
        trainings=replace(TRAININGS, peer_timeout=timedelta(seconds=3)),
        checkpoints=CheckpointSettings(interval=timedelta(seconds=1)),
    )
    future = train.options(name="t")(epochs=30, slow=str(slow))

    def has_saved_on_two(run: RunState) -> bool:
        saved_last = run.checkpoints[-1][0] if run.checkpoints else 0.0
        return bool(run.fragments) and len(run.fragments[-1].nodes) == 2 and saved_last > run.fragments[-1].start

    site.until(has_saved_on_two)
    one, other = slots_on_this_machine(entry for _, entry in read_journal(site.executor.journal_path)).values()
    begun, started = time.monotonic(), site.run.fragments[-1].start
    with partition(one, [other]) as connections:
        assert connections
        site.until(lambda run: run.fragments[-1].start > started and run.fragments[-1].resumed_from is not None)
    assert time.monotonic() - begun < 60
    assert site.run.fragments[-2].failure
    slow.unlink()
    result = torch.tensor(future.result(timeout=180))
    assert torch.allclose(result, torch.tensor(run_local(train.func, epochs=30)), atol=1e-4)


def test_after_the_loss_of_a_process_a_sharded_training_continues_from_memory_in_one_restart(
    start, tmp_path: Path
) -> None:
    """A process of three is killed; the others wait for its replacement, and no checkpoint is read."""
    slow = tmp_path / "slow"
    slow.touch()
    train = make_app().options(name="t", min_nodes=3, snapshot_every=2)
    site = start(nodes=3, policy=ScriptedPolicy(3), checkpoints=CheckpointSettings(interval=timedelta(hours=1)))
    future = train(epochs=30, slow=str(slow))

    def state() -> TrainingState:
        return site.run.trainings["t"]

    site.until(lambda run: run.trainings and len(state().nodes) == 3 and state().progress.get("step", 0) > 4)
    before, step = len(site.run.fragments), state().progress["step"]
    os.kill(_pid_of_a_slot(site, state().nodes[1]), signal.SIGKILL)
    site.until(lambda run: run.fragments[-1].resumed_from is not None)
    assert step - 3 <= site.run.fragments[-1].resumed_from
    assert state().progress["checkpoint_step"] is None
    assert len(site.run.fragments) == before + 1
    slow.unlink()
    result = torch.tensor(future.result(timeout=180))
    assert torch.allclose(result, torch.tensor(run_local(train.func, epochs=30)), atol=1e-4)
    assert len(site.run.fragments) == before + 1
    progress = site.until(lambda run: run.completed and run.trainings["t"].progress)
    assert (progress["samples"], progress["samples_lost"], progress["duplicate_samples"]) == (30 * 200, 0, 0)


def _pid_of_a_slot(site: Any, node: str) -> int:
    joined = [entry for _, entry in read_journal(site.executor.journal_path) if entry.kind == "slot_joined"]
    return next(entry.detail["pid"] for entry in reversed(joined) if entry.detail["node"] == node)


def test_one_node_is_preempted_and_the_others_continue_with_its_part_of_the_state(start, tmp_path: Path) -> None:
    """3 nodes in two batch jobs: that of the third is preempted, and gives its part away in the 4 s of grace."""
    slow, calls = tmp_path / "slow", tmp_path / "calls"
    slow.touch()
    train = make_app()
    site = start(nodes=3, policy=ScriptedPolicy(3), checkpoints=CheckpointSettings(interval=timedelta(hours=1)))

    def main_job() -> str:
        walltime = timedelta(minutes=5)
        return site.cluster.submit(["sleep", "300"], nodes=1, walltime=walltime, preemptible=False, name="main")

    def runs_on(nodes: int) -> Callable[[RunState], bool]:
        return lambda run: bool(run.trainings) and len(run.trainings["t"].nodes) == nodes

    def steps() -> int:
        return site.run.trainings["t"].progress.get("step", 0)

    other = main_job()
    future = train.options(name="t", min_nodes=2)(epochs=30, slow=str(slow), calls=str(calls))
    site.until(runs_on(2))
    site.until(lambda run: steps() > 1)
    site.cluster.cancel(other)
    site.until(runs_on(3))
    at = steps()
    site.until(lambda run: steps() > at)
    main_job()
    site.until(lambda run: any("preempted" in reason for reason in run.blocks_ended))
    site.until(runs_on(2))
    slow.unlink()

    result = torch.tensor(future.result(timeout=180))
    assert torch.allclose(result, torch.tensor(run_local(train.func, epochs=30)), atol=1e-4)
    progress = site.until(lambda run: run.completed and run.trainings["t"].progress)
    assert (progress["samples"], progress["samples_lost"], progress["duplicate_samples"]) == (30 * 200, 0, 0)
    run = site.run
    assert [len(fragment.nodes) for fragment in run.fragments] == [2, 3, 2]
    assert [fragment.in_place for fragment in run.fragments] == [False, True, True]
    assert not any(fragment.failure for fragment in run.fragments), "also if the newcomer was in its first step"
    assert all(fragment.resumed_from is None for fragment in run.fragments)
    pids = [int(line) for line in calls.read_text().split()]
    assert len(pids) == len(set(pids)), "each process has called the function once"
