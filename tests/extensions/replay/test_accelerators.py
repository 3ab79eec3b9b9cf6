"""Replays of nodes with several accelerators: shared by training jobs, or as whole nodes."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings

from freetrain_parsl.errors import InvalidSettings
from freetrain_parsl.extensions.replay.accelerators import Accelerators, SlotLog, over_accelerators, over_whole_nodes
from freetrain_parsl.extensions.replay.comparison import Contestant, compare
from freetrain_parsl.extensions.replay.trainer_files import MODELS
from freetrain_parsl.extensions.replay.trainers import TrainerSet, trainer_set
from freetrain_parsl.planning.curves.scaling import ScalingCurve
from freetrain_parsl.planning.model import PlannedJob
from tests.extensions.replay.small_logs import SmallLog, random_logs


def replayed(log, trainers, accelerators, policy="milp"):
    return compare(
        log, trainers, [Contestant(policy, objective="throughput", horizon=120.0)], accelerators=accelerators
    )


def singles_and_a_large_job(singles=4):
    jobs = [PlannedJob(f"s{n}", 1, 1, ScalingCurve({1: 10.0}), work_left=10.0 * 50) for n in range(singles)]
    large = over_accelerators(PlannedJob("large", 1, 4, ScalingCurve({1: 36.0, 4: 130.0})), 4)
    return TrainerSet("small", (*jobs, large), "throughput")


def test_a_curve_over_nodes_is_linear_inside_a_node_from_zero():
    trainer = over_accelerators(PlannedJob("a", 1, 3, ScalingCurve({1: 60.0, 2: 100.0, 3: 90.0})), 6)
    assert (trainer.min_nodes, trainer.max_nodes) == (1, 18)
    assert [trainer.rate(n) for n in (1, 2, 6, 12, 18)] == pytest.approx([10.0, 20.0, 60.0, 100.0, 90.0])
    of_two = over_accelerators(PlannedJob("b", 2, 3, ScalingCurve({2: 60.0, 3: 70.0})), 6)
    assert (of_two.min_nodes, of_two.max_nodes, of_two.rate(12)) == (12, 18, 60.0)


@pytest.mark.parametrize("model", MODELS)
def test_over_whole_nodes_a_curve_is_as_it_was(model):
    trainer = PlannedJob("a", 1, 64, MODELS[model].curve)
    back = over_whole_nodes(over_accelerators(trainer, 6), 6)
    assert (back.min_nodes, back.max_nodes) == (1, 64)
    assert all(back.rate(n) == trainer.rate(n) for n in (1, 2, 4, 8, 16, 32, 64))


def test_a_job_of_one_accelerator_uses_one_of_a_whole_node():
    whole = over_whole_nodes(PlannedJob("a", 1, 1, ScalingCurve({1: 7.0})), 6)
    assert (whole.min_nodes, whole.max_nodes, whole.rate(1)) == (1, 1, 7.0)


@given(random_logs())
def test_the_slots_of_a_log_are_idle_with_their_nodes(log):
    slots = SlotLog(log, 3)
    assert slots.mean_idle() == pytest.approx(3 * log.mean_idle())
    for whole, divided in zip(log.changes(), slots.changes(), strict=True):
        assert divided.time == whole.time
        assert divided.closed == tuple(f"{node}/{lane}" for node in whole.closed for lane in range(3))
        assert [hole.node for hole in divided.opened] == [f"{h.node}/{lane}" for h in whole.opened for lane in range(3)]


def test_single_jobs_share_a_node_and_leave_the_rest_to_a_large_one():
    log = SmallLog([("n0", 0, 100), ("n1", 0, 100)])
    shared = replayed(log, singles_and_a_large_job(), Accelerators(4))
    # 4 single jobs have a node for 50 s; the large job has the other, and later both.
    by_name = {one["name"]: one for one in shared["policies"][0]["trainers"]}
    assert {name: one["finished"] for name, one in by_name.items()} == {
        "s0": 50.0, "s1": 50.0, "s2": 50.0, "s3": 50.0, "large": None,
    }  # fmt: skip
    assert shared["samples"] == pytest.approx(4 * 500 + 50 * 36 + 50 * (36 + 94 / 3))
    assert shared["accelerator_hours"] == pytest.approx({"idle": 800 / 3600, "held": 800 / 3600, "used": 800 / 3600})
    assert shared["node_hours"] == pytest.approx({"idle": 200 / 3600, "used": 200 / 3600})
    assert (shared["dedicated_nodes"], shared["efficiency"]) == (2.0, pytest.approx(1.0))
    assert max(shared["policies"][0]["series"]["idle"]) == 2.0
    assert by_name["s0"]["node_hours"] == pytest.approx(50 / 4 / 3600)


def test_a_job_has_sizes_that_divide_a_node():
    """Of a node with 4 slots and a job on one, another gets 2 of the 3 that are left."""
    log = SmallLog([("n0", 0, 100)])
    one = PlannedJob("one", 1, 1, ScalingCurve({1: 100.0}))
    other = PlannedJob("other", 1, 3, ScalingCurve({1: 10.0, 3: 30.0}))
    shared = replayed(log, TrainerSet("small", (one, other), "throughput"), Accelerators(4))
    assert shared["samples"] == pytest.approx(100 * (100 + 20))
    assert shared["efficiency"] == shared["oracle"] == pytest.approx(1.0)
    assert shared["accelerator_hours"]["held"] == pytest.approx(300 / 3600)


@given(random_logs())
@settings(max_examples=15)
def test_no_policy_exceeds_the_oracle(log):
    shared = replayed(log, singles_and_a_large_job(3), Accelerators(4))
    assert shared["policies"][0]["refused"] == 0
    hours = shared["accelerator_hours"]
    assert hours["held"] <= hours["idle"] * (1 + 1e-9)
    endless = replayed(log, trainer_set("hpo:2", accelerators=4), Accelerators(4))
    if (ratio := endless["oracle_ratio"]) is not None:
        assert ratio <= 1 + 1e-9


def test_with_whole_nodes_a_single_job_wastes_the_rest_of_its_node():
    log = SmallLog([("n0", 0, 100), ("n1", 0, 100)])
    trainers = TrainerSet("small", singles_and_a_large_job().trainers[:4], "throughput")
    shared, whole = (replayed(log, trainers, Accelerators(4, share)) for share in (True, False))
    assert (shared["jct"]["mean"], whole["jct"]["mean"]) == (50.0, 75.0)
    assert whole["accelerator_hours"] == pytest.approx({"idle": 800 / 3600, "held": 800 / 3600, "used": 200 / 3600})
    assert whole["samples"] == shared["samples"] == pytest.approx(2000)
    assert whole["node_hours"]["used"] == pytest.approx(200 / 3600)


@pytest.mark.parametrize("policy", ["milp", "equal-share", "fcfs"])
def test_whole_nodes_are_as_without_accelerators(policy):
    log = SmallLog([("a", 0, 90), ("b", 10, 70), ("c", 20, 100), ("b", 80, 100)])
    plain = replayed(log, trainer_set("hpo:3"), None, policy)
    whole = replayed(log, trainer_set("hpo:3", accelerators=6), Accelerators(6, shared=False), policy)
    of = [[one["samples"] for one in result["policies"][0]["trainers"]] for result in (plain, whole)]
    assert of[0] == of[1]
    assert "accelerator_hours" not in plain
    assert "accelerators" not in plain


def test_single_jobs_of_the_built_in_set():
    chosen = trainer_set("single:60,hpo:4", accelerators=6)
    assert (len(chosen.trainers), chosen.objective) == (64, "throughput")
    single, hpo = chosen.trainers[0], chosen.trainers[-1]
    assert (single.name, single.min_nodes, single.max_nodes) == ("single-00", 1, 1)
    assert single.work_left / single.rate(1) == pytest.approx(24 * 3600)
    assert (hpo.min_nodes, hpo.max_nodes, hpo.rate(6)) == (1, 384, 2831.0)
    assert hpo.rate(1) == single.rate(1)
    assert trainer_set("single:2,mixed:3", accelerators=6).objective == "speedup"


@pytest.mark.parametrize(
    ("spec", "accelerators", "message"),
    [
        ("single:60", None, "add --accelerators N"),
        ("single:60,hpo:", 6, "expected a number after the colon"),
        ("single:60,vgg:3", 6, "unknown 'vgg:3'; give hpo:N, mixed:N or single:N"),
        ("hpo:4,mixed:9", 6, "give each kind once, and either hpo or mixed"),
    ],
)
def test_a_set_that_does_not_exist(spec, accelerators, message):
    with pytest.raises(InvalidSettings, match=message):
        trainer_set(spec, accelerators=accelerators)


@pytest.fixture
def replay(command, tmp_path, monkeypatch):
    """Run the command on a small log with single jobs and a large one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "idle.csv").write_text("node,start,end\nn0,0,100\nn1,0,90\n")
    return lambda options: command(f"replay idle.csv --nodes 2 --trainers single:8,hpo:1 {options}")


def test_the_command_says_how_nodes_are_used(replay, tmp_path):
    done = replay("--accelerators 6 --json out.json --report out.html")
    text = " ".join(done.out.split())
    assert (done.code, done.err) == (0, "")
    assert "2 nodes of 6 accelerators, shared by training jobs" in text
    assert "0.3 of 0.3 accelerator-hours" in text
    figures = json.loads((tmp_path / "out.json").read_text())
    assert figures["accelerators"] == {"per_node": 6, "shared": True}
    assert "2 nodes of 6 accelerators, each for one training job" in " ".join(
        replay("--accelerators 6 --whole-nodes").out.split()
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--whole-nodes", "unless they have several --accelerators"),
        ("--accelerators 1", "must be 2 to 64, got 1"),
        ("--accelerators 6 --blocks 5", "--blocks: does not work with --accelerators"),
    ],
)
def test_options_that_do_not_go_together(replay, options, message):
    done = replay(options)
    assert done.code == 2
    assert message in done.err
