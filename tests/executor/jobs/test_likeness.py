"""Training jobs that are alike: those of the same code with equal shapes."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from freetrain_parsl.executor.jobs.likeness import likeness_of
from freetrain_parsl.protocol.options import Code


def train(session: Any, width: int = 64, lr: float = 0.1, data: Any = None, **options: Any) -> None: ...


CODE = Code("m:train", {"m.train": "abc"})


def likeness(*args: Any, code: Code = CODE, **kwargs: Any) -> str:
    return likeness_of(train, code, args, kwargs)


def test_learning_rates_and_the_elements_of_arrays_do_not_matter() -> None:
    assert likeness(64, lr=0.1, data=np.zeros((3, 2))) == likeness(width=64, lr=0.2, data=np.ones((3, 2)))
    assert likeness(64) == likeness()


def test_widths_names_shapes_and_code_matter() -> None:
    others = [
        likeness(128),
        likeness(64, net="cnn"),
        likeness(64, net="mlp"),
        likeness(64, layers=[64, 64]),
        likeness(64, layers=[64, 32]),
        likeness(64, sizes={"a": 1}),
        likeness(64, data=np.zeros((3, 2))),
        likeness(64, data=np.zeros((3, 2), np.float32)),
        likeness(64, code=Code("m:train", {"m.train": "abd"})),
    ]
    assert len({likeness(64), *others}) == len(others) + 1


@dataclass
class Config:
    width: int
    lr: float = 0.1


ALIKE = [
    (Config(64, 0.1), Config(64, 0.2)),
    ({1, 2}, {2, 1}),
    (torch.utils.data.TensorDataset(torch.zeros(3, 2)), torch.utils.data.TensorDataset(torch.ones(3, 2))),
]
DIFFERENT = [
    (Config(64), Config(128)),
    (Namespace(width=64), Namespace(width=128)),
    (np.int64(64), np.int64(128)),
    (torch.float16, torch.float32),
    (torch.nn.Tanh, torch.nn.ReLU),
    (len, sum),
    (partial(torch.nn.Linear, 3, 4), partial(torch.nn.Linear, 3, 5)),
    (torch.nn.Linear(3, 4), torch.nn.Linear(3, 5)),
    ([1] * 100, [1] * 200),
    ({1}, {2}),
]


@pytest.mark.parametrize(("one", "other"), ALIKE, ids=range(len(ALIKE)))
def test_objects_with_equal_shapes_are_alike(one: Any, other: Any) -> None:
    assert likeness(data=one) == likeness(data=other)


@pytest.mark.parametrize(("one", "other"), DIFFERENT, ids=range(len(DIFFERENT)))
def test_what_may_change_a_rate_matters(one: Any, other: Any) -> None:
    assert likeness(data=one) != likeness(data=other)


class Raising:
    @property
    def shape(self) -> tuple[int, ...]:
        raise RuntimeError("it is loaded later")

    def __repr__(self) -> str:
        raise RuntimeError("it is loaded later")


def cyclic() -> list[Any]:
    items: list[Any] = []
    items.append(items)
    return items


def wide() -> list[Any]:
    items: list[Any] = []
    for _ in range(8):
        items = [items] * 64
    return items


@pytest.mark.parametrize("value", [Raising(), cyclic(), wide(), 10**5000], ids=["raising", "cyclic", "wide", "long"])
def test_arguments_that_cannot_be_described_are_no_errors(value: Any) -> None:
    assert likeness(data=value) != likeness()
