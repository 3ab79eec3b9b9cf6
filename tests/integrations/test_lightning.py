"""Lightning's Trainer in a session trains as it does alone, wherever the session runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from held import HELD
from training_crew import run_member

from freetrain_parsl.training.fragment import Finished, Membership, Paused

pytest.importorskip("lightning")
from lightning_trainings import fit, in_session

if TYPE_CHECKING:
    from pathlib import Path

    from crew import Crew

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # Lightning's own, which differ between its versions
]

VARIANTS = {"plain": {}, "accumulated": {"accumulate": 4, "samples": 144}, "stopped": {"patience": 1, "epochs": 9}}


@pytest.fixture(params=VARIANTS, scope="module")
def variant(request) -> dict[str, Any]:
    return VARIANTS[request.param]


@pytest.fixture(scope="module")
def plain(variant, tmp_path_factory) -> dict[str, Any]:
    """Return the result of the plain Trainer; in a session, Lightning sees one batch for each step."""
    torch.set_num_threads(1)
    result = fit(tmp_path_factory.mktemp("plain"), **variant)
    per_epoch = result["steps"] // result["epoch"]
    result["calls"]["steps"] = [[step + 1, step % per_epoch] for step in range(result["steps"])]
    return result


def alone(root: Path, **settings) -> Any:
    outcome = run_member(in_session, settings, root=root, membership=Membership("net"))
    assert outcome.end is not None, outcome.error
    return outcome.end


def check(result: dict[str, Any], plain: dict[str, Any], *, within: float) -> None:
    """Compare weights, counters, callbacks and the best checkpoint's value; no sample is lost or seen twice."""
    assert float((result["weights"] - plain["weights"]).abs().max()) <= within
    for name in ("steps", "epoch", "calls"):
        assert result[name] == plain[name], name
    assert result["best"] == pytest.approx(plain["best"], abs=max(within, 1e-7))
    assert result["audit"] == (0, 0)
    assert len(result["history"]) == plain["epoch"]
    assert [round(row["val_loss"], 4) for row in result["history"]] == plain["calls"]["validated"]


def test_one_process_trains_as_without_a_session(variant, plain, tmp_path) -> None:
    end = alone(tmp_path, **variant)
    check(end.value, plain, within=1e-6 if variant.get("accumulate") else 0.0)
    assert end.value["best_path"].startswith(str(tmp_path))


@pytest.mark.parametrize("step", [7, 10])
def test_a_restart_in_mid_epoch_or_at_its_end_changes_nothing(variant, plain, tmp_path, step) -> None:
    assert isinstance(alone(tmp_path / "stopped", pause_at=step, **variant), Paused)
    resumed = alone(tmp_path / "stopped", **variant)
    assert isinstance(resumed, Finished)
    check(resumed.value, plain, within=1e-6 if variant.get("accumulate") else 0.0)


def test_processes_leave_and_join_in_one_run(variant, plain, tmp_path, crew: Crew) -> None:
    run = crew.start(2, tmp_path, in_session, hold_at=6, **variant)
    held = tmp_path / "net" / "files" / HELD
    run.until(lambda: held.exists() or run.ended, 60)
    run.regroup(1)
    run.regroup(2)
    for outcome in run.outcomes():
        assert outcome is not None
        assert isinstance(outcome.end, Finished), outcome.error
        check(outcome.end.value, plain, within=1e-5)


def test_a_newcomer_in_mid_epoch_has_the_others_counters(variant, plain, tmp_path, crew: Crew) -> None:
    run = crew.start(1, tmp_path, in_session, hold_at=6, **variant)
    held = tmp_path / "net" / "files" / HELD
    run.until(lambda: held.exists() or run.ended, 60)
    run.regroup(2)
    outcomes = run.outcomes()
    assert len(outcomes) == 2
    for outcome in outcomes:
        assert outcome is not None
        assert isinstance(outcome.end, Finished), outcome.error
        check(outcome.end.value, plain, within=1e-5)


def test_the_others_go_on_when_one_is_killed(variant, plain, tmp_path, crew: Crew) -> None:
    outcome = crew.start(2, tmp_path, in_session, die_at=8, **variant).outcomes()[0]
    assert outcome is not None
    assert isinstance(outcome.end, Finished), outcome.error
    check(outcome.end.value, plain, within=1e-5)
