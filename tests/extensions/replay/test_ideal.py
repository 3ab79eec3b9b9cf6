"""The oracle and dedicated nodes: free rescaling, against brute force and results computed by hand."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetrain_parsl.extensions.replay.accounts import Bins
from freetrain_parsl.extensions.replay.ideal import BestRates, ideal_value
from freetrain_parsl.extensions.replay.simulation import ReplaySettings, replay
from freetrain_parsl.planning.curves.scaling import ScalingCurve
from freetrain_parsl.planning.model import CostsInSeconds, PlannedJob
from freetrain_parsl.planning.objectives.base import OBJECTIVES
from freetrain_parsl.planning.policies import MilpPolicy
from tests.extensions.replay.small_logs import SmallLog, random_logs, random_trainers

THROUGHPUT = OBJECTIVES["throughput"]
PLAIN = ("priority", "speedup", "throughput")


def trainer(name: str, rates: dict[int, float], *, least: int = 1, most: int = 10, **more: float) -> PlannedJob:
    return PlannedJob(name, least, most, ScalingCurve(rates), CostsInSeconds(9, 9, 9), **more)


@settings(max_examples=60, deadline=None)
@given(trainers=random_trainers(), nodes=st.integers(0, 12), objective=st.sampled_from(PLAIN))
def test_the_best_rate_is_that_of_the_best_of_all_counts(
    trainers: tuple[PlannedJob, ...], nodes: int, objective: str
) -> None:
    worth = OBJECTIVES[objective]
    rates = BestRates(trainers, worth)
    for alive in (frozenset(range(len(trainers))), frozenset({0}), frozenset[int]()):
        chosen = [trainers[index] for index in sorted(alive)]
        choices = itertools.product(*([0, *range(t.min_nodes, t.max_nodes + 1)] for t in chosen))
        best = max(
            sum(worth(t, n) for t, n in zip(chosen, counts, strict=True) if n)
            for counts in choices
            if sum(counts) <= nodes
        )
        rate, placed = rates.best(alive, (nodes,))
        counts = {index: count for index, (_, count) in placed.items()}
        assert rate == rates(alive, (nodes,)) == pytest.approx(best)
        assert sum(counts.values()) <= nodes
        assert sum(worth(trainers[i], n) for i, n in counts.items() if n) == pytest.approx(best)


def test_trainers_that_are_alike_but_for_their_names_can_be_worth_different_values() -> None:
    """A user-defined objective may depend on anything."""
    alike = [trainer(name, {1: 1.0}, most=1) for name in ("plain", "dear")]
    rates = BestRates(alike, lambda item, nodes: 5.0 * nodes if item.name == "dear" else 1.0 * nodes)
    assert rates.best(frozenset({0, 1}), (1,)) == (5.0, {0: (0, 0), 1: (0, 1)})


@settings(max_examples=60, deadline=None)
@given(
    log=random_logs(),
    trainers=random_trainers(endless=True, costs=False),
    objective=st.sampled_from(PLAIN),
    concurrent=st.sampled_from([None, 1, 2]),
)
def test_for_endless_trainers_the_oracle_is_the_optimal_replay_with_free_rescaling(
    log: SmallLog, trainers: tuple[PlannedJob, ...], objective: str, concurrent: int | None
) -> None:
    rates = BestRates(trainers, OBJECTIVES[objective])
    bins = Bins(log.start, log.end, 7)
    ideal = ideal_value(rates, log, concurrent=concurrent, bins=bins)
    outcome = replay(log, rates, MilpPolicy(objective), ReplaySettings(concurrent=concurrent))
    assert ideal == pytest.approx(outcome.value, abs=1e-6)
    assert bins.sums("value").sum() == pytest.approx(ideal, abs=1e-6)


def test_idle_nodes_by_hand() -> None:
    """Two nodes for 10 s, then three, then none, then one; the second trainer is submitted at 15 s."""
    log = SmallLog([("a", 0, 20), ("b", 0, 20), ("c", 10, 20), ("a", 30, 40)])
    trainers = [
        trainer("first", {1: 10.0, 2: 16.0, 3: 20.0}),
        trainer("second", {1: 0.0, 2: 9.0}, least=2, submitted=15.0),
    ]
    assert ideal_value(BestRates(trainers, THROUGHPUT), log) == 10 * 16 + 5 * 20 + 5 * max(20, 10 + 9) + 10 * 10
    assert ideal_value(BestRates(trainers[:1], THROUGHPUT), log) == 10 * 16 + 10 * 20 + 10 * 10


def test_trainers_that_end_by_hand() -> None:
    """On two dedicated nodes each has one until the first ends at 10 s; then the second has both for 7.5 s."""
    log = SmallLog([("a", 0, 100)])
    trainers = [
        trainer("short", {1: 10.0, 2: 12.0}, work_left=100.0),
        trainer("long", {1: 8.0, 2: 16.0}, most=2, work_left=200.0),
    ]
    rates = BestRates(trainers, THROUGHPUT)
    bins = Bins(0.0, 100.0, 40)  # of 2.5 s
    assert ideal_value(rates, log, nodes=(2,), bins=bins) == pytest.approx(300)
    assert bins.sums("value")[:8] / 2.5 == pytest.approx([18.0] * 4 + [16.0] * 3 + [0.0])
    assert ideal_value(rates, log) == pytest.approx(300)  # one after the other on one node: 10 s and 25 s
    assert ideal_value(rates, SmallLog([("a", 0, 12)])) == pytest.approx(100 + 2 * 8)


def test_who_comes_first_is_first_when_only_some_may_run() -> None:
    """One at a time: the log ends before the third one, although the fastest, can start."""
    log = SmallLog([("a", 0, 30)])
    trainers = [
        trainer("second", {1: 2.0}, submitted=1.0),
        trainer("first", {1: 1.0}, work_left=10.0),
        trainer("third", {1: 50.0}, submitted=2.0),
    ]
    rates = BestRates(trainers, THROUGHPUT)
    assert ideal_value(rates, log, concurrent=1) == pytest.approx(10 * 1 + 20 * 2)
    assert ideal_value(rates, log, concurrent=2) == pytest.approx(1 * 1 + 29 * 2)  # the first waits indefinitely
    assert ideal_value(rates, log) == pytest.approx(1 * 1 + 1 * 2 + 28 * 50)


@pytest.mark.parametrize("epoch", [0.0, 1.7e9, 1e12])
def test_it_ends_whatever_the_clock_counts_from(epoch: float) -> None:
    log = SmallLog([("a", epoch, epoch + 1000), ("b", epoch + 1, epoch + 1000)])
    trainers = [trainer(f"t{index}", {1: 7.0, 2: 11.0}, work_left=(index + 1) / 3) for index in range(5)]
    value = ideal_value(BestRates(trainers, THROUGHPUT), log)
    assert value == pytest.approx(5, abs=1e-14 * epoch * 11)
    assert math.isfinite(value)
