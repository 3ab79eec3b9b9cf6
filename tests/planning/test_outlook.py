"""Estimates of node lifetimes from a pool's history."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freetrain_parsl.planning.node_survival import Outlook, Prospect


def lived(lives: np.ndarray, gap: float = 10.0) -> tuple[Outlook, float]:
    """Let a node open every `gap` seconds and last for the given time; return the outlook and the time reached."""
    outlook = Outlook()
    opens = gap * np.arange(len(lives))
    events = [(time, "opened", str(i)) for i, time in enumerate(opens)]
    events += [(time, "closed", str(i)) for i, time in enumerate(opens + lives)]
    for time, what, node in sorted(events):
        getattr(outlook, what)(time, [node])
    return outlook, float(max(opens + lives))


@pytest.mark.parametrize("life", [30.0, 600.0, 20_000.0])
def test_without_memory_every_node_is_expected_to_last_the_mean_life(life: float) -> None:
    """Exponential lifetimes: the rate is one over the mean at any age, within the accuracy of 4000 samples."""
    outlook, now = lived(np.random.default_rng(1).exponential(life, 4000))
    outlook.opened(now, ["new"])
    for age in (0.3 * life, life):  # far from this age, few of them end
        assert outlook.closing_rate("new", now + age) == pytest.approx(1 / life, rel=0.2)
    for age in (0.0, 0.3 * life, life):
        assert outlook.remaining("new", now + age) == pytest.approx(life, rel=0.1)


@pytest.mark.parametrize("age", [0.0, 1.0, 50.0, 1000.0])
def test_what_is_expected_is_the_mean_of_what_was_seen(age: float) -> None:
    """For any distribution (here Weibull, most end early), it is the mean time left of those that reached the age."""
    lives = 400 * np.random.default_rng(2).weibull(0.6, 20_000)
    outlook, now = lived(lives)
    outlook.opened(now, ["new"])
    left = lives[lives > age] - age
    assert outlook.remaining("new", now + age) == pytest.approx(left.mean(), rel=0.1)


def test_where_most_close_early_older_nodes_are_expected_to_last_longer() -> None:
    rng = np.random.default_rng(3)
    lives = np.where(rng.random(4000) < 0.7, rng.exponential(60, 4000), rng.exponential(6000, 4000))
    outlook, now = lived(lives)
    outlook.opened(now, ["new"])
    remaining = [outlook.remaining("new", now + age) for age in (1.0, 30.0, 100.0, 300.0, 1000.0)]
    rates = [outlook.closing_rate("new", now + age) for age in (30.0, 100.0, 1000.0)]
    assert all(first < second for first, second in itertools.pairwise(remaining))
    assert all(first > second for first, second in itertools.pairwise(rates))
    assert remaining[-1] > 2 * remaining[0]


def test_what_we_gave_back_was_at_risk_but_did_not_close() -> None:
    """Half of the nodes are released halfway: the estimate stays that of the nodes that closed by themselves."""
    rng = np.random.default_rng(4)
    lives, ours = rng.exponential(500, 6000), rng.exponential(500, 6000)
    outlook = Outlook()
    events = [(10.0 * i, 0, i) for i in range(6000)]
    events += [(10.0 * i + min(pair), 1, i) for i, pair in enumerate(zip(lives, ours, strict=True))]
    for time, what, i in sorted(events):
        if what == 0:
            outlook.opened(time, [str(i)])
        else:
            outlook.closed(time, [str(i)], given_back=bool(ours[i] < lives[i]))
    now = max(events)[0]
    outlook.opened(now, ["new"])
    assert outlook.closing_rate("new", now + 100) == pytest.approx(1 / 500, rel=0.2)


def test_nodes_that_only_we_give_back_last() -> None:
    """Each would have lasted at least this long."""
    outlook = Outlook()
    for index in range(200):
        outlook.opened(100.0 * index, ["n"])
        outlook.closed(100.0 * index + 90, ["n"], given_back=True)
    outlook.opened(20_000.0, ["n"])
    assert outlook.remaining("n", 20_000.0) > 5000


def test_a_node_that_never_opened_is_expected_to_last_for_ever() -> None:
    outlook = Outlook()
    outlook.opened(0.0, ["a", "b"])
    outlook.closed(5.0, ["b"])
    for node in ("b", "stranger"):
        assert outlook.remaining(node, 10.0) == math.inf
        assert outlook.closing_rate(node, 10.0) == 0.0
    assert 0 < outlook.remaining("a", 10.0) < math.inf
    outlook.closed(11.0, ["stranger"])  # nothing to learn, nothing to fail on


def test_expected_time_left_is_finite_and_positive_at_any_age() -> None:
    """Before any closing, and at ages that no node has reached."""
    outlook = Outlook()
    outlook.opened(0.0, ["a"])
    for age in (0.0, 1.0, 1e3, 1e6, 1e8, 1e10):
        assert 0 < outlook.remaining("a", age) < math.inf
        assert 0 < outlook.closing_rate("a", age) < math.inf


def test_the_expected_time_left_is_continuous_in_the_age() -> None:
    """Also at the edges of the bins."""
    outlook, now = lived(np.random.default_rng(6).exponential(300, 500))
    outlook.opened(now, ["new"])
    for edge in (2.0 ** (half / 2) for half in range(2, 44)):
        before, after = (outlook.remaining("new", now + edge * (1 + sign * 1e-9)) for sign in (-1, 1))
        assert before == pytest.approx(after, rel=1e-4)


def test_a_node_that_opens_again_is_as_old_as_it_was() -> None:
    """Only a closing in between resets its age."""
    outlook, now = lived(np.array([20.0] * 50 + [5000.0] * 50))
    outlook.opened(now, ["a"])
    outlook.opened(now + 400, ["a"])
    old = outlook.closing_rate("a", now + 400)
    outlook.closed(now + 400, ["a"])
    outlook.opened(now + 400, ["a"])
    assert outlook.closing_rate("a", now + 400) > old


@pytest.mark.parametrize(("gap", "nodes"), [(60.0, 1), (60.0, 25), (7.5, 4)])
def test_the_horizon_is_between_the_gap_of_changes_and_the_life_of_nodes(gap: float, nodes: int) -> None:
    """Each `gap` the oldest of `nodes` nodes closes and another opens: each lasts for nodes * gap."""
    outlook = Outlook()
    for index in range(4000):
        outlook.opened(gap * index, [str(index)])
        if index >= nodes:
            outlook.closed(gap * index, [str(index - nodes)])
    assert outlook.horizon() == pytest.approx(math.sqrt(gap * nodes * gap), rel=0.02)


def test_changes_at_one_instant_are_one_change() -> None:
    together, apart = Outlook(), Outlook()
    for index in range(100):
        for node in "abcd":
            together.opened(100.0 * index, [node + str(index)])
        apart.opened(100.0 * index, [node + str(index) for node in "abcd"])
    assert together.horizon() == apart.horizon()


def test_the_horizon_before_anything_was_seen_is_a_constant() -> None:
    assert Outlook().horizon() == pytest.approx(math.sqrt(12 * 1200))


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["opened", "closed", "given back", "seen"]),
            st.floats(-1e10, 1e10),
            st.sampled_from("abc"),
            st.sampled_from(list(Prospect)),
        ),
        max_size=30,
    ),
    st.floats(-1e10, 1e10),
)
def test_whatever_the_times_of_its_events_it_answers_with_possible_numbers(events: list, now: float) -> None:
    """Clocks may be stepped, also backwards: no estimate may become negative or NaN."""
    outlook = Outlook()
    for what, time, node, prospect in events:
        if what == "opened":
            outlook.opened(time, [node])
        elif what == "seen":
            outlook.seen(time, node, prospect)
        else:
            outlook.closed(time, [node], given_back=what == "given back")
        assert 0 < outlook.horizon() < math.inf
        for name in "abc":
            assert outlook.remaining(name, now) > 0
            assert 0 <= outlook.closing_rate(name, now) < math.inf


def test_the_horizon_grows_with_what_a_start_costs_and_never_below_that_of_free_starts() -> None:
    """A start is charged at most a sixth of its trainer's yield within the horizon."""
    outlook = Outlook()
    free = outlook.horizon()
    assert [outlook.horizon(start) for start in (0.0, 2.0, free / 6)] == [free, free, pytest.approx(free)]
    assert [outlook.horizon(start) for start in (60.0, 300.0)] == [360.0, 1800.0]
