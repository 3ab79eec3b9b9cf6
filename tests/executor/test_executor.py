"""Real training jobs and tasks through real Parsl on a real embedded cluster."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import parsl
import pytest
from parsl import bash_app, python_app
from parsl.executors import ThreadPoolExecutor
from parsl.executors.errors import InvalidResourceSpecification

from freetrain_parsl import CheckpointSettings, training_app
from freetrain_parsl.errors import InvalidApp
from tests.executor.scenario import ScriptedPolicy, make_app

pytestmark = pytest.mark.cluster


@pytest.mark.smoke
def test_an_exception_of_the_user_arrives_with_its_remote_traceback(start) -> None:
    start(nodes=1)
    with pytest.raises(ValueError, match="the user's own mistake") as caught:
        make_app()(epochs=2, fail_at=1).result(timeout=60)
    frames = [entry.name for entry in caught.traceback]
    assert "train" in frames, "the user's frame is part of the traceback"


def test_an_exception_on_several_nodes_ends_the_training_and_frees_the_nodes(start) -> None:
    site = start(nodes=2, policy=ScriptedPolicy(2))
    train = make_app(min_nodes=2)
    with pytest.raises(ValueError, match="the user's own mistake"):
        train(epochs=2, fail_at=1).result(timeout=60)
    assert train(epochs=2).result(timeout=60)["metrics"]["epochs"] == 2
    assert [t.state for t in site.run.trainings.values()] == ["failed", "finished"]


@pytest.mark.smoke
def test_ordinary_apps_run_as_ordinary_tasks_beside_trainings(start) -> None:
    start(nodes=2)

    @python_app
    def square(x):
        return x * x

    @python_app
    def fail():
        return 1 / 0

    @bash_app
    def say(stdout):
        return "echo hello"

    training = make_app(max_nodes=2)(epochs=10)
    assert [future.result(timeout=60) for future in [square(i) for i in range(20)]] == [i * i for i in range(20)]
    with pytest.raises(ZeroDivisionError):
        fail().result(timeout=60)
    assert say(stdout=parsl.AUTO_LOGNAME).result(timeout=60) == 0
    assert training.result(timeout=60)["metrics"]["samples"] == 2000


def test_a_training_that_needs_more_nodes_than_the_cluster_has_is_refused_at_once(start) -> None:
    site = start(nodes=2)
    with pytest.raises(InvalidApp, match="needs 3 nodes at the same time, but there are only 2"):
        make_app(min_nodes=3, max_nodes=3).options(name="t")(epochs=1).result(timeout=180)
    assert site.until(lambda run: run.trainings["t"].error).startswith("InvalidApp")


def test_an_unpicklable_global_is_named_by_the_future(start) -> None:
    start(nodes=1)
    stream = iter(number for number in range(3))

    def train(session):
        return next(stream)

    with pytest.raises(InvalidApp, match=r"the variable 'stream', used in .*train\(\), is of type generator"):
        training_app(train).options(name="t")().result(timeout=180)


def test_other_executors_of_the_same_config_are_untouched(start) -> None:
    site = start(nodes=1, also=[ThreadPoolExecutor(label="threads", max_threads=2)])

    @python_app(executors=["threads"])
    def pid():
        return os.getpid()

    assert {future.result(timeout=20) for future in [pid() for _ in range(5)]} == {os.getpid()}
    assert site.run.blocks_requested == 0
    assert make_app()(epochs=1).result(timeout=60)["metrics"]["epochs"] == 1


def test_what_a_run_leaves_is_private_to_the_user(start, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        site = start(nodes=1, checkpoints=CheckpointSettings(interval=timedelta(seconds=0.1)))
        make_app()(epochs=4).result(timeout=60)
        for path in (site.executor.run_dir, site.executor.logdir, site.executor.cert_dir, site.executor.checkpoint_dir):
            assert Path(path).stat().st_mode & 0o077 == 0, path
        parsl.dfk().cleanup()
        parsl.clear()
    finally:
        os.umask(before)
    paths = [path for top in (site.executor.run_dir, site.executor.checkpoint_dir) for path in Path(top).rglob("*")]
    assert {path.name for path in paths} >= {"journal.sqlite", "freetrain.log", "manager.log", "manifest.json"}
    assert [f"{path} {path.stat().st_mode:o}" for path in paths if path.stat().st_mode & 0o077] == []


def test_a_block_that_nothing_wants_ends_by_itself_early(start) -> None:
    site = start(nodes=2)
    make_app()(epochs=1).result(timeout=60)
    site.until(lambda run: run.blocks_ended, seconds=20)
    assert not [job for job in site.cluster.queue().values() if job["kind"] == "preemptible"]


def test_unknown_resources_and_names_in_use_are_refused_at_submission(start) -> None:
    start(nodes=1)

    @python_app
    def greedy(parsl_resource_specification=None):
        return 1

    with pytest.raises(InvalidResourceSpecification, match="takes no resource specification"):
        greedy(parsl_resource_specification={"cores": 4}).result(timeout=10)
    train = make_app()
    first = train.options(name="same")(epochs=1)
    with pytest.raises(ValueError, match="another name"):
        train.options(name="same")(epochs=1).result(timeout=10)
    assert first.result(timeout=60)


@pytest.mark.smoke
def test_a_second_training_of_the_same_name_resumes_from_the_first_ones_checkpoint(start) -> None:
    site = start(nodes=1)
    train = make_app()
    train.options(name="t")(epochs=2).result(timeout=60)
    longer = train.options(name="t")(epochs=3).result(timeout=60)
    assert longer["metrics"]["epochs"] == 3
    assert site.run.fragments[-1].resumed_from == 2 * 13


def test_data_workers_start_in_a_slot_that_was_forked(start) -> None:
    """They come from multiprocessing's fork server, whose lock was held when the slot's own one was forked."""
    start(nodes=1)

    @training_app
    def train(session):
        import torch
        from torch.utils.data import TensorDataset

        net = torch.nn.Linear(1, 1)
        model, _ = session.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        data = session.loader(TensorDataset(torch.ones(8, 1)), batch_size=4, num_workers=1)
        for _epoch in session.epochs(1):
            for (x,) in data:
                session.step(model(x).mean())
        return session.metrics["samples"]

    assert train().result(timeout=60) == 8
