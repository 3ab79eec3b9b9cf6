"""Losses, sums and closures have the gradients of one process, however a batch is divided."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from losses import LOSSES, PlainSession, learn
from test_items import EVENTS, disturbed
from training_crew import SAMPLES

from freetrain_parsl.training.fragment import Finished, run_local

if TYPE_CHECKING:
    from pathlib import Path

    from crew import Crew

CHECKPOINTED = ("checkpointed", "tied", "checkpointed_later")
# An optimizer that approximates second derivatives amplifies rounding, unless its batches are the same each time.
OPTIONS: dict[str, dict[str, int]] = {
    name: {"batch_size": SAMPLES, "epochs": 11} if name.startswith("quasi_newton") else {} for name in LOSSES
}
WITH_SUMS = ("statistic", "contrastive", "contrastive_twice")


def assert_as_one(value: dict[str, Any], loss: str, **options: Any) -> None:
    """Compare with a plain loop, and the losses with those of one process."""
    torch.testing.assert_close(
        value["parameters"], learn(PlainSession(), loss=loss, **options)["parameters"], rtol=0, atol=1e-11
    )
    alone = run_local(learn, loss=loss, **options)
    assert value["loss"] == pytest.approx(alone["loss"], abs=1e-11)
    number = len(value["losses"])
    assert value["losses"] == pytest.approx(alone["losses"][-number:] if number else [], abs=1e-11)


@pytest.mark.parametrize("loss", LOSSES)
def test_one_process_has_the_result_of_a_plain_loop(loss: str) -> None:
    assert_as_one(run_local(learn, loss=loss, **OPTIONS[loss]), loss, **OPTIONS[loss])


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("loss", LOSSES)
def test_several_processes_have_the_result_of_a_plain_loop(crew: Crew, tmp_path: Path, loss: str, size: int) -> None:
    for outcome in crew.run(size, tmp_path, learn, loss=loss, **OPTIONS[loss]):
        assert outcome is not None
        assert isinstance(outcome.end, Finished), outcome.error
        assert_as_one(outcome.end.value, loss, **OPTIONS[loss])
        assert outcome.end.value["late"] == (loss in CHECKPOINTED)


@pytest.mark.smoke
@pytest.mark.slow
@pytest.mark.parametrize("loss", [*WITH_SUMS, "class_weighted", "summed", "quasi_newton"])
def test_processes_without_samples_change_nothing(crew: Crew, tmp_path: Path, loss: str) -> None:
    """Batches of two samples, the last of one, for three processes."""
    options = {"batch_size": 2, "epochs": 1, "samples": 2 if loss == "quasi_newton" else SAMPLES}
    for outcome in crew.run(3, tmp_path, learn, loss=loss, **options):
        assert outcome is not None
        assert isinstance(outcome.end, Finished), outcome.error
        assert_as_one(outcome.end.value, loss, **options)


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES)
def test_processes_come_go_and_die_and_the_result_is_that_of_a_plain_loop(
    crew: Crew, tmp_path: Path, loss: str
) -> None:
    """2 -> 1 -> 3 -> one killed -> a restart with 2."""
    options = OPTIONS[loss]
    for value in disturbed(crew, tmp_path, 2, EVENTS, learn, loss=loss, **options):
        assert_as_one(value, loss, **options)
        assert value["samples"] == options.get("epochs", 2) * SAMPLES


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "where"),
    [
        ("contrastive", "gather"),
        ("contrastive", "backward"),
        ("statistic", "all_reduce"),
        ("statistic", "backward"),
        ("contrastive_twice", "gather"),
        ("checkpointed", "backward"),
        ("quasi_newton", "third evaluation"),
        ("quasi_newton", "backward"),
    ],
)
def test_a_process_dies_in_a_batch_and_the_batch_is_repeated(crew: Crew, tmp_path: Path, loss: str, where: str) -> None:
    outcomes = crew.start(3, tmp_path, learn, loss=loss, die=where, **OPTIONS[loss]).outcomes()
    assert len(outcomes) == 2
    for outcome in outcomes:
        assert outcome is not None
        assert isinstance(outcome.end, Finished), outcome.error
        assert_as_one(outcome.end.value, loss, **OPTIONS[loss])
