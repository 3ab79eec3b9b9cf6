"""Digests of what the user's code holds."""

from __future__ import annotations

import collections
import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from freetrain_parsl.extensions.checking.records import distance
from freetrain_parsl.extensions.checking.values import Flattener, digest, flat, leaf_of_tensor


class Meter:
    """A class of the user."""

    __slots__ = ("__dict__", "sum")

    def __init__(self) -> None:
        self.sum, self.values = 0.0, [1]


def counting() -> Any:
    number = 0
    while True:
        number += 1
        yield number


def advanced(thing: Any) -> None:
    """Change a thing as a training job would."""
    match thing:
        case Meter():
            thing.sum += 1
        case nn.Module():
            thing(torch.ones(2, 2))
        case np.random.Generator() | random.Random():
            thing.random()
        case torch.Generator():
            torch.rand(1, generator=thing)
        case dict():
            thing["n"] += 1
        case torch.Tensor():
            thing.add_(1)
        case _:
            next(thing)


@pytest.mark.parametrize(
    ("thing", "path"),
    [
        (Meter(), "x.sum"),
        (nn.BatchNorm1d(2), "x[running_mean]"),
        (np.random.default_rng(0), "x"),
        (random.Random(0), "x"),
        (torch.Generator(), "x"),
        (collections.Counter(n=1), "x['n']"),
        (torch.zeros(3), "x"),
        (torch.zeros(1 << 17), "x"),
        (itertools.count(), "x"),
        (iter([1, 2, 3]), "x"),
        (counting(), "x:number"),
    ],
    ids=lambda thing: type(thing).__name__,
)
def test_what_changes_has_another_digest(thing: Any, path: str) -> None:
    if path == "x:number":
        next(thing)  # before that, it has no variables
    before = flat(thing, "x")
    assert flat(thing, "x") == before
    advanced(thing)
    after = flat(thing, "x")
    assert path in {name for name in before if before[name].bits != after[name].bits}


def test_the_state_of_prepared_objects_is_not_the_users() -> None:
    """Of a prepared module only attributes outside its state count."""
    model = nn.Linear(2, 2)
    model.calls = 3
    flattener = Flattener({id(each) for each in (model, *model.parameters())})
    flattener.add("model", model)
    assert {name: leaf.text for name, leaf in flattener.leaves.items() if "features" not in name} == {
        "model.calls": "3"
    }


@pytest.mark.parametrize("size", [3, 1000, 300_000])
def test_distances_are_estimated(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    one = torch.randn(size, generator=generator, dtype=torch.float64)
    change = torch.randn(size, generator=generator, dtype=torch.float64)
    leaves = [leaf_of_tensor(each, sketched=True) for each in (one, one + 1e-3 * change)]
    assert leaves[0].norm == pytest.approx(float(one.norm()))
    assert distance(*leaves) == pytest.approx(1e-3 * float(change.norm()), rel=1e-9 if size < 8 else 0.6)


def test_large_tensors_differ_wherever_they_do() -> None:
    zeros = torch.zeros(1 << 20)
    seen = {digest(zeros)}
    for place in (0, 1, 12345, (1 << 20) - 1):
        changed = zeros.clone()
        changed[place] = 1e-30
        seen.add(digest(changed))
    seen.add(digest(zeros.view(2, -1)))
    assert len(seen) == 6


@pytest.mark.parametrize(
    "tensor",
    [
        torch.eye(3).to_sparse(),
        torch.ones(2, dtype=torch.complex64),
        torch.ones(2, dtype=torch.bool),
        torch.ones(3, 2).T,
        torch.empty(0),
        torch.ones(5, dtype=torch.bfloat16),
    ],
    ids=["sparse", "complex", "bool", "transposed", "empty", "bfloat16"],
)
def test_tensors_of_all_kinds_have_digests(tensor: torch.Tensor) -> None:
    assert leaf_of_tensor(tensor, sketched=True) == leaf_of_tensor(tensor.clone(), sketched=True)
    assert leaf_of_tensor(tensor).bits != leaf_of_tensor(torch.zeros(7)).bits


def test_values_without_elements_are_left_out() -> None:
    assert flat(torch.empty(2, device="meta"), "x") == {}
