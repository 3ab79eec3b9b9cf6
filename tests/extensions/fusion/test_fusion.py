"""Fusion curves: values, sizes of arrays against the sizing of a running array, groupings against brute force."""

from __future__ import annotations

import json
import pickle
from itertools import combinations_with_replacement

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetrain_parsl.errors import InvalidApp, InvalidInput
from freetrain_parsl.extensions.fusion.curve import FusionCurve
from freetrain_parsl.extensions.fusion.slot.sizing import ArraySizing

CURVE = FusionCurve([(2, 1.9), (4, 3.4), (8, 5.0), (16, 5.2)])

throughputs = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 40)), max_size=5)


diminishing = st.lists(st.integers(-3, 10), max_size=7).map(
    lambda gains: [(1, 10 + sum(sorted(gains, reverse=True)[: i + 1])) for i in range(len(gains))]
)
"""Steps of curves whose gains diminish."""


def curve_of(steps):
    """Build a curve from pairs of additional members and tenths of throughput."""
    members, points = 1, []
    for more, tenths in steps:
        members += more
        points.append((members, max(tenths, 1) / 10))
    return FusionCurve(points)


def total(curve, sizes):
    return sum(map(curve, sizes))


@pytest.mark.parametrize(("members", "throughput"), [(0, 0.0), (1, 1.0), (2, 1.9), (3, 2.65), (8, 5.0), (99, 5.2)])
def test_linear_between_points_and_flat_beyond(members, throughput):
    assert CURVE(members) == pytest.approx(throughput)


def test_one_member_may_be_left_out():
    assert FusionCurve([(1, 1.0), (2, 1.5)]) == FusionCurve([(2, 1.5)])
    assert FusionCurve().points == ((1, 1.0),)
    assert pickle.loads(pickle.dumps(CURVE)) == CURVE


@pytest.mark.parametrize(
    ("points", "problem"),
    [
        ([(2, 1.5), (2, 1.6)], "must increase, got 2 after 2"),
        ([(0, 1.0)], "at least 1, got 0"),
        ([(2.5, 1.0)], r"whole number of at least 1, got 2\.5"),
        ([(True, 1.0)], "got True"),
        ([(2, 0)], "positive number, got 0"),
        ([(2, float("nan"))], "positive number, got nan"),
        ([(2, "1")], "positive number, got '1'"),
        ([(1, 120.0)], r"throughput 1, got 120\.0; divide all"),
    ],
)
def test_invalid_points(points, problem):
    with pytest.raises(InvalidApp, match=problem):
        FusionCurve(points)


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (lambda: CURVE(-1), "got -1"),
        (lambda: CURVE.grouping(-1, 2), "cannot group -1 members on 2 slots"),
        (lambda: CURVE.grouping(1, -2), "on -2 slots"),
        (lambda: CURVE.grouping(1, 2, limit=0), "limit of 0"),
    ],
)
def test_invalid_questions(call, problem):
    with pytest.raises(InvalidApp, match=problem):
        call()


@pytest.mark.parametrize(
    ("points", "limit", "size"),
    [
        ([(2, 1.9), (4, 3.4), (8, 5.0)], None, 8),
        ([(2, 1.9), (4, 3.4), (8, 5.0)], 5, 5),
        ([(2, 1.9), (4, 3.4), (8, 5.0)], 1, 1),
        ([(2, 1.9), (4, 2.0), (8, 8.0)], None, 8),  # one size without growth does not end the search
        ([(2, 1.9), (4, 2.0), (8, 2.0), (16, 16.0)], None, 4),  # two do
        ([(2, 1.9), (4, 1.8)], None, 2),
        ([(2, 0.9), (4, 1.5)], None, 4),
        ([(2, 0.9), (4, 1.05)], None, 1),
        ([], None, 1),
    ],
)
def test_best_size(points, limit, size):
    assert FusionCurve(points).best_size(limit) == size


@given(throughputs, st.integers(1, 20))
@settings(deadline=None)
def test_best_size_is_what_timing_steps_finds(steps, limit):
    bent = [(members, speed * (1.0013 + members / 999)) for members, speed in curve_of(steps).points[1:]]
    curve = FusionCurve(bent)  # where speeds are equal, or one is 1.1 times another, rounding would decide
    limit = min(limit, curve.largest)
    sizing = ArraySizing(limit)
    while not sizing.decided:
        sizing.count(sizing.size / curve(sizing.size) if sizing.fused else sizing.size)
    assert curve.best_size(limit) == (sizing.size if sizing.fused else 1)


@given(throughputs | diminishing, st.integers(0, 9), st.integers(0, 4), st.integers(1, 9))
@settings(deadline=None, max_examples=200)
def test_grouping_is_the_best_of_all(steps, count, slots, limit):
    curve = curve_of(steps)
    usable = [n for n in range(1, min(curve.largest, limit) + 1) if n == 1 or curve(n) >= 1.1]
    possible = [
        sizes
        for arrays in range(slots + 1)
        for sizes in combinations_with_replacement(usable, arrays)
        if sum(sizes) <= count
    ]
    most = max(total(curve, sizes) for sizes in possible)
    best = [sizes for sizes in possible if total(curve, sizes) > most - 1e-9]
    expected = min(best, key=lambda sizes: (len(sizes), sum(n * n for n in sizes)))
    found = curve.grouping(count, slots, limit)
    assert total(curve, found) == pytest.approx(most)
    assert tuple(sorted(found)) in possible
    assert list(found) == sorted(found, reverse=True)
    assert (len(found), sum(n * n for n in found)) == (len(expected), sum(n * n for n in expected))


def test_members_alone_while_there_are_slots_and_all_on_few():
    assert CURVE.grouping(5, 9) == (1, 1, 1, 1, 1)
    assert CURVE.grouping(16, 4) == (4, 4, 4, 4)
    assert CURVE.grouping(1000, 2) == (16, 16)
    assert CURVE.grouping(1000, 2, limit=8) == (8, 8)
    assert FusionCurve().grouping(3, 2) == (1, 1)


def test_slower_sizes_are_avoided():
    assert FusionCurve([(4, 3.0), (8, 2.0)]).grouping(8, 1) == (4,)


def test_files(tmp_path):
    table = tmp_path / "curve.csv"
    table.write_text("members,throughput\n1,1\n2,1.9\n\n4,3.4\n")
    assert FusionCurve.from_file(table) == FusionCurve([(2, 1.9), (4, 3.4)])
    rows = [{"net": "mlp", "batch": 64, "members": n, "ratio": ratio} for n, ratio in ((1, 0.8), (2, 1.9))]
    measured = tmp_path / "fusion.json"
    measured.write_text(json.dumps({"rows": rows}))
    assert FusionCurve.from_file(measured) == FusionCurve([(2, 1.9)])


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("curve.csv", "nodes,rate\n1,1\n", "curve.csv:1: the first line must be 'members,throughput'"),
        ("curve.csv", "members,throughput\n2,1.5,3\n", "curve.csv:2: expected 'members,throughput', got '2,1.5,3'"),
        ("curve.csv", "members,throughput\n4,1.5\n2,1\n", "curve.csv:3: fusion curve: numbers of members"),
        ("curve.csv", "members,throughput\n2,fast\n", "curve.csv:2: fusion curve: a throughput must be a positive"),
        ("curve.csv", "members,throughput\n", "curve.csv: fusion curve: needs at least one point"),
        ("curve.txt", "", "curve.txt: a fusion curve is a .csv file"),
        ("curve.json", "[]", "curve.json: is not a file of benchmarks/fusion.py --json"),
        ("curve.json", '{"rows": [{"net": "a", "members": 2}]}', "curve.json: is not a file of"),
        (
            "curve.json",
            json.dumps({"rows": [{"net": "mlp", "batch": n, "members": 2, "ratio": 1.5} for n in (16, 64)]}),
            "curve.json: has the curves of mlp 16, mlp 64; run the benchmark with one --nets",
        ),
    ],
)
def test_invalid_files(tmp_path, name, text, problem):
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(InvalidInput) as error:
        FusionCurve.from_file(file)
    assert problem in str(error.value)
    assert "\n" not in str(error.value)
