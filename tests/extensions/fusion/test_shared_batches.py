"""Batches that several training jobs share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch.utils.data import Subset, TensorDataset

from freetrain_parsl.extensions.fusion.engine.calls import call_of
from freetrain_parsl.extensions.fusion.slot.shared_batches import (
    MemberBatches,
    SharedBatches,
    can_be_shared,
    same_source,
)
from freetrain_parsl.training.data.order import Order
from freetrain_parsl.training.extension import DataSource


def source(dataset: Any, **options: Any) -> DataSource:
    order = Order(options.pop("length", 4), 2, options.pop("seed", 0))
    given = {"sampler": None, "collate_fn": None, "num_workers": 0, "seed_samples": True} | options
    return DataSource(dataset, order, **given)


def tensors(first: float = 0.0) -> TensorDataset:
    return TensorDataset(torch.tensor([first, 1.0, 2.0, 3.0]), torch.arange(4))


def test_equal_data_in_the_same_order_is_the_same_source() -> None:
    numbers = [1, 2, 3, 4]
    assert same_source(source(numbers), source(numbers))
    assert same_source(source(tensors()), source(tensors()))
    assert same_source(source(Subset(tensors(), [0, 2])), source(Subset(tensors(), [0, 2])))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (source([1, 2]), source([1, 2])),  # perhaps with other samples: only tensors are compared
        (source(tensors()), source(tensors(9.0))),
        (source(tensors()), source(tensors(), seed=1)),
        (source(tensors()), source(tensors(), num_workers=1)),
        (source(tensors()), source(tensors(), collate_fn=list)),
        (source(tensors()), source(tensors(), seed_samples=False)),
        (source(Subset(tensors(), [0, 2])), source(Subset(tensors(), [0, 1]))),
        (source(tensors()), source(Subset(tensors(), [0]))),
    ],
)
def test_other_sources_are_not(one: DataSource, other: DataSource) -> None:
    assert not same_source(one, other)


def test_what_depends_on_more_than_the_order_is_not_shared() -> None:
    assert can_be_shared(source(tensors()))
    assert not can_be_shared(source(tensors(), sampler=[0, 1]))
    for option in ("micro_batch", "shards"):
        whole = source(tensors())
        assert not can_be_shared(replace(whole, order=replace(whole.order, **{option: 2})))


class Counting:
    """Fetches batches, and counts how often."""

    def __init__(self) -> None:
        self.fetched = 0

    def __call__(self) -> tuple[Any, Any]:
        self.fetched += 1
        return "batch", [torch.arange(3.0), {"label": torch.ones(1)}]


def test_a_batch_is_fetched_once_for_all() -> None:
    batches, fetch = SharedBatches(), Counting()
    first = batches.get(0, 0, fetch)
    assert batches.get(0, 0, fetch)[1][0].data_ptr() == first[1][0].data_ptr()
    batches.get(0, 2, fetch)
    assert batches.get(0, 0, fetch)[1][0].data_ptr() == first[1][0].data_ptr()  # of one that is behind
    assert fetch.fetched == 2
    batches.get(0, 4, fetch)
    batches.get(0, 0, fetch)
    assert fetch.fetched == 4


@pytest.mark.parametrize("change", [lambda data: data[0].mul_(2), lambda data: data[1]["label"].zero_()])
def test_a_change_in_place_reaches_no_other_training(change: Any) -> None:
    batches, fetch = SharedBatches(), Counting()
    for position in (0, 2):
        for _ in range(3):
            _, data = batches.get(0, position, fetch)
            assert data[0].tolist() == [0.0, 1.0, 2.0]
            assert data[1]["label"].item() == 1.0
            change(data)
    assert fetch.fetched == 3  # twice until the change was noticed


def test_a_training_that_changes_its_dataset_gets_no_batches_any_more() -> None:
    dataset, fetch = tensors(), Counting()
    batches = MemberBatches(SharedBatches(), source(dataset))
    assert batches.get(0, 0, fetch) is not None
    dataset.tensors[0].add_(1)
    assert batches.get(0, 2, fetch) is None
    assert fetch.fetched == 1


def test_batches_of_objects_are_not_shared() -> None:
    """A training job may change them, such as ``batch.x = batch.x / 255``."""

    class Pair:
        def __init__(self) -> None:
            self.x = torch.ones(2)

    batches = SharedBatches()
    batch: Any = "a batch"
    one, other = (batches.get(0, 0, lambda: (batch, Pair()))[1] for _ in range(2))
    assert one is not other
    assert one.x is not other.x


def test_calls_with_other_objects_are_not_made_at_once() -> None:
    """All members would get the first one's."""

    @dataclass
    class Pair:
        x: torch.Tensor

    def kind(argument: Any) -> Any:
        return call_of(member, 0, model, (argument,), {}).kind

    model, member = torch.nn.Linear(2, 2), Mock()
    pairs = Pair(torch.zeros(2)), Pair(torch.ones(2))
    assert kind(pairs[0]) == kind(pairs[0]) != kind(pairs[1])
    assert kind(np.zeros(2)) == kind(np.zeros(2)) != kind(np.ones(2))
    assert kind({1, 2}) != kind({1, 3})
    assert kind(torch.zeros(2)) == kind(torch.ones(2)), "these are stacked"
