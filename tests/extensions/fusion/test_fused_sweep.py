"""A sweep whose training jobs run fused, on a real embedded cluster, compared with each training job alone."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

import pytest

from freetrain_parsl import training_app
from freetrain_parsl.executor.journal import read_journal
from freetrain_parsl.extensions.fusion.slot.array_sizes import MeasuredSize, size_key, write_array_size
from freetrain_parsl.protocol import journal as record
from freetrain_parsl.training.fragment import run_local

if TYPE_CHECKING:
    from freetrain_parsl import TrainingApp
    from freetrain_parsl.report.projection.run import RunState

pytestmark = pytest.mark.cluster

RATES = [0.002 * (number + 1) for number in range(6)]
EPOCHS = 40


def make_app() -> TrainingApp:
    @training_app
    def train(session, *, lr, epochs=EPOCHS):
        import torch
        from torch.nn.functional import cross_entropy
        from torch.utils.data import TensorDataset

        generator = torch.Generator().manual_seed(7)
        x = torch.randn(320, 32, generator=generator, dtype=torch.float64)
        y = torch.randint(0, 10, (320,), generator=generator)
        layers = [torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.Linear(64, 10)]
        net = torch.nn.Sequential(*layers).double()
        model, _ = session.prepare(net, torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9))
        data = session.loader(TensorDataset(x, y), batch_size=16)
        for _epoch in session.epochs(epochs):
            for a, b in data:
                session.step(cross_entropy(model(a), b))
        parameters = torch.cat([p.detach().flatten() for p in net.parameters()]).tolist()
        return {"samples": session.metrics["samples"], "loss": session.metrics["loss"], "parameters": parameters}

    return train


def assert_as_alone(train: TrainingApp, results: list[dict[str, Any]]) -> None:
    for lr, result in zip(RATES, results, strict=True):
        alone = run_local(train.func, lr=lr)
        assert result["samples"] == alone["samples"] == EPOCHS * 320
        assert result["loss"] == pytest.approx(alone["loss"], abs=1e-9)
        assert result["parameters"] == pytest.approx(alone["parameters"], abs=1e-8)


def records(site: Any, kind: type[record.Record]) -> list[Any]:
    entries = [entry.record for _, entry in read_journal(site.executor.journal_path, 0)]
    return [entry for entry in entries if isinstance(entry, kind)]


def exactly_once(run: RunState) -> bool:
    return all(
        (training.progress["samples_lost"], training.progress["duplicate_samples"]) == (0, 0)
        for training in run.trainings.values()
    )


def disturb(site: Any) -> None:
    """Kill the process of one slot, and cancel all blocks, once a job has a checkpoint."""
    site.until(lambda run: any(t.progress.get("checkpoint_step") for t in run.trainings.values()))
    joined = {entry.subject: entry for entry in records(site, record.SlotJoined)}
    os.kill(next(iter(joined.values())).pid, signal.SIGKILL)
    site.until(lambda run: any(fragment.failure for fragment in run.fragments))
    queue = site.cluster.queue().items()
    site.cluster.cancel(job for job, status in queue if status["nodes"])


@pytest.mark.smoke
def test_a_sweep_trains_in_arrays_and_each_training_ends_as_alone(start) -> None:
    train = make_app()
    site = start(nodes=2)
    futures = train.sweep(lr=RATES)
    results = [future.result(timeout=200) for future in futures]
    assert_as_alone(train, results)
    arrays = records(site, record.ArrayStarted)
    assert len(arrays) < len(RATES)
    fragments = records(site, record.FragmentStarted)
    assert len({fragment.subject for fragment in fragments}) == len(RATES)
    site.until(lambda run: run.completed == len(RATES))
    assert exactly_once(site.run)


def test_a_killed_array_and_a_cancelled_block_lose_no_sample(start) -> None:
    train = make_app()
    site = start(nodes=2)
    futures = train.sweep(lr=RATES)
    disturb(site)
    results = [future.result(timeout=200) for future in futures]
    assert_as_alone(train, results)
    site.until(lambda run: run.completed == len(RATES))
    assert exactly_once(site.run)


def test_members_in_turns_share_one_base_after_a_killed_process_and_a_cancelled_block(start, tmp_path) -> None:
    """An earlier run has found that fusing does not pay, so they begin in turns, each as alone."""

    @training_app
    def train(session, *, lr):
        import torch
        from torch.utils.data import TensorDataset

        with torch.random.fork_rng():
            torch.manual_seed(7)
            base = torch.nn.Sequential(torch.nn.Linear(32, 512), torch.nn.Tanh()).double().requires_grad_(False)
        head = torch.nn.Linear(512, 1).double()
        model, _ = session.prepare(torch.nn.Sequential(base, head), torch.optim.Adam(head.parameters(), lr=lr))
        x = torch.randn(320, 32, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
        data = session.loader(TensorDataset(x), batch_size=16)
        for _epoch in session.epochs(40):
            for (a,) in data:
                session.step(model(a).square().mean())
        return {"loss": session.metrics["loss"], "head": head.weight.flatten().tolist()}

    point = {"lr": RATES[0]}
    request = train.call_request((), point)
    (tmp_path / "checkpoints").mkdir()
    key = size_key(request.options.code, 1, request.likeness)
    write_array_size(tmp_path / "checkpoints", key, MeasuredSize(4, 0.9, "fused they are 0.90 times as fast"))
    site = start(nodes=2)
    futures = train.sweep(lr=RATES[:4])
    disturb(site)
    results = [future.result(timeout=200) for future in futures]
    for lr, result in zip(RATES[:4], results, strict=True):
        alone = run_local(train.func, lr=lr)
        assert result["head"] == pytest.approx(alone["head"], rel=0, abs=1e-12)
    site.until(lambda run: run.completed == 4)
    assert exactly_once(site.run)
    why = "fused they are 0.90 times as fast (found by an earlier run)"
    assert {entry.turns for entry in records(site, record.BaseShared)} == {why}
    assert max(entry.size for entry in records(site, record.BaseShared)) == 33 * 512 * 8


def test_fuse_false_trains_each_by_itself(start) -> None:
    train = make_app()
    site = start(nodes=2)
    futures = train.options(fuse=False).sweep(lr=RATES[:2], epochs=[2, 2])
    assert all(future.result(timeout=100)["samples"] == 2 * 320 for future in futures)
    assert records(site, record.ArrayStarted) == []
    assert records(site, record.CohortJoined) == []


def test_members_of_several_kinds_are_fused_with_their_own_and_one_without_another_says_so(start) -> None:
    @training_app(name="{activation}-{lr}")
    def train(session, *, activation, lr):
        import time

        import torch

        net = torch.nn.Sequential(torch.nn.Linear(8, 8), getattr(torch.nn, activation)(), torch.nn.Linear(8, 1))
        model, _ = session.prepare(net, torch.optim.SGD(net.parameters(), lr=lr))
        data = session.loader(torch.randn(320, 8, generator=torch.Generator().manual_seed(1)), batch_size=16)
        for _epoch in session.epochs(50):
            for x in data:
                session.step(model(x).square().mean())
                time.sleep(0.01)
        return session.metrics["samples"]

    site = start(nodes=2)
    kinds = ["Tanh", "ReLU", "Tanh", "ReLU", "GELU"]
    futures = train.sweep(activation=kinds, lr=[0.01, 0.01, 0.02, 0.02, 0.01])
    assert [future.result(timeout=200) for future in futures] == [50 * 320] * 5
    names = [{name.partition("-")[0] for name in entry.trainings} for entry in records(site, record.CohortJoined)]
    assert names[0] == set(kinds)
    assert len(names) > 2
    assert all(len(each) == 1 for each in names[1:])
    assert "GELU-0.01" in {entry.subject for entry in records(site, record.TrainsAlone)}
    assert futures[4].fusion.startswith("not fused: ")
