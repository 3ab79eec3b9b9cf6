"""A sharded training job changes its processes in place: no checkpoint is read, and the result is the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from sharded_trainings import classify_sharded
from training_crew import SAMPLES, run_member

from freetrain_parsl.training.fragment import Finished, Membership

if TYPE_CHECKING:
    from pathlib import Path

    from crew import Crew

pytestmark = pytest.mark.slow

EPOCHS = 3


def plain(root: Path, **kwargs: Any) -> Finished:
    """Train without interruption, in this process, without sharding."""
    outcome = run_member(classify_sharded, {"shard": False, **kwargs}, root=root, membership=Membership("net"))
    assert isinstance(outcome.end, Finished), outcome.error
    return outcome.end


def test_thin(crew: Crew, tmp_path: Path) -> None:
    gates = {step: tmp_path / f"gate-{step}" for step in (4, 9)}
    run = crew.start(2, tmp_path / "cut", classify_sharded, epochs=EPOCHS, gates=gates)
    run.regroup(3, release=gates[4].touch)
    run.regroup(2, release=gates[9].touch)
    outcomes = run.outcomes()
    assert not any(outcome.error for outcome in outcomes if outcome), outcomes
    (end, _) = (outcome.end for outcome in outcomes if outcome)
    expected = plain(tmp_path / "whole", epochs=EPOCHS)
    assert end.progress.resumed_from is None
    assert end.progress.samples == EPOCHS * SAMPLES
    for name, value in expected.value["parameters"].items():
        assert torch.allclose(end.value["parameters"][name], value, atol=1e-5), name
