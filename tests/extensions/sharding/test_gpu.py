"""Sharded models on a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from sharded_trainings import classify_sharded

from freetrain_parsl.training.fragment import Finished
from freetrain_parsl.training.group import gpus

if TYPE_CHECKING:
    from pathlib import Path

    from crew import Crew

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU (or no -m gpu)"),
]


def test_a_model_is_sharded_on_a_card_of_ones_own_only(crew: Crew, tmp_path: Path) -> None:
    """FSDP's collectives on GPUs need NCCL, which does not let processes share one unless it is told to."""
    if gpus.facts()[1]:
        pytest.skip("NCCL_MULTI_RANK_GPU_ENABLE=1 is set: see test_over_nccl")
    (alone,) = crew.run(1, tmp_path / "own", classify_sharded, epochs=1)
    assert alone is not None
    assert isinstance(alone.end, Finished), alone.error
    outcomes = crew.run(2, tmp_path / "shared", classify_sharded, epochs=1)
    errors = [outcome.error for outcome in outcomes if outcome]
    assert errors
    assert all(error.startswith("UsageError: session.mesh: processes that share a GPU") for error in errors), errors
