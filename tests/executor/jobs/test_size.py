"""The size of a training job: what its user states, in nodes or accelerators, and the units that are planned."""

from __future__ import annotations

import re
from math import ceil, floor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freetrain_parsl import ScalingCurve, training_app
from freetrain_parsl.errors import InvalidApp
from freetrain_parsl.executor.jobs.size import Size
from freetrain_parsl.planning.sizes import sizes_within

SHARED = {"slots_per_node": 4, "units_per_node": 4}
WHOLE = {"slots_per_node": 4}


def train(session) -> None: ...


def request(**options):
    return training_app(**options)(train).request("job")


def on_shared(slots: int = 4, **options):
    return request(**options).on_nodes({"": slots}, units_per_node=slots)


def on_whole(slots: int = 4, **options):
    return request(**options).on_nodes({"": slots})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"accelerators": 0}, "training job 'job': accelerators must be a whole number of at least 1, got 0"),
        ({"min_accelerators": True}, "min_accelerators must be a whole number of at least 1, got True"),
        ({"max_accelerators": 10**9}, "max_accelerators must be at most 1,000,000"),
        (
            {"accelerators": 2, "min_accelerators": 1},
            "min_accelerators=1 state the same bound; leave",
        ),
        ({"accelerators": 2, "max_accelerators": 4}, "accelerators=2 and max_accelerators=4 state the same bound"),
        ({"accelerators": 2, "min_nodes": 1}, "min_nodes=1 and accelerators=2 state the same bound"),
        ({"accelerators": 2, "max_nodes": 1}, "max_nodes=1 and accelerators=2 state the same bound"),
        ({"min_accelerators": 2, "min_nodes": 1}, "min_nodes=1 and min_accelerators=2 state the same bound"),
        ({"max_accelerators": 2, "max_nodes": 1}, "max_nodes=1 and max_accelerators=2 state the same bound"),
        (
            {"min_accelerators": 4, "max_accelerators": 2},
            "max_accelerators (2) is less than min_accelerators (4)",
        ),
        ({"min_nodes": 4, "max_nodes": 2}, "max_nodes (2) is less than min_nodes (4); raise"),
    ],
)
def test_what_contradicts_itself_is_refused_at_the_decorator(options: dict, message: str) -> None:
    with pytest.raises(InvalidApp, match=re.escape(message)) as error:
        training_app(name="job", **options)(train)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "shared", "whole"),
    [
        ({}, (1, 4), (1, 1)),
        ({"max_nodes": 3}, (1, 12), (1, 3)),
        ({"min_nodes": 1}, (4, 4), (1, 1)),
        ({"min_nodes": 2}, (8, 8), (2, 2)),
        ({"min_nodes": 1, "max_nodes": 3}, (4, 12), (1, 3)),
        ({"accelerators": 1}, (1, 1), (1, 1)),
        ({"accelerators": 8}, (8, 8), (2, 2)),
        ({"min_accelerators": 2}, (2, 4), (1, 1)),
        ({"min_accelerators": 8}, (8, 8), (2, 2)),
        ({"max_accelerators": 2}, (1, 2), (1, 1)),
        ({"max_accelerators": 9}, (1, 8), (1, 3)),
        ({"min_accelerators": 3, "max_accelerators": 11}, (4, 8), (1, 3)),
        ({"min_accelerators": 2, "max_nodes": 2}, (2, 8), (1, 2)),
        ({"min_nodes": 1, "max_accelerators": 9}, (4, 8), (1, 3)),
    ],
)
def test_bounds_in_units(options: dict, shared: tuple[int, int], whole: tuple[int, int]) -> None:
    """Nodes are multiplied where jobs share them; accelerators are rounded up to nodes where they do not."""
    for converted, bounds in ((on_shared(**options), shared), (on_whole(**options), whole)):
        assert (converted.min_nodes, converted.max_nodes) == bounds
        assert (converted.trainer().min_nodes, converted.trainer().max_nodes) == bounds
        assert converted.on_nodes({"": 4}, 4) is converted, "it is converted once"


def test_an_accelerator_of_a_node_with_one_slot_is_the_node() -> None:
    converted = on_whole(slots=1, min_accelerators=2, max_accelerators=5)
    assert (converted.min_nodes, converted.max_nodes) == (2, 5)


@pytest.mark.parametrize(
    ("options", "slots", "message"),
    [
        (
            {"accelerators": 3},
            4,
            "accelerators=3: a job has 1, 2, 4 accelerators or whole nodes of 4 here; the nearest sizes are 2 and 4 ",
        ),
        ({"accelerators": 10}, 8, "the nearest sizes are 8 and 16 accelerators"),
        (
            {"min_accelerators": 3, "max_accelerators": 5},
            6,
            "and max_accelerators=5: a job has 1, 2, 6 accelerators",
        ),
        ({"min_nodes": 2, "max_accelerators": 4}, 4, "max_accelerators=4 is less than min_nodes=2 on nodes of 4 accel"),
        ({"min_accelerators": 9, "max_nodes": 1}, 4, "max_nodes=1 is less than min_accelerators=9 on nodes of 4 accel"),
    ],
)
def test_a_size_that_no_job_can_have_is_refused_with_the_nearest(options: dict, slots: int, message: str) -> None:
    with pytest.raises(InvalidApp, match=re.escape(message)) as error:
        on_shared(slots, **options)
    assert "\n" not in str(error.value)


@given(st.sampled_from([1, 2, 3, 4, 6, 8, 12]), st.integers(1, 60), st.integers(0, 60))
def test_bounds_are_allowed_sizes_and_lose_none(slots: int, least: int, more: int) -> None:
    """The sizes between the converted bounds are those between the stated ones; without any, it is refused."""
    allowed = [n for n in range(least, least + more + 1) if n in sizes_within(slots) or n % slots == 0]
    size = Size(min_accelerators=least, max_accelerators=least + more)
    if not allowed and slots > 1:
        with pytest.raises(InvalidApp, match="nearest sizes"):
            size.in_units("job", slots, slots)
        return
    assert size.in_units("job", slots, slots) == (allowed[0], allowed[-1])
    assert size.in_units("job", slots) == (ceil(least / slots), ceil((least + more) / slots))


def test_what_is_rounded_up_is_said() -> None:
    assert request(accelerators=3).rounding({"": 4}) == (
        "accelerators=3 is rounded up to 1 whole nodes of 4 accelerators, as jobs do not share nodes here"
    )
    assert "max_accelerators=5 is rounded up to 1 and 2 whole nodes" in request(
        min_accelerators=1, max_accelerators=5
    ).rounding({"": 4})
    assert not request(accelerators=8).rounding({"": 4})
    assert not request(accelerators=3).rounding({"": 1})
    assert not request(accelerators=2).rounding({"": 4}, 4)
    assert not request(min_nodes=1).rounding({"": 4})


def test_kinds_of_nodes_with_different_numbers_of_accelerators() -> None:
    """A number of accelerators is no number of nodes there."""
    kinds = {"a100": 4, "h100": 8, "other": 4}
    with pytest.raises(InvalidApp, match=r"accelerators=4: .* different numbers of accelerators \(4, 8\); give node_"):
        request(accelerators=4).on_nodes(kinds)
    assert request(accelerators=8, node_kinds=["a100", "other"]).on_nodes(kinds).min_nodes == 2
    assert request(min_nodes=2).on_nodes(kinds).min_nodes == 2


# ── curves ─────────────────────────────────────────────────────────────────────────────────────────


def test_a_curve_over_nodes_is_linear_inside_the_first() -> None:
    curve = on_shared(max_nodes=4, scaling={1: 100.0, 2: 180.0}).scaling
    assert curve.points == ((1, 25.0), (4, 100.0), (8, 180.0))
    assert not curve.relative
    assert on_whole(max_nodes=4, scaling={1: 100.0, 2: 180.0}).scaling.points == ((1, 100.0), (2, 180.0))


def test_a_curve_over_accelerators_needs_no_conversion_where_they_are_the_units() -> None:
    points = {1: 30.0, 2: 55.0, 4: 90.0}
    assert dict(on_shared(max_accelerators=8, scaling=points).scaling.points) == points


@given(
    st.dictionaries(st.integers(1, 40), st.floats(0, 1000), min_size=1, max_size=6),
    st.sampled_from([2, 3, 4, 8]),
)
def test_a_curve_over_accelerators_is_exact_at_whole_nodes(points: dict[int, float], slots: int) -> None:
    curve = ScalingCurve(points)
    nodes = Size(min_accelerators=1).curve_in_units(curve, slots)
    for count in range(max(1, ceil(min(points) / slots)), 45):
        assert nodes(count) == pytest.approx(curve(count * slots))


@given(st.dictionaries(st.integers(1, 20), st.floats(0, 1000), min_size=1, max_size=6), st.sampled_from([2, 4, 8]))
def test_a_curve_over_nodes_keeps_its_rates_at_whole_nodes(points: dict[int, float], slots: int) -> None:
    curve = ScalingCurve(points)
    units = Size().curve_in_units(curve, slots, slots)
    assert units.first_nodes == (1 if 1 in points else min(points) * slots)
    for count in range(min(points), 25):
        assert units(count * slots) == pytest.approx(curve(count))


def test_curves_that_say_nothing_of_nodes_hold_for_any_unit() -> None:
    for scaling in (None, "learn"):
        given = request(scaling=scaling, max_nodes=4)
        assert given.on_nodes({"": 4}, 4).scaling == given.scaling == given.on_nodes({"": 4}).scaling


def test_a_relative_curve_is_relative_to_a_unit() -> None:
    relative = ScalingCurve({1: 1.0, 2: 1.5}, relative=True)
    assert on_shared(max_nodes=2, scaling=relative).scaling.points == ((1, 1.0), (4, 4.0), (8, 6.0))


def test_the_curves_of_kinds_are_converted() -> None:
    kinds = {"gpu": {1: 100.0}, "cpu": {1: 8.0}}
    converted = request(scaling=kinds).on_nodes({"gpu": 4, "cpu": 4}, 4)
    assert {kind: curve(1) for kind, curve in converted.scaling_by_kind.items()} == {"gpu": 25.0, "cpu": 2.0}


def test_a_curve_that_is_learned_begins_with_the_smallest_size() -> None:
    from freetrain_parsl.executor.jobs.curve_learning import CurveLearning
    from freetrain_parsl.planning import events as planner

    for options, least in (({}, 1), ({"min_accelerators": 2}, 2), ({"min_nodes": 1}, 4)):
        job = on_shared(scaling="learn", **options).trainer()
        event = CurveLearning().completed(planner.TrainerSubmitted(0.0, job))
        assert isinstance(event, planner.TrainerSubmitted)
        assert (event.trainer.min_nodes, event.trainer.max_nodes) == (least, least)


# ── options that replace others ────────────────────────────────────────────────────────────────────


def test_a_bound_replaces_the_one_that_states_the_same() -> None:
    """A campaign, or `options`, may state in accelerators what the app states in nodes."""
    app = training_app(min_nodes=1, max_nodes=4)(train)
    for changes, size in (
        ({"accelerators": 2}, Size(accelerators=2)),
        ({"min_accelerators": 2}, Size(min_accelerators=2, max_nodes=4)),
        ({"max_accelerators": 6}, Size(min_nodes=1, max_accelerators=6)),
        ({"max_nodes": 2}, Size(min_nodes=1, max_nodes=2)),
    ):
        assert app.options(**changes).request("job").size == size
    fixed = app.options(accelerators=2)
    assert fixed.options(max_nodes=4).request("job").size == Size(max_nodes=4)
    with pytest.raises(InvalidApp, match="state the same bound"):
        app.options(accelerators=2, max_nodes=1)


def test_the_points_of_a_curve_change_with_the_unit() -> None:
    app = training_app(max_nodes=4, scaling={1: 100.0})(train)
    with pytest.raises(InvalidApp, match="accelerators is changed for an app whose scaling counts nodes: change scal"):
        app.options(accelerators=2)
    assert app.options(accelerators=2, scaling={1: 30.0}).request("job").scaling(1) == 30.0
    assert training_app(scaling="learn")(train).options(accelerators=2).request("job").min_nodes == 2
    counted = training_app(max_accelerators=4, scaling={1: 25.0})(train)
    with pytest.raises(InvalidApp, match="max_nodes is changed for an app whose scaling counts accelerators"):
        counted.options(max_nodes=2)
    assert counted.options(max_accelerators=2).request("job").max_nodes == 2
    assert floor(counted.request("job").scaling(1)) == 25
