"""Fine-tuning sweeps with transformers and TRL are fused, each training job with the result that it has alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from fine_tuning import by_trainer, by_trl, loop

from tests.extensions.fusion.sweep_trainings import alone, distance, together

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

pytestmark = [
    pytest.mark.slow,  # transformers takes seconds to import
    pytest.mark.filterwarnings("default"),  # third-party code has its own deprecations
]

RATES = [{"lr": 0.01 * (number + 1)} for number in range(3)]
FLOAT32 = 3e-6
"""Transformers computes losses in float32, whatever the model's type."""


def assert_as_alone(
    root: Path, points: Sequence[Mapping[str, Any]], function: Callable[..., Any], within: float = 1e-9
) -> None:
    outcome = together(root / "array", points, function, seeds=range(len(points)))
    assert not outcome.engine.reason
    assert outcome.engine.fused_steps == 8
    for number, point in enumerate(points):
        expected = alone(root / "alone", str(number), point, function, seed=number)
        for name, value in outcome.value(str(number)).items():
            limit = max(within, FLOAT32) if name == "losses" else within
            assert distance(value, expected[name]) <= limit, name


def test_a_cache_that_the_model_returns_is_that_of_each_training_job(tmp_path: Path) -> None:
    assert_as_alone(tmp_path, [{**point, "use_cache": True} for point in RATES], loop)


@pytest.mark.parametrize("function", [by_trainer, by_trl])
def test_trainers_are_fused(tmp_path: Path, function: Callable[..., Any]) -> None:
    assert_as_alone(tmp_path, RATES, function)
