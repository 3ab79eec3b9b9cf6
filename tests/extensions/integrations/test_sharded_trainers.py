"""The trainers of other libraries train a model that is sharded over ``session.mesh``, on changing processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import sharded_trainers
from disturbances import alone, assert_weights

from freetrain_parsl.training.fragment import Paused

if TYPE_CHECKING:
    from pathlib import Path

    from crew import Crew

pytestmark = [
    pytest.mark.slow,  # transformers and Lightning take seconds to import
    pytest.mark.filterwarnings("default"),  # third-party code has its own deprecations
]


@pytest.mark.parametrize("library", ["huggingface", "accelerate", "lightning", "fabric"])
def test_a_sharded_model_through_2_3_and_1_processes_ends_as_an_undisturbed_whole_one(
    crew: Crew, tmp_path: Path, library: str
) -> None:
    """With accumulation, clipping and a validation in which all processes take part."""
    function: Any = getattr(sharded_trainers, library)
    whole = alone(function, tmp_path / "whole", shard=False)
    for size, pause_at in ((2, 4), (3, 7)):
        for outcome in crew.run(size, tmp_path / "cut", function, pause_at=pause_at):
            assert outcome is not None
            assert isinstance(outcome.end, Paused), outcome.error
    end = alone(function, tmp_path / "cut")
    assert_weights(end, whole)
    assert end["losses"] == pytest.approx(whole["losses"], abs=1e-4)
