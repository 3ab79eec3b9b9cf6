"""Replaced forward passes of single objects."""

from __future__ import annotations

import copy
import pickle

import torch
from torch import nn

from freetrain_parsl.extensions.fusion.engine.intercept import intercept, original_forward


class Doubling(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


class Derived(Doubling):
    pass


def test_only_the_object_itself_is_intercepted_and_it_stays_what_it_is() -> None:
    one, other = Derived(), Doubling()
    forward = Doubling.forward
    release = intercept(one, lambda args, kwargs: ("intercepted", args, kwargs))
    x = torch.ones(1)
    assert one(x, scale=2) == ("intercepted", (x,), {"scale": 2})
    assert one.forward(x) == ("intercepted", (x,), {})
    assert other(x) == 2
    assert copy.deepcopy(one)(x) == 2
    assert pickle.loads(pickle.dumps(one))(x) == 2
    assert original_forward(one)(one, x) == 2
    assert type(one) is Derived
    release()
    assert one(x) == 2
    assert Doubling.forward is forward


def test_a_class_is_restored_when_its_last_object_is_released() -> None:
    forward = nn.Sequential.forward
    models = [nn.Sequential(nn.Linear(1, 1)), nn.Sequential(nn.Linear(1, 1))]
    releases = [intercept(model, lambda _args, _kwargs: "intercepted") for model in models]
    releases[0]()
    assert nn.Sequential.forward is not forward
    assert models[1](torch.ones(1, 1)) == "intercepted"
    assert isinstance(models[0](torch.ones(1, 1)), torch.Tensor)
    releases[1]()
    releases[1]()
    assert nn.Sequential.forward is forward
