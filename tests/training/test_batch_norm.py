"""A batch is divided such that BatchNorm can normalize each part of it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest
from habits import HELD
from loop_trainings import data64, normalize
from test_loop_state import value_of
from torch import nn
from torch.utils.data import DataLoader

from freetrain_parsl.training.data.audit import Audit
from freetrain_parsl.training.data.batch_norm import divisible_for
from freetrain_parsl.training.data.loader_options import LoaderOptions
from freetrain_parsl.training.data.order import Order
from freetrain_parsl.training.fragment import run_local

if TYPE_CHECKING:
    from pathlib import Path

    from crew import Crew


@pytest.mark.slow
@pytest.mark.parametrize(
    ("samples", "options"),
    [(34, {}), (37, {}), (53, {"micro_batch": 2}), (35, {"deterministic": True, "options": LoaderOptions(shards=3)})],
)
def test_the_last_batch_may_be_smaller_than_twice_the_processes(
    crew: Crew, tmp_path: Path, samples: int, options: dict[str, int]
) -> None:
    """Also when a group grows to more processes than the batch has pairs of samples; none is lost."""
    run = crew.start(2, tmp_path, normalize, samples=samples, hold_at=4, **options)
    run.until(lambda: (tmp_path / "net" / "files" / HELD).exists() or run.ended)
    run.regroup(4)
    for outcome in run.outcomes():
        steps, audit = value_of(outcome)
        assert steps == 3 * -(-samples // 16)
        assert audit == Audit(3 * samples)


def test_a_batch_of_one_sample_is_said_at_the_start_and_fails_as_in_a_plain_loop(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING), pytest.raises(ValueError, match="more than 1 value per channel"):
        run_local(normalize, samples=33)
    (record,) = [record for record in caplog.records if "BatchNorm1d" in record.message]
    assert record.message == (
        "the last batch of an epoch has one sample (33 samples in batches of 16), on which BatchNorm1d fails in "
        "training, as in plain PyTorch, unless its input has a length; use session.loader(…, drop_last=True)"
    )
    *_, (last, _) = DataLoader(data64(33), 16)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        nn.BatchNorm1d(6).double()(last)


@pytest.mark.parametrize(
    ("layer", "order", "said"),
    [
        (nn.BatchNorm1d(6), Order(34, 16, 0), False),
        (nn.BatchNorm1d(6), Order(33, 16, 0, drop_last=True), False),
        (nn.BatchNorm1d(6), Order(33, 1, 0), True),
        (nn.BatchNorm2d(6), Order(33, 16, 0), False),
        (nn.LazyBatchNorm2d(), Order(34, 16, 0), False),
    ],
)
def test_only_what_fails_in_a_plain_loop_is_said(
    caplog: pytest.LogCaptureFixture, layer: nn.Module, order: Order, said: bool
) -> None:
    with caplog.at_level(logging.WARNING):
        assert divisible_for([nn.Sequential(layer)], order).least == 2
    assert bool(caplog.records) is said


def test_other_models_have_the_order_that_they_had() -> None:
    order = Order(33, 16, 0)
    assert divisible_for([nn.Sequential(nn.Linear(6, 3), nn.LayerNorm(3))], order) is order
