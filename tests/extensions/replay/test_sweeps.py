"""Replays of sweeps: results computed by hand, no work lost or made up, and fusion never finishes less."""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetrain_parsl.errors import InvalidInput, InvalidSettings
from freetrain_parsl.extensions.fusion.curve import FusionCurve
from freetrain_parsl.extensions.replay.block_site import BlockSettings
from freetrain_parsl.extensions.replay.comparison import Contestant
from freetrain_parsl.extensions.replay.simulation import Cost, Curves, Knowledge, Outcome, ReplaySettings
from freetrain_parsl.extensions.replay.sweeps.arrays import ArrayAccount
from freetrain_parsl.extensions.replay.sweeps.sweeps import compare_fusion, replay_sweeps
from freetrain_parsl.extensions.replay.trainers import TrainerSet
from freetrain_parsl.planning.curves.scaling import ScalingCurve
from freetrain_parsl.planning.model import CostsInSeconds, PlannedJob
from freetrain_parsl.planning.policies import EqualSharePolicy, MilpPolicy
from tests.extensions.replay.small_logs import SmallLog, random_logs

FUSION = FusionCurve([(2, 1.6), (4, 2.0)])
ALONE = FusionCurve()


def sweeps(*numbers: int, work: float = 100.0, up: float = 0.0, most: int = 1, **more: Any) -> TrainerSet:
    """Make sweeps of so many members, which train 10 samples per second on a node."""
    made = {}
    for index, number in enumerate(numbers):
        costs = CostsInSeconds(up=up, down=up, start=up)
        names = [f"s{index}-{member}" for member in range(number)]
        curve = ScalingCurve({1: 10.0, 4: 25.0})
        made[f"s{index}"] = tuple(PlannedJob(name, 1, most, curve, costs, work, **more) for name in names)
    return TrainerSet("sweeps", tuple(member for sweep in made.values() for member in sweep), "throughput", made)


def ran(log: SmallLog, trainers: TrainerSet, fusion: FusionCurve, **options: Any) -> Outcome:
    return replay_sweeps(log, trainers, fusion, EqualSharePolicy("throughput"), ReplaySettings(**options))


def ends(outcome: Outcome) -> list[float | None]:
    return [account.finished for account in outcome.accounts]


def constant(nodes: int, seconds: float) -> SmallLog:
    return SmallLog([(f"n{node}", 0.0, seconds) for node in range(nodes)])


def test_members_of_an_array_end_together() -> None:
    log = constant(1, 100.0)
    assert ends(ran(log, sweeps(4), FUSION)) == [20.0] * 4
    assert ends(ran(log, sweeps(4), ALONE)) == [10.0, 20.0, 30.0, 40.0]
    fused = ran(log, sweeps(4), FUSION)
    assert (fused.used_seconds, fused.value, fused.unused) == (20.0, 400.0, 0.0)
    assert [account.node_seconds for account in fused.accounts] == [5.0] * 4


def test_an_array_is_refilled_from_the_queue() -> None:
    """Two of three train fused, 8 samples per second each, until the third one is alone."""
    outcome = ran(constant(1, 100.0), sweeps(3), FusionCurve([(2, 1.6)]))
    assert ends(outcome) == [12.5, 12.5, 22.5]
    assert [account.started for account in outcome.accounts] == [0.0, 0.0, 12.5]


def test_members_end_at_their_own_work() -> None:
    """The second sweep is submitted later: its members wait until an array of the first one has ended."""
    first, second = sweeps(2).sweeps["s0"], sweeps(1, 2, submitted=5.0).sweeps["s1"]
    both = TrainerSet("both", (*first, *second), "throughput", {"s0": first, "s1": second})
    outcome = ran(constant(1, 100.0), both, FUSION)
    assert ends(outcome) == [12.5, 12.5, 25.0, 25.0]


def test_a_taken_node_returns_the_members_to_the_queue_and_a_new_one_splits() -> None:
    log = SmallLog([("a", 0.0, 5.0), ("b", 10.0, 100.0), ("c", 10.0, 100.0)])
    outcome = ran(log, sweeps(4), FUSION)
    # Four on a node for 5 s: 25 samples each. Then two on each of two nodes.
    assert ends(outcome) == pytest.approx([10.0 + 75.0 / 8.0] * 4)
    assert [account.preemptions for account in outcome.accounts] == [1] * 4


def test_costs_of_changes_are_charged() -> None:
    """When the second node opens, two members leave the array of four: 2 s at 20 samples per second are lost."""
    log = SmallLog([("a", 0.0, 50.0), ("b", 10.0, 50.0)])
    outcome = ran(log, sweeps(4, work=1000.0, up=2.0), FUSION)
    assert outcome.losses.rescale == 40.0
    assert sum(account.samples for account in outcome.accounts) == pytest.approx(outcome.value)
    full = ran(log, sweeps(4, work=1000.0, up=2.0), FUSION, cost=Cost.FULL)
    assert full.losses.start == 2.0 * (20.0 + 16.0)


def test_concurrent_limits_the_arrays() -> None:
    assert ends(ran(constant(3, 100.0), sweeps(4), ALONE, concurrent=2)) == [10.0, 10.0, 20.0, 20.0]


def test_few_members_may_use_several_nodes_each() -> None:
    assert ends(ran(constant(4, 100.0), sweeps(1, most=4), FUSION)) == [4.0]


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, float]]:
    """Record what arrays do: their members, nodes and seconds."""
    seen: list[tuple[int, int, float]] = []
    run = ArrayAccount.run

    def record(array: ArrayAccount, seconds: float) -> None:
        seen.append((array.size, len(array.nodes), seconds))
        run(array, seconds)

    monkeypatch.setattr(ArrayAccount, "run", record)
    return seen


@given(
    random_logs(),
    st.lists(st.integers(1, 7), min_size=1, max_size=2),
    st.sampled_from([0.0, 1.0]),
    st.sampled_from([30.0, 100.0, 1e4]),
    st.sampled_from([EqualSharePolicy, MilpPolicy]),
    st.sampled_from([Knowledge.NONE, Knowledge.PERFECT, Knowledge.ESTIMATED]),
)
@settings(deadline=None, max_examples=50)
def test_the_members_work_is_node_time_by_throughput(
    log: SmallLog, numbers: list[int], up: float, work: float, policy: Any, knowledge: Knowledge
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        seen = recorded(patch)
        trainers = sweeps(*numbers, work=work, up=up)
        outcome = replay_sweeps(log, trainers, FUSION, policy("throughput"), ReplaySettings(knowledge))
    done = sum(seconds * nodes * 10.0 * FUSION(size) for size, nodes, seconds in seen)
    samples = sum(account.samples for account in outcome.accounts)
    assert samples == pytest.approx(done - outcome.losses.total, abs=1e-6)
    assert samples == pytest.approx(outcome.value, abs=1e-6)
    assert sum(account.node_seconds for account in outcome.accounts) == pytest.approx(outcome.used_seconds)
    assert outcome.used_seconds == pytest.approx(sum(nodes * seconds for _, nodes, seconds in seen))
    assert outcome.refused == 0
    for account in outcome.accounts:
        assert account.samples <= work * (1 + 1e-6)
        assert (account.finished is not None) == (account.samples >= work * (1 - 1e-6))


concave = st.lists(st.integers(0, 10), max_size=7).map(
    lambda tenths: FusionCurve(
        [(2 + i, 1 + total / 10) for i, total in enumerate(accumulate(sorted(tenths, reverse=True)))]
    )
)
"""Curves of diminishing gains that never fall below one by one."""


@given(concave, st.integers(1, 4), st.integers(1, 12), st.floats(0.1, 1.0))
@settings(deadline=None, max_examples=50)
def test_fusion_never_does_less_nor_finishes_later(fusion: FusionCurve, nodes: int, members: int, share: float) -> None:
    """One by one, members end in waves of 10 s."""
    last = 10.0 * math.ceil(members / nodes)
    trainers = sweeps(members)
    log = constant(nodes, last + 1e-3)
    assert None not in ends(ran(log, trainers, ALONE))
    assert None not in ends(ran(log, trainers, fusion))
    early = constant(nodes, share * last)
    alone, fused = ran(early, trainers, ALONE), ran(early, trainers, fusion)
    assert fused.value >= alone.value - 1e-6


def test_the_comparison_has_both_ways() -> None:
    log = constant(1, 30.0)
    result = compare_fusion(
        log, sweeps(4), ("mine", FUSION), [Contestant("equal-share", objective="throughput")], price_per_node_hour=2.0
    )
    (entry,) = result["policies"]
    hours = 20 / 3600
    assert result["fusion"] == {"name": "mine", "points": [[1, 1.0], [2, 1.6], [4, 2.0]]}
    assert entry["sweep"] == {
        "members": 4,
        "finished": 4,
        "work": pytest.approx(4.0),
        "node_hours": pytest.approx(hours),
        "finished_per_node_hour": pytest.approx(4 / hours),
    }
    assert (entry["one_by_one"]["finished"], entry["one_by_one"]["jct"]["mean"]) == (3, 20.0)
    assert (entry["jct"]["mean"], entry["idle_cost"]["used"]) == (20.0, pytest.approx(2 * hours))
    series = entry["series"]
    assert (series["finished"][-1], series["finished_one_by_one"][-1]) == (4, 3)
    assert series["used"].keys() == {"s0"}
    (alone,) = compare_fusion(log, sweeps(4), ("none", ALONE), [Contestant("milp", objective="throughput")])["policies"]
    assert "one_by_one" not in alone
    assert alone["sweep"]["finished"] == 3


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"blocks": BlockSettings()}, "--blocks: sweeps are replayed in nodes that are idle"),
        ({"curves": Curves.LEARNED}, "--curves learned: the curves of arrays are given by --fusion"),
    ],
)
def test_settings_that_do_not_fit(options: Any, problem: str) -> None:
    with pytest.raises(InvalidSettings, match=problem):
        compare_fusion(constant(1, 9.0), sweeps(1), ("mine", FUSION), [Contestant("milp")], ReplaySettings(**options))


def test_a_log_without_idle_nodes() -> None:
    log = SmallLog([("a", 5.0, 5.0)], start=5.0, end=9.0)
    with pytest.raises(InvalidInput, match="no node is ever idle"):
        compare_fusion(log, sweeps(1), ("mine", FUSION), [Contestant("milp")])
