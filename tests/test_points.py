"""Lists of arguments: which training jobs they make, and what is refused."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from freetrain_parsl.errors import InvalidApp
from freetrain_parsl.sweep import SweepPoint, combined, zipped


def values(points: list[SweepPoint], *names: str) -> list[tuple]:
    return [tuple(point.kwargs[name] for name in names) for point in points]


def test_lists_are_zipped_and_scalars_are_the_same_for_all() -> None:
    points = zipped((), {"lr": [0.1, 0.2], "kind": "sgd", "width": range(2), "options": {"a": [1]}}, None, caller="s")
    assert values(points, "lr", "kind", "width", "options") == [
        (0.1, "sgd", 0, {"a": [1]}),
        (0.2, "sgd", 1, {"a": [1]}),
    ]
    assert {point.seed for point in points} == {None}


def test_a_grid_has_all_combinations_and_the_last_list_varies_fastest_seeds_last() -> None:
    points = combined((), {"lr": [0.1, 0.2], "width": (4, 8)}, range(2), caller="g")
    assert [(*point.kwargs.values(), point.seed) for point in points] == [
        *itertools.product([0.1, 0.2], [4, 8], [0, 1])
    ]


def test_positional_arguments_stay_positional() -> None:
    assert [point.args for point in zipped(([0.1, 0.2], 5), {}, None, caller="s")] == [(0.1, 5), (0.2, 5)]
    points = combined(([0.1], [1, 2]), {"width": [4, 8]}, None, caller="g")
    assert [(point.args, dict(point.kwargs)) for point in points][:2] == [
        ((0.1, 1), {"width": 4}),
        ((0.1, 1), {"width": 8}),
    ]


def test_seeds_vary_alone_or_zipped() -> None:
    assert zipped((), {}, range(2), caller="s") == [SweepPoint(seed=0), SweepPoint(seed=1)]
    assert zipped((), {"lr": [0.1, 0.2]}, [5, 7], caller="s")[1] == SweepPoint((), {"lr": 0.2}, 7)


@pytest.mark.parametrize(
    "given", [np.array([1.0, 2.0]), [np.float64(1), np.float64(2)], torch.tensor([1.0, 2.0]), iter([1.0, 2.0])]
)
def test_arrays_and_iterators_give_python_numbers(given: object) -> None:
    """Names of training jobs are derived from the values, and numpy's have other names."""
    found = [point.kwargs["x"] for point in zipped((), {"x": given, "y": np.float64(3)}, None, caller="s")]
    assert found == [1.0, 2.0]
    assert {type(value) for value in found} == {float}


def test_an_array_without_dimensions_is_a_scalar() -> None:
    points = zipped((), {"x": np.array(3), "y": np.int64(4)}, range(2), caller="s")
    assert values(points, "x", "y") == [(3, 4)] * 2
    assert type(points[0].kwargs["x"]) is int


@pytest.mark.parametrize(
    ("make", "kwargs", "seeds", "message"),
    [
        (zipped, {"lr": [1, 2], "width": [1]}, None, "t.sweep: the lists must have the same length, but lr has 2"),
        (zipped, {"lr": [1, 2]}, range(3), "lr has 2, seeds has 3 values"),
        (zipped, {"lr": []}, None, "t.sweep: lr is empty; give at least one value"),
        (combined, {"lr": [1], "width": ()}, None, "t.sweep: width is empty"),
        (zipped, {}, range(0), "seeds is empty"),
        (zipped, {"lr": 0.1}, None, "give a list of values for at least one argument, or seeds=range"),
        (combined, {}, None, "give a list of values for at least one argument"),
        (zipped, {"lr": [1]}, 3, "seeds must be a list of whole numbers, got 3"),
        (zipped, {"lr": [1]}, "123", "seeds must be a list of whole numbers, got '123'"),
        (zipped, {"lr": itertools.count()}, None, "lr has more than 10,000 values"),
        (combined, {"lr": range(150), "width": range(150)}, None, "this makes 22,500 training jobs, more than 10,000"),
    ],
)  # fmt: skip
def test_a_mistake_in_the_lists_is_refused_in_one_line(make, kwargs, seeds, message: str) -> None:
    with pytest.raises(InvalidApp) as refused:
        make((), kwargs, seeds, caller="t.sweep")
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_an_empty_positional_list_is_named_by_its_position() -> None:
    with pytest.raises(InvalidApp, match="argument 2 is empty"):
        zipped(([1], []), {}, None, caller="s")
