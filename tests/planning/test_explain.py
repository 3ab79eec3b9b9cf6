"""Explanations of why a window is used or not."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freetrain_parsl.planning.curves.scaling import ScalingCurve
from freetrain_parsl.planning.explain import explain_windows, least_size, preview, why_free
from freetrain_parsl.planning.model import BlockTerms, CostsInSeconds, Decision, PlannedJob, Window
from freetrain_parsl.planning.policies import EqualSharePolicy, MilpPolicy, WindowPolicy
from freetrain_parsl.planning.policies.base import Policy
from freetrain_parsl.planning.sizes import AllowedCounts
from tests.planning.small_events import DEFAULTS

SETTINGS = replace(DEFAULTS, startup=10, min_useful=20, closing_margin=5, max_walltime=1000, max_pending_blocks=4)
LINEAR = ScalingCurve({1: 10.0, 64: 640.0})
FLAT = ScalingCurve({1: 10.0, 2: 10.0})
NOW = 1000.0
TERMS = BlockTerms()


def trainer(name="t", *, least=1, most=4, work=math.inf, curve=LINEAR, start=0.0) -> PlannedJob:
    return PlannedJob(name, least, most, curve, CostsInSeconds(0, 0, start), work_left=work, submitted=NOW)


def window(*nodes: str, lasts: float | None = 500.0, opens: float = 0.0) -> Window:
    return Window(nodes, NOW + opens, None if lasts is None else NOW + lasts)


def explain(windows, trainers, *, policy=None, settings=SETTINGS, terms=TERMS, pending=0, slots=1):
    policy = policy or MilpPolicy()
    return explain_windows(windows, trainers, policy, settings, terms, NOW, pending, slots_per_node=slots)


def reasons(windows, trainers, **others):
    return [verdict.why for verdict in explain(windows, trainers, **others).verdicts]


def shown(windows, trainers, **terms):
    plan = preview(windows, trainers, MilpPolicy(), SETTINGS, BlockTerms(**terms), NOW)
    return [
        [(share.trainer, share.nodes, share.node_seconds, share.samples) for share in shares] for shares in plan.shares
    ]


class Broken(Policy):
    name = "broken"

    def allocate(self, pool, trainers, current, now):
        return Decision({"nobody": frozenset(pool)}, 0.0, proven_optimal=True, bound=0.0)


class Hasty(Policy):
    """Allocates nothing, without a proof of optimality."""

    name = "hasty"

    def allocate(self, pool, trainers, current, now):
        return Decision({}, 0.0, proven_optimal=False, bound=1.0)


def test_a_window_that_is_used_needs_no_reason():
    (verdict,) = explain([window("a", "b")], [trainer()]).verdicts
    assert (verdict.used, verdict.why) == (("a", "b"), "")


def test_a_short_window_is_too_short_whatever_the_trainings():
    """The planner's own rule takes precedence."""
    for trainers in ([], [trainer()]):
        (why,) = reasons([window("a", lasts=30)], trainers)
        assert why.startswith("shorter than start-up 10 s + minimum 20 s + margin 5 s")


def test_a_window_that_is_not_open_says_when_it_will_be():
    assert reasons([window("a", opens=120)], [trainer()]) == ["opens in 2 min"]


def test_without_trainings_nothing_is_wanted():
    assert reasons([window("a")], []) == ["no training job waits for nodes"]


def test_trainings_that_have_all_they_can_use_want_no_more():
    verdict, other = explain([window(*"abc"), window("d")], [trainer(most=2)]).verdicts
    assert len(verdict.used) == 2
    assert verdict.why == other.why == "no training job can use more nodes: at most 2 together"


def test_a_training_that_needs_more_than_is_left_is_named():
    """Another training job may have its nodes."""
    assert reasons([window("a", "b")], [trainer(least=3)]) == ["training job 't' needs at least 3 nodes, 2 are left"]
    (why,) = reasons([window("a", "b")], [trainer(most=1), trainer("big", least=3)])
    assert why == "training job 'big' needs at least 3 nodes, 1 is left; the others have all that they can use"


def test_blocks_that_wait_already_are_the_most_that_may():
    assert reasons([window("a")], [trainer()], pending=4) == ["4 blocks already wait in the queue, the maximum"]
    assert reasons([window("a")], [trainer()], pending=3) == [""]


def test_what_is_wanted_beyond_the_number_of_blocks_waits():
    settings = replace(SETTINGS, max_pending_blocks=2)
    longer, shorter = explain([window("a", lasts=600), window("b")], [trainer()], settings=settings, pending=1).verdicts
    assert longer.used == ("a",)
    assert shorter.why == "2 blocks then wait in the queue, the maximum; longer windows take precedence"


def test_fewer_nodes_than_one_job_must_have_are_told_apart():
    terms = BlockTerms(min_nodes=2)
    assert reasons([window("a")], [trainer()], terms=terms) == ["fewer nodes than the minimum of 2 per job"]
    (why,) = reasons([window("a", "b")], [trainer(most=1)], terms=terms)
    assert why == "1 node of it is wanted, fewer than the minimum of 2 per job"


def test_more_nodes_that_make_nothing_faster_gain_nothing():
    (verdict,) = explain([window("a", "b")], [trainer(curve=FLAT)]).verdicts
    assert len(verdict.used) == 1
    assert verdict.why == "policy 'milp' finds that more nodes would gain nothing"


def test_a_window_that_would_be_used_alone_loses_to_others():
    """The count policy prefers nodes that close last."""
    verdicts = explain([window("a", lasts=900), window("b", lasts=400)], [trainer(curve=FLAT)]).verdicts
    assert [verdict.used for verdict in verdicts] == [("a",), ()]
    assert verdicts[1].why == "policy 'milp' finds other windows worth more"


def test_windows_that_lose_because_few_blocks_may_wait_say_so():
    settings = replace(SETTINGS, max_pending_blocks=1)
    seen = [window("a", lasts=900), window("b", lasts=400)]
    verdict = explain(seen, [trainer(curve=FLAT)], settings=settings).verdicts[1]
    assert verdict.why == "policy 'milp' finds other windows worth more, and only 1 block may wait"


def test_a_start_that_costs_more_than_it_gives_is_not_made():
    (why,) = reasons([window("a", lasts=40)], [trainer(start=1e5)])
    assert why == "policy 'milp' finds that no training job would gain from it"


def test_a_window_smaller_than_any_training_says_so():
    """It would be sufficient together with another window, but the policy did not use both."""
    seen = [window("a", "b", lasts=900), window("c", lasts=400)]
    why = reasons(seen, [trainer(least=2, curve=ScalingCurve({2: 10.0, 3: 10.0}))])[1]
    assert why == "training job 't' needs at least 2 nodes, more than are here"


def test_an_answer_that_was_cut_short_is_doubted():
    (why,) = reasons([window("a")], [trainer()], policy=Hasty())
    assert why.endswith("would gain from it; it reached its time_limit before it could prove this")


def test_a_policy_that_breaks_its_contract_is_named(caplog):
    assert reasons([window("a")], [trainer()], policy=Broken()) == [
        "policy 'broken' gave no valid answer; its error is in the log"
    ]
    assert "invalid allocation" in caplog.text


@given(
    lengths=st.lists(st.one_of(st.none(), st.integers(1, 2000)), max_size=5),
    sizes=st.lists(st.integers(1, 4), min_size=5, max_size=5),
    bounds=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 5)), max_size=3),
    pending=st.integers(0, 5),
    min_nodes=st.integers(1, 3),
    policy=st.sampled_from([MilpPolicy(), EqualSharePolicy(), WindowPolicy()]),
)
def test_every_node_is_requested_or_its_window_has_a_reason(lengths, sizes, bounds, pending, min_nodes, policy):
    """Used nodes are those that the planner requests, and exactly the windows with unused nodes have a reason."""
    windows = [
        window(*(f"n{number}-{index}" for index in range(size)), lasts=length)
        for number, (length, size) in enumerate(zip(lengths, sizes, strict=False))
    ]
    trainers = [trainer(f"t{n}", least=least, most=least + more) for n, (least, more) in enumerate(bounds)]
    terms = BlockTerms(min_nodes=min_nodes)
    found = explain(windows, trainers, policy=policy, terms=terms, pending=pending)
    requested = [name for request in found.plan.requests for name in request.nodes]
    assert sorted(requested) == sorted(name for verdict in found.verdicts for name in verdict.used)
    assert [verdict.window for verdict in found.verdicts] == windows
    for verdict in found.verdicts:
        assert bool(verdict.why) == (len(verdict.used) < len(verdict.window.nodes))


def test_a_block_gains_what_is_trained_between_start_up_and_margin():
    """10 s start-up, 3 s start of the training job, 5 s margin."""
    assert shown([window("a", "b", lasts=118)], [trainer(start=3.0)]) == [[("t", 2, 200.0, 2000.0)]]


def test_a_training_over_several_blocks_slows_down_as_they_end():
    """100 s on three nodes, then 100 s on two."""
    seen = [window("a", "b", lasts=215), window("c", lasts=115)]
    assert shown(seen, [trainer()]) == [[("t", 2, 400.0, 4000.0)], [("t", 1, 100.0, 1000.0)]]


def test_a_job_whose_model_does_not_allow_one_more_node_is_named():
    """Two of three nodes are used: its model runs on 1, 2, 4 or 8."""
    powers = replace(trainer(most=8), allowed_counts=AllowedCounts(divisor_of=8))
    assert reasons([window("a", "b", "c")], [powers]) == [
        "training job 't' has 2 nodes, the next number that its model or the sizes on a node allow is 4, and 1 is left"
    ]
    multiples = replace(trainer(most=8), allowed_counts=AllowedCounts(multiple_of=4))
    assert reasons([window("a", "b")], [multiples]) == ["training job 't' needs at least 4 nodes, 2 are left"]


@pytest.mark.parametrize(
    ("least", "allowed", "size"), [(3, AllowedCounts(), 4), (1, AllowedCounts(6), 12), (9, AllowedCounts(1, 8), 0)]
)
def test_the_least_size_is_allowed_and_divides_nodes(least, allowed, size):
    assert least_size(least, allowed, 4) == size


def test_a_training_left_with_too_few_nodes_gains_nothing_more():
    seen = [window("a", "b", lasts=215), window("c", lasts=115)]
    assert shown(seen, [trainer(least=3)]) == [[("t", 2, 200.0, 2000.0)], [("t", 1, 100.0, 1000.0)]]


def test_no_more_is_gained_than_there_is_to_do():
    assert shown([window("a", lasts=115)], [trainer(work=250.0)]) == [[("t", 1, 25.0, 250.0)]]


def test_samples_are_unknown_where_the_curve_is_relative():
    assert shown([window("a", lasts=115)], [trainer(most=1, curve=ScalingCurve.default())]) == [[("t", 1, 100.0, None)]]


@pytest.mark.parametrize(("step", "node_seconds"), [(1.0, 100.0), (60.0, 45.0)])
def test_walltimes_are_rounded_as_the_planner_rounds_them(step, node_seconds):
    ((share,),) = shown([window("a", lasts=115)], [trainer()], walltime_step=step)
    assert share[2] == node_seconds


def test_windows_of_several_kinds_are_explained_each_by_its_own_trainings_and_terms() -> None:
    kinds = [replace(window("g1", "g2"), node_kind="gpu"), replace(window("c1"), node_kind="cpu")]
    one = replace(trainer(most=2), node_kinds=("gpu",))
    explained = explain_windows(
        kinds, [one], MilpPolicy(), SETTINGS, TERMS, NOW, terms_by_kind={"gpu": BlockTerms(min_nodes=3)}
    )
    assert [verdict.why for verdict in explained.verdicts] == [
        "fewer nodes than the minimum of 3 per job",
        "no training job may run on nodes of kind 'cpu'",
    ]
    explained = explain_windows(kinds, [one], MilpPolicy(), SETTINGS, TERMS, NOW)
    assert [verdict.used for verdict in explained.verdicts] == [("g1", "g2"), ()]
    larger = replace(one, node_kinds=(), min_nodes=2)
    assert explain_windows(kinds, [larger], MilpPolicy(), SETTINGS, TERMS, NOW).verdicts[1].why == (
        "no training job can use more nodes: at most 2 together"
    )


def test_jobs_that_share_a_node_are_planned_in_one_block():
    """Node-seconds are those of their parts of it."""
    explained = explain([window("a", "b")], [trainer("s", most=1), trainer("t", most=2)], slots=4)
    assert [verdict.used for verdict in explained.verdicts] == [("a",)]
    (shares,) = explained.plan.shares
    assert [(share.trainer, share.nodes, share.slots) for share in shares] == [("s", 1, 1), ("t", 1, 2)]
    assert shares[1].node_seconds == 2 * shares[0].node_seconds == 485.0 / 2
    assert shares[1].samples == 2 * shares[0].samples
    assert explained.verdicts[0].why == "no training job can use more accelerators: at most 3 together"
    assert explained.free_slots == ""


def test_slots_that_stay_free_have_a_reason():
    small = [trainer(f"s{number}", most=1) for number in range(3)]
    explained = explain([window("a")], [*small, trainer("big", least=4)], slots=4)
    assert (
        explained.free_slots
        == "1 accelerator of these nodes would be free: training job 'big' needs a whole node, 0 are free"
    )
    (why,) = reasons([window("a")], [trainer("big", least=8, most=8)], slots=4)
    assert why == "training job 'big' needs at least 8 accelerators, 4 are left"


@pytest.mark.parametrize(
    ("free", "waiting", "why"),
    [
        (["n0/0", "n1/3"], {"t": 2, "u": 4}, "training job 't' needs 2 on one node, where at most 1 is free"),
        (["n0/0", "n0/3"], {"t": 2, "u": 4}, ""),
        (["n0/0"], {"t": 1}, ""),
        (["n0/0", "n0/1", "n0/2", "n1/0"], {"u": 4}, "training job 'u' needs a whole node, 0 are free"),
        ([f"n0/{lane}" for lane in range(4)], {"u": 4}, ""),
        ([f"n0/{lane}" for lane in range(4)], {"u": 8}, "training job 'u' needs 2 whole nodes, 1 is free"),
        (["n0/0"], {}, ""),
        ([], {"t": 1}, ""),
    ],
)
def test_why_free_slots_cannot_be_used(free, waiting, why):
    assert why_free(free, waiting, 4) == why
