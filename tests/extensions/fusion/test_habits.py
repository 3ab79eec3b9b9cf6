"""Functions in the manner of PyTorch's examples: fused they have the results that they have alone, or are refused."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch

from freetrain_parsl.extensions.fusion.slot.sizing import ArraySizing
from tests.extensions.fusion import habits
from tests.extensions.fusion.sweep_trainings import alone, distance, together

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

HABITS: dict[str, Callable[..., Any]] = {
    "mnist": habits.digits,
    "word language model, LSTM": partial(habits.language, cells="LSTM"),
    "word language model, GRU": partial(habits.language, cells="GRU"),
    "word language model, transformer": habits.masked,
    "vae": habits.autoencoder,
    "dcgan": habits.adversaries,
    "gcn": habits.graph,
    "gcn, compressed rows": partial(habits.graph, layout=torch.sparse_csr),
    "vision transformer": habits.vision,
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state:UserWarning")
@pytest.mark.parametrize("habit", HABITS)
def test_a_habit_is_fused_and_has_the_results_that_it_has_alone(tmp_path: Path, habit: str) -> None:
    points = [{"lr": 0.01 * (number + 1)} for number in range(4)]
    outcome = together(tmp_path / "array", points, HABITS[habit])
    assert outcome.engine.fused_steps >= 6
    for number, point in enumerate(points):
        expected = alone(tmp_path / "alone", str(number), point, HABITS[habit])
        assert distance(outcome.value(str(number)), expected) < 1e-10


REFUSED = [
    ({"seed": [1, 2]}, "an argument of the model is a sparse tensor of (20, 20), float64, whose entries differ"),
    ({"dense": [False, False]}, "the model returns a sparse tensor: return it dense"),
]


@pytest.mark.parametrize(("differing", "reason"), REFUSED)
def test_what_a_sparse_tensor_does_not_allow_is_refused_before_the_first_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, differing: dict[str, list[Any]], reason: str
) -> None:
    points = [{"lr": 0.01, **{name: each[row] for name, each in differing.items()}} for row in range(2)]
    outcome = together(tmp_path / "array", points, habits.graph)
    assert outcome.engine.fused_steps == 0
    assert reason in caplog.text
    for number, point in enumerate(points):
        expected = alone(tmp_path / "alone", str(number), point, habits.graph)
        assert distance(outcome.value(str(number)), expected) == 0.0


def test_a_member_that_joins_later_gets_what_the_others_keep(tmp_path: Path) -> None:
    """Two train fused, then a third takes the place of the first one, whose model keeps a mask; it has none yet."""
    points = [{"lr": 0.01, "epochs": 1}, *({"lr": 0.01 * (number + 1), "epochs": 4} for number in range(2))]
    outcome = together(tmp_path / "array", points, habits.masked, sizing=ArraySizing(2, 2))
    assert outcome.engine.fused_steps > 6 + 6
    for number, point in enumerate(points):
        expected = alone(tmp_path / "alone", str(number), point, habits.masked)
        assert distance(outcome.value(str(number)), expected) < 1e-10
