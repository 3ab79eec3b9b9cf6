"""An executor with two kinds of nodes."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from freetrain_parsl import EmbeddedClusterProvider, FreeTrainExecutor, NodeKind, training_app
from freetrain_parsl.errors import InvalidApp, InvalidSettings
from freetrain_parsl.executor.batch.providers import NODE_KIND, provider_for
from freetrain_parsl.executor.jobs.curve_learning import CurveLearning
from freetrain_parsl.executor.node_kinds import refuse_unknown_kinds
from freetrain_parsl.extensions.replay.recorded_run import decide_again, read_run
from freetrain_parsl.planning import events as ev
from freetrain_parsl.planning.curves.scaling import ScalingCurve
from freetrain_parsl.planning.model import PlannedJob
from freetrain_parsl.planning.policies import MilpPolicy
from freetrain_parsl.protocol.reports import Progress
from freetrain_parsl.windows.system import BlockSpec
from tests.executor.scenario import make_app

if TYPE_CHECKING:
    from pathlib import Path


def two_kinds(tmp_path: Path, *, gpus: int = 0) -> list[NodeKind]:
    """Make two kinds of an embedded cluster of three nodes, the first with `gpus` accelerators."""
    cluster = EmbeddedClusterProvider(nodes=3, cluster_dir=str(tmp_path / "cluster"), grace=timedelta(seconds=4))
    return [
        NodeKind("fast", cluster.limited_to(("n00",)), available_accelerators=gpus, speed=8.0),
        NodeKind("slow", cluster.limited_to(("n01", "n02"), "export OTHER=1")),
    ]


# Settings.


def test_kinds_are_refused_without_names_of_their_own_and_beside_a_provider(tmp_path) -> None:
    fast, slow = two_kinds(tmp_path)
    with pytest.raises(InvalidSettings, match="a name of its own, got \\['fast', 'fast'\\]"):
        FreeTrainExecutor(node_kinds=[fast, fast])
    with pytest.raises(InvalidSettings, match="of each kind only"):
        FreeTrainExecutor(provider=slow.provider, node_kinds=[fast, slow])
    with pytest.raises(InvalidSettings, match="the first a letter, got 'a b'"):
        NodeKind("a b", slow.provider)
    with pytest.raises(InvalidSettings, match="speed must be a number from"):
        NodeKind("a", slow.provider, speed=0.0)


def test_a_training_that_asks_for_unknown_nodes_is_refused() -> None:
    request = make_app(node_kinds=["fats"]).request("t")
    with pytest.raises(InvalidApp, match=r"no nodes of kind 'fats' \(did you mean 'fast'\?\)"):
        refuse_unknown_kinds(request, ["fast", "slow"])
    with pytest.raises(InvalidApp, match="the site has no kinds of nodes"):
        refuse_unknown_kinds(request, [""])
    refuse_unknown_kinds(make_app(node_kinds=["fast"]).request("t"), ["fast", "slow"])


def test_a_curve_for_each_kind_limits_a_training_to_these_kinds() -> None:
    request = make_app(scaling={"fast": {1: 90.0}, "slow": {1: 10.0, 2: 19.0}}).request("t")
    assert request.node_kinds == ("fast", "slow")
    assert request.trainer().on_kind("slow").rate(2) == 19.0
    assert make_app(scaling={"fast": {1: 9.0}}, node_kinds=["fast", "slow"]).request("t").node_kinds == ("fast", "slow")
    with pytest.raises(InvalidApp, match="not both"):
        make_app(scaling={"fast": {1: 90.0}, 2: 10.0})
    with pytest.raises(InvalidApp, match="node_kinds is a list of names"):
        training_app(node_kinds="fast")(lambda session: None)


def test_blocks_export_the_kind_of_their_nodes(tmp_path) -> None:
    _, slow = two_kinds(tmp_path)
    changed = provider_for(slow.provider, BlockSpec("0", ("n01",), 60.0, 60.0, node_kind="slow"))
    assert f"export {NODE_KIND}=slow\nexport OTHER=1" in changed.worker_init
    assert NODE_KIND not in provider_for(slow.provider, BlockSpec("0", ("n01",), 60.0, 60.0)).worker_init


# Learned curves.


def progress(samples: int, seconds: float) -> Progress:
    return Progress(step=samples, epoch=0, samples=samples, slot_seconds=seconds)


def described(learning: CurveLearning, name: str) -> PlannedJob:
    event = learning.completed(ev.TrainerLearned(0.0, PlannedJob(name, 1, 4, ScalingCurve.default())))
    assert isinstance(event, ev.TrainerLearned)
    return event.trainer


def test_each_kind_has_a_curve_and_the_others_are_estimated_from_its_speed() -> None:
    learning = CurveLearning({"fast": 8.0, "slow": 1.0})
    for name in ("a", "b"):
        learning.completed(ev.TrainerSubmitted(0.0, PlannedJob(name, 1, 4, ScalingCurve.default())))
    before = described(learning, "a")
    assert before.on_kind("fast").rate(1) == pytest.approx(8 * before.on_kind("slow").rate(1))

    for samples, seconds in ((0, 0.0), (100, 10.0)):
        learning.observe(0.0, "a", group=1, nodes=1, slots=1, progress=progress(samples, seconds), kind="slow")
    stated = described(learning, "a")
    assert stated.curves["slow"](1) == pytest.approx(10.0)
    assert stated.curves["fast"](1) == pytest.approx(80.0)  # the stated ratio

    for samples, seconds in ((100, 10.0), (400, 20.0)):
        learning.observe(1.0, "a", group=2, nodes=1, slots=1, progress=progress(samples, seconds), kind="fast")
    assert described(learning, "a").curves["fast"](1) == pytest.approx(30.0)  # measured
    for samples, seconds in ((0, 0.0), (100, 50.0)):
        learning.observe(2.0, "b", group=1, nodes=1, slots=1, progress=progress(samples, seconds), kind="slow")
    assert described(learning, "b").curves["fast"](1) == pytest.approx(3 * 2.0)  # the ratio measured with the other


# Real training jobs.


@pytest.mark.cluster
@pytest.mark.parametrize("gpus", [0, 1], ids=["in_place", "by_checkpoint"])
def test_a_training_moves_to_faster_nodes_when_they_become_free(start, tmp_path, gpus) -> None:
    """A main job holds the fast node at first. GPU nodes and others cannot form a group, hence the checkpoint."""
    slow = tmp_path / "slow"
    slow.touch()
    site = start(provider=None, node_kinds=two_kinds(tmp_path, gpus=gpus))
    main = site.cluster.submit(["sleep", "600"], walltime=timedelta(minutes=10), preemptible=False)
    assert site.cluster.jobs([main])[main]["nodes"] == ["n00"]
    future = make_app(max_nodes=1).options(name="t")(epochs=40, slow=str(slow), pause=0.5)
    site.until(lambda run: run.trainings and run.trainings["t"].progress.get("step", 0) > 3)
    assert site.run.trainings["t"].node_kind == "slow"
    assert site.run.trainings["t"].remark() == "on slow nodes"
    site.cluster.cancel([main])
    site.until(lambda run: run.trainings["t"].node_kind == "fast")
    step = site.run.trainings["t"].progress["step"]
    site.until(lambda run: run.trainings["t"].progress["step"] > step)
    slow.unlink()
    assert future.result(timeout=60)["metrics"]["samples"] == 40 * 200
    last = site.until(lambda run: run.completed and run.fragments[-1])
    assert (last.in_place, last.resumed_from is not None) == ((False, True) if gpus else (True, False))
    progress = site.run.trainings["t"].progress
    assert (progress["samples_lost"], progress["duplicate_samples"]) == (0, 0)
    recorded = read_run(site.executor.journal_path)  # the planner decides the same again from the journal
    assert [step.actions for step in decide_again(recorded, MilpPolicy())] == [step.actions for step in recorded.steps]


@pytest.mark.cluster
def test_trainings_use_only_the_kinds_that_they_ask_for(start, tmp_path) -> None:
    site = start(provider=None, node_kinds=two_kinds(tmp_path))
    train = make_app(max_nodes=2, fuse=False)
    futures = [
        train.options(name="s", node_kinds=["slow"])(epochs=4),
        train.options(name="f", node_kinds=["fast"])(epochs=4),
    ]
    for future in futures:
        assert future.result(timeout=120)["metrics"]["samples"] == 4 * 200
    nodes = {name: {node for f in site.run.fragments if f.training == name for node in f.nodes} for name in "sf"}
    assert nodes["f"] == {"n00"}
    assert nodes["s"] <= {"n01", "n02"}
    with pytest.raises(InvalidApp, match="no nodes of kind 'gpu'; the kinds are fast, slow"):
        train.options(name="g", node_kinds=["gpu"])(epochs=4).result(timeout=60)
