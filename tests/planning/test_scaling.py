"""Scaling curves: values between, beyond and below the points, and invalid input."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetrain_parsl.errors import InvalidApp, InvalidInput
from freetrain_parsl.planning.curves.scaling import ScalingCurve

CURVE = ScalingCurve({2: 190.0, 4: 300.0, 8: 280.0})

points = st.dictionaries(st.integers(1, 200), st.floats(0, 1e6, allow_nan=False), min_size=1, max_size=8)


@pytest.mark.parametrize(
    ("nodes", "rate"),
    [(0, 0.0), (2, 190.0), (3, 245.0), (4, 300.0), (6, 290.0), (8, 280.0), (9, 280.0), (10**6, 280.0)],
)
def test_linear_between_points_and_flat_beyond(nodes, rate):
    assert CURVE(nodes) == rate


def test_below_the_first_point_is_refused():
    with pytest.raises(InvalidApp, match="starts at 2 nodes"):
        CURVE(1)


@given(points)
@settings(deadline=None, max_examples=100)
def test_table_agrees_with_single_values(mapping):
    curve = ScalingCurve(mapping)
    table = curve.rates(210)
    assert table[0] == 0.0
    assert np.isnan(table[1 : curve.first_nodes]).all()
    assert [curve(n) for n in range(curve.first_nodes, 211)] == table[curve.first_nodes :].tolist()


def test_table_may_end_before_the_first_point():
    assert np.isnan(CURVE.rates(1)).tolist() == [False, True]
    assert CURVE.rates(0).tolist() == [0.0]


def test_mapping_in_any_order_and_pairs_are_the_same():
    curves = {
        ScalingCurve({4: 300, 2: 190.0, 8: 280}),
        ScalingCurve([(2, 190), (4, 300.0), (8, 280.0)]),
        CURVE,
    }
    assert len(curves) == 1
    assert CURVE != "curve"


def test_survives_pickling():
    for curve in (CURVE, ScalingCurve.default()):
        copy = pickle.loads(pickle.dumps(curve))
        assert (copy, copy.relative) == (curve, curve.relative)


def test_repr_makes_it_again():
    for curve in (CURVE, ScalingCurve.default()):
        assert eval(repr(curve)) == curve


@pytest.mark.parametrize(
    ("given_points", "message"),
    [
        ({}, "at least one point"),
        ({0: 1.0}, "at least 1, got 0"),
        ({1.5: 1.0}, "whole number"),
        ({True: 1.0}, "whole number"),
        ({"a": 1.0}, "whole number"),
        ({1: -1.0}, "zero or more"),
        ({1: float("nan")}, "zero or more"),
        ({1: float("inf")}, "zero or more"),
        ({1: "fast"}, "zero or more"),
        ({1: None}, "zero or more"),
        ([(2, 1.0), (1, 2.0)], "must increase, got 1 after 2"),
        ([(2, 1.0), (2, 2.0)], "must increase, got 2 after 2"),
        ([1, 2], "a point is a pair"),
        ([(1, 2, 3)], "a point is a pair"),
    ],
)
def test_bad_points_are_refused_in_one_line(given_points, message):
    with pytest.raises(InvalidApp, match=message) as caught:
        ScalingCurve(given_points)
    assert "\n" not in str(caught.value)


def test_numpy_numbers_are_numbers():
    assert ScalingCurve({np.int64(1): np.float32(2)}).points == ((1, 2.0),)


def test_default_keeps_90_percent_at_each_doubling():
    curve = ScalingCurve.default()
    assert curve.relative
    assert [curve(n) / (2 * curve(n // 2)) for n in (2, 16, 4096)] == pytest.approx([0.9] * 3)


def test_a_curve_to_be_learned_is_asked_for_by_a_word():
    assert ScalingCurve.of("learn").unknown
    assert not ScalingCurve.default().unknown


def test_an_array_is_refused_in_one_line():
    with pytest.raises(InvalidApp, match="a point is a pair"):
        ScalingCurve.of(np.array([[1, 100], [2, 190]]))


class TestFiles:
    @pytest.mark.parametrize(
        ("name", "text"),
        [
            ("c.csv", "nodes,rate\n2,190\n4,300\n8,280\n"),
            ("c.CSV", "Nodes, Rate\n\n2, 190.0\n4, 3e2\n8, 280\n"),
            ("c.yaml", "2: 190\n4: 300.0\n8: 280\n"),
            ("c.yml", "{2: 190, 4: 300, 8: 280}"),
        ],
    )
    def test_csv_and_yaml_give_the_curve(self, tmp_path, name, text):
        (tmp_path / name).write_text(text)
        assert ScalingCurve.from_file(tmp_path / name) == CURVE

    @pytest.mark.parametrize(
        ("name", "text", "where", "what"),
        [
            ("c.csv", "", ":1", "nodes,rate"),
            ("c.csv", "n,r\n1,2\n", ":1", "nodes,rate"),
            ("c.csv", "nodes,rate\n", "", "at least one point"),
            ("c.csv", "nodes,rate\n1,2\n2\n", ":3", "expected"),
            ("c.csv", "nodes,rate\n1,2\n\n2,x\n", ":4", "zero or more"),
            ("c.csv", "nodes,rate\n1.5,2\n", ":2", "whole number"),
            ("c.csv", "nodes,rate\n4,2\n2,1\n", ":3", "must increase, got 2 after 4"),
            ("c.yaml", "1: 2\n1: 3\n", ":2", "must increase"),
            ("c.yaml", "1: 2\n\n2: -3\n", ":3", "zero or more"),
            ("c.yaml", "1: [2]\n", ":1", "expected a number of nodes and a rate"),
            ("c.yaml", "- 1\n- 2\n", "", "mapping"),
            ("c.yaml", "", "", "mapping"),
            ("c.yaml", "{1: 2", ":1", "not YAML"),
            ("c.txt", "1 2", "", ".csv, .yaml or .yml"),
        ],
    )
    def test_refusal_names_file_and_line(self, tmp_path, name, text, where, what):
        (tmp_path / name).write_text(text)
        with pytest.raises(InvalidInput) as caught:
            ScalingCurve.from_file(tmp_path / name)
        message = str(caught.value)
        assert message.startswith(f"{tmp_path / name}{where}: ")
        assert what in message
        assert "\n" not in message

    def test_missing_and_binary_files_are_refused(self, tmp_path):
        with pytest.raises(InvalidInput, match=r"none\.csv: cannot read"):
            ScalingCurve.from_file(tmp_path / "none.csv")
        (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
        with pytest.raises(InvalidInput, match=r"binary\.csv: cannot read"):
            ScalingCurve.from_file(tmp_path / "binary.csv")


def test_of_takes_what_a_user_may_give(tmp_path):
    (tmp_path / "c.csv").write_text("nodes,rate\n2,190\n4,300\n8,280\n")
    for value in (CURVE, dict(CURVE.points), list(CURVE.points), tmp_path / "c.csv", str(tmp_path / "c.csv")):
        assert ScalingCurve.of(value) == CURVE
    assert ScalingCurve.of(None) == ScalingCurve.default()
    with pytest.raises(InvalidApp, match="expected a mapping"):
        ScalingCurve.of(42)
