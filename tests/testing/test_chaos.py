"""Chaos episodes: their checks can fail."""

from __future__ import annotations

import os
import random
import sqlite3
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from freetrain_parsl.errors import UsageError
from freetrain_parsl.executor.journal import Journal
from freetrain_parsl.protocol import journal as record
from freetrain_parsl.storage.posix import CheckpointDirectory
from tests.support.chaos.claims import Claim, claim_slot, claims_in, violations_in
from tests.support.chaos.damage import damage_newest
from tests.support.chaos.episode import EpisodeReport, StruckFault, choose_menu, seeds_of, summary
from tests.support.chaos.trainings import BATCH, SUBJECTS, chosen
from tests.support.chaos.verification import problems_of, reference, unexplained_failures

if TYPE_CHECKING:
    from pathlib import Path

EPOCHS, SAMPLES = 2, 2 * BATCH
EXACT = SUBJECTS[0]
(REPLICATED,) = chosen("replicated", SUBJECTS)


@pytest.fixture
def result(tmp_path: Path) -> Path:
    """Save the result of an undisturbed run."""
    path = tmp_path / "result.pt"
    torch.save(reference(EXACT, EPOCHS, SAMPLES), path)
    return path


def test_an_undisturbed_result_has_no_problems(result):
    assert problems_of(EXACT, result, EPOCHS, SAMPLES) == []


def test_the_counts_name_each_missing_and_each_repeated_sample(result):
    state = torch.load(result, weights_only=True)
    state["model"]["counts"][0, 5] = 0.0
    state["model"]["counts"][1, 6:8] = -2.0
    torch.save(state, result)
    problems = problems_of(replace(EXACT, deterministic=False), result, EPOCHS, SAMPLES)
    assert problems == [
        "exact: epoch 0: 1 samples missing, 0 repeated, 0 partial",
        "exact: epoch 1: 0 samples missing, 2 repeated, 0 partial",
    ]


def test_a_deterministic_training_must_have_the_same_bits(result):
    state = torch.load(result, weights_only=True)
    weight = state["model"]["net.0.weight"]
    weight[0, 0] = torch.nextafter(weight[0, 0], torch.tensor(1e9))
    torch.save(state, result)
    [problem] = problems_of(EXACT, result, EPOCHS, SAMPLES)
    assert problem.startswith("exact: net.0.weight differs by ")
    assert problems_of(replace(EXACT, deterministic=False), result, EPOCHS, SAMPLES) == []


def test_a_sharded_training_must_have_the_parameters_and_losses_of_one_process_but_for_rounding(tmp_path):
    state, path = reference(REPLICATED, EPOCHS, SAMPLES), tmp_path / "result.pt"
    weight, history = state["model"]["net.0.weight"], state["metrics"]["history"]
    for difference, expected in ((1e-13, []), (1e-8, ["net.0.weight differs by 1e-08 from the undisturbed run"])):
        changed = {**state, "model": {**state["model"], "net.0.weight": weight + difference}}
        torch.save(changed, path)
        assert problems_of(REPLICATED, path, EPOCHS, SAMPLES) == [f"replicated: {problem}" for problem in expected]
    rows = [*history[:-1], {**history[-1], "loss": history[-1]["loss"] * (1 + 1e-5)}]
    torch.save({**state, "metrics": {**state["metrics"], "history": rows}}, path)
    [problem] = problems_of(REPLICATED, path, EPOCHS, SAMPLES)
    assert problem.startswith("replicated: losses [")


def test_the_training_jobs_of_an_episode_can_be_chosen():
    assert chosen(None, SUBJECTS) == SUBJECTS
    assert [subject.name for subject in chosen("replicated,sharded", SUBJECTS)] == ["replicated", "sharded"]
    with pytest.raises(UsageError, match=r"no training job 'shard' \(did you mean 'sharded'"):
        chosen("shard", SUBJECTS)


def test_a_result_that_was_never_saved_is_a_problem(tmp_path):
    assert problems_of(EXACT, tmp_path / "none.pt", EPOCHS, SAMPLES) == ["exact: saved no result"]


def test_a_checkpoint_is_damaged_only_where_another_one_remains(tmp_path):
    checkpoints = CheckpointDirectory(tmp_path, "net")
    checkpoints.open()
    for step in (1, 2):
        assert damage_newest(tmp_path, random.Random(0)) is None
        checkpoints.publish(step, lambda file: file.write(b"weights"), {})
    assert str(damage_newest(tmp_path, random.Random(0))).startswith("net/step-0000000002/")


def test_two_processes_in_one_slot_are_a_violation(tmp_path, monkeypatch):
    def claim(lane: int, training: str) -> Claim:
        monkeypatch.setenv("PARSL_WORKER_RANK", str(lane))
        claim_slot(tmp_path, training)
        return Claim(training, "n0", lane, "", os.getpid())

    monkeypatch.setenv("FREETRAIN_CLUSTER_NODE", "n0")
    both = [claim(0, "one"), claim(1, "other")]
    assert claims_in(tmp_path) == both
    claim(1, "member of the same array")
    assert violations_in(tmp_path) == []
    if (pid := os.fork()) == 0:
        claim(1, "third")
        os._exit(0)
    os.waitpid(pid, 0)
    (violation,) = violations_in(tmp_path)
    assert violation.startswith("two processes in one slot: {'training': 'third', 'node': 'n0', 'lane': 1")
    assert '"training": "other"' in violation
    assert claims_in(tmp_path) == both


def test_a_failure_on_units_that_no_fault_has_hit_is_a_problem(tmp_path):
    path = tmp_path / "journal.sqlite"
    journal = Journal(path)
    for entry in (
        record.Assign("t", ["n0/0"]),
        record.FragmentStarted("t", 1, ["n0/0"], in_place=False, paused=0.0),
        record.Grow("t", ["n0/0", "n0/1"]),
        record.FragmentEnded("t", 1, ["n0/0"], failure=True),  # a newcomer has failed
        record.FragmentEnded("t", 2, ["n0/0", "n0/1"], failure=True),
        record.Shrink("t", ["n0/0"]),
        record.FragmentEnded("t", 3, ["n0/0", "n0/1"], failure=False),
        record.FragmentEnded("t", 4, ["n0/0"], failure=True),
    ):
        journal.write(0.0, entry)
    journal.close()
    assert unexplained_failures(path, {"n0/0"}) == []
    assert unexplained_failures(path, {"n0/1"}) == ["t: failed on n0/0, which no fault has hit"]
    assert len(unexplained_failures(path, {"n0/2"})) == 3
    sqlite3.connect(tmp_path / "empty.sqlite").close()
    (tmp_path / "empty.sqlite").touch()
    assert unexplained_failures(tmp_path / "empty.sqlite", set()) == []


def test_the_summary_counts_faults_and_names_failures():
    fault = StruckFault(1.0, "kill", "1 of 4")
    good = EpisodeReport("bare", 1, (fault, fault), 4, (), 2.0)
    bad = EpisodeReport("bare", 2, (), 3, ("plain: failed",), 3.0)
    assert [EpisodeReport.from_json(report.to_json()) for report in (good, bad)] == [good, bad]
    figures = summary([good, bad])
    assert (figures["episodes"], figures["trainings_finished"], figures["faults"]) == (2, 7, 2)
    assert figures["failed_episodes"] == [("bare", 2)]


def test_seeds_and_menus_are_refused_in_one_line():
    assert seeds_of("3-5") == [3, 4, 5]
    assert choose_menu("kill=2,stop", {"kill": 5, "stop": 1, "clock": 1}) == {"kill": 2.0, "stop": 1.0}
    for wrong in ("x", "5-3", "1-x"):
        with pytest.raises(UsageError, match="seeds"):
            seeds_of(wrong)
    for wrong in ("kil", "kill=often", "kill=-1", "kill=nan"):
        with pytest.raises(UsageError, match="--faults"):
            choose_menu(wrong, {"kill": 5})
