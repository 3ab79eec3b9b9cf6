"""Trainings that are alike: those of the same code with equal shapes."""

from __future__ import annotations

from typing import Any

import numpy as np

from freetrain_parsl.executor.likeness import likeness_of
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
