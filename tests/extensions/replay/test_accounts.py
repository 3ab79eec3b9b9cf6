"""The cost of each change of a trainer, against results computed by hand."""

from __future__ import annotations

import math

import pytest

from freetrain_parsl.extensions.replay.accounts import Account
from freetrain_parsl.planning.curves.scaling import ScalingCurve
from freetrain_parsl.planning.model import CostsInSeconds, PlannedJob

CURVE = ScalingCurve({1: 10.0, 2: 18.0, 4: 30.0})


@pytest.fixture
def account() -> Account:
    """Return the account of a trainer on two of its 2 to 4 nodes, with a value of 0.5 per sample."""
    account = Account(PlannedJob("t", 2, 4, CURVE, CostsInSeconds(up=5, down=3), work_left=900.0), 0.0, 0.5)
    account.start(frozenset("ab"), 7.0, 0.0)
    return account


def test_a_start_costs_its_seconds_at_the_rate_that_follows(account: Account) -> None:
    again = Account(account.trainer, 0.0, 0.5)
    assert again.start(frozenset("abc"), 7.0, 2.0) == 2 * 24 * 0.5
    assert (again.started, again.rate, again.samples) == (7.0, 24.0, -48.0)


@pytest.mark.parametrize(
    ("nodes", "seconds"),
    [
        ("abc", 5),  # grows
        ("bc", 5),  # swaps: it gets a node
        ("cde", 5),
        ("a", 3),  # shrinks
        ("", 3),  # stops
    ],
)
def test_a_rescale_costs_at_the_rate_before(account: Account, nodes: str, seconds: float) -> None:
    assert account.rescale(frozenset(nodes)) == seconds * 18 * 0.5
    assert account.samples == -seconds * 18
    assert account.nodes == frozenset(nodes)
    assert (account.rescales, account.preemptions) == (1, 0)


def test_a_preemption_costs_once_and_what_follows_is_charged_at_what_is_left(account: Account) -> None:
    """With fewer nodes than its minimum its rate is zero: growing again is free."""
    account.rescale(frozenset("abcd"))
    assert account.preempt(frozenset("ab")) == 3 * 30 * 0.5
    assert account.rescale(frozenset("cde")) == 5 * 18 * 0.5
    assert account.preempt(frozenset("cd")) == 3 * 24 * 0.5
    assert account.rate == 0
    assert account.rescale(frozenset("abe")) == 0
    assert (account.rescales, account.preemptions) == (3, 2)


def test_time_brings_samples_and_ends(account: Account) -> None:
    assert account.done_at(10.0) == 10 + 900 / 18
    account.run(20.0)
    assert (account.samples, account.work_left, account.node_seconds) == (360, 540, 40)
    assert not account.done(30.0)
    account.run(30.0)
    assert account.done(60.0)


def test_who_holds_nothing_or_has_no_end_is_never_done(account: Account) -> None:
    account.stop()
    assert account.done_at(10.0) == math.inf
    endless = Account(PlannedJob("t", 1, 4, CURVE), 0.0, 1.0)
    endless.start(frozenset("a"), 0.0, 0.0)
    endless.run(1e12)
    assert endless.done_at(1e12) == math.inf
    assert not endless.done(1e12)


def test_what_a_clock_cannot_tell_counts_as_done(account: Account) -> None:
    """At 1.7e9 the resolution of the clock is 2e-7 s: less than that is left."""
    account.run(50 - 1e-7)
    assert account.work_left > 1e-9 * 900
    assert account.done(1.7e9)
    assert not account.done(0.0)


def test_the_first_start_is_remembered(account: Account) -> None:
    account.rescale(frozenset())
    account.start(frozenset("ab"), 99.0, 0.0)
    assert account.started == 7.0
