"""Whole training jobs in an array on a GPU, compared with each training job alone there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from tests.extensions.fusion.sweep_trainings import alone, distance, together

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU (or no -m gpu)"),
]


@pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous chunk")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("kind", ["mlp", "cnn", "lstm", "transformer", "pointnet"])
@pytest.mark.parametrize("seeds", [(0, 0, 0), (4, 5, 6)], ids=["one seed", "own seeds"])
def test_every_training_of_a_sweep_is_what_it_is_alone(
    tmp_path: Path, kind: str, seeds: Sequence[int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The masks of dropout, too, which GPUs draw differently."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    points = [
        {
            "kind": kind,
            "optimizer": "SGD",
            "lr": 0.05 * (number + 1),
            "dropout": 0.1 + 0.2 * number,
            "clip": 1.0 + number,
            "dtype": dtype,
        }
        for number in range(3)
    ]
    outcome = together(tmp_path / "array", points, seeds=seeds)
    for number, point in enumerate(points):
        value = alone(tmp_path / "alone", str(number), point, seed=seeds[number])
        for what in ("losses", "metrics", "model"):
            tolerance = 1e-8 if dtype == torch.float64 else 1e-3
            assert distance(outcome.value(str(number))[what], value[what]) < tolerance, what
    assert outcome.engine.fused_steps > 0
