"""The planner over sites: its contract, and its optimum against enumeration."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetrain_parsl.errors import InvalidSettings, PlanningError
from freetrain_parsl.executor.jobs.size import Size
from freetrain_parsl.extensions.globus.sites.planning.model import (
    Offer,
    SitesPlanner,
    SitesQuestion,
    SitesSettings,
    SiteTraining,
    SiteView,
    TransferRate,
    Verb,
    in_common_units,
    offers_of_plan,
)
from freetrain_parsl.extensions.globus.sites.planning.planner import plan_sites
from freetrain_parsl.planning.curves.scaling import ScalingCurve
from freetrain_parsl.planning.model import CostsInSeconds, PlannedJob
from freetrain_parsl.planning.objectives.base import OBJECTIVES
from tests.support.globus.random_sites import best_site_value, random_sites, site_value
from tests.support.globus.sites_suite import SitesConformance


class TestPlanSites(SitesConformance):
    def make_planner(self) -> SitesPlanner:
        return plan_sites


class TestPlanSitesForSamples(SitesConformance):
    def make_planner(self) -> SitesPlanner:
        return partial(plan_sites, settings=SitesSettings(hysteresis=0.0), objective=OBJECTIVES["throughput"])


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), hysteresis=st.sampled_from([0.0, 0.5, 3.0]))
def test_a_plan_is_worth_as_much_as_the_best_of_all(seed, hysteresis):
    question = random_sites(seed)
    plan = plan_sites(question, SitesSettings(hysteresis=hysteresis))
    answering = {view.name for view in question.sites if view.answers}
    trainings = {one.name: one for one in question.trainings}
    total = sum(
        site_value(question, one, choice.site, choice.nodes, hysteresis)
        for choice in plan.choices
        if (one := trainings[choice.training]).site is None or one.site in answering or one.lease_until <= question.now
    )
    assert plan.proven_optimal
    assert total == pytest.approx(best_site_value(question, hysteresis), rel=1e-7, abs=1e-7)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_the_value_of_a_choice_is_that_of_its_formula(seed):
    """Without the hysteresis, which is charged but not lost."""
    question = random_sites(seed)
    trainings = {one.name: one for one in question.trainings}
    answering = {view.name for view in question.sites if view.answers}
    for choice in plan_sites(question).choices:
        one = trainings[choice.training]
        leased = one.site is not None and one.site not in answering and one.lease_until > question.now
        moved = choice.site != one.site and one.site in answering
        if not leased and not moved:
            assert choice.value == pytest.approx(site_value(question, one, choice.site, choice.nodes))


def _trainer(name: str, most: int = 8, **more: object) -> PlannedJob:
    return PlannedJob(name, 1, most, ScalingCurve({1: 10.0, 8: 80.0}), **more)  # type: ignore[arg-type]


def test_a_training_that_is_almost_done_is_not_moved():
    question = SitesQuestion(
        0.0,
        600.0,
        (SiteView("a", (Offer(1),)), SiteView("b", (Offer(8),))),
        (SiteTraining(_trainer("t", work_left=400.0), 1e9, frozenset({"a"}), "a", 1, math.inf),),
        {("a", "b"): TransferRate(1e8)},
    )
    assert plan_sites(question).choices[0].verb is Verb.STAY
    endless = replace(question.trainings[0], trainer=_trainer("t"))
    assert plan_sites(replace(question, trainings=(endless,))).choices[0].verb is Verb.MOVE


def test_a_move_is_charged_the_start_at_its_site_and_the_reason_says_so():
    question = SitesQuestion(
        0.0,
        600.0,
        (SiteView("a", (Offer(4),)), SiteView("b", (Offer(8),), start=60.0)),
        (SiteTraining(_trainer("t"), 1e9, frozenset({"a"}), "a", 4, math.inf),),
        {("a", "b"): TransferRate(1e8)},
    )
    (choice,) = plan_sites(question).choices
    assert (choice.verb, choice.site) == (Verb.MOVE, "b")
    assert choice.reason.endswith("1,000 MB from a take 10 s; a start there takes 60 s")
    slow = replace(question, sites=(question.sites[0], replace(question.sites[1], start=200.0)))
    assert plan_sites(slow).choices[0].verb is Verb.STAY, "8 nodes for 390 s less half of 210 s, and 4 for 600 s"


def sized(name, slots, units):
    least, most = Size(min_accelerators=1, max_accelerators=8).in_units(name, slots, units)
    return PlannedJob(name, least, most, ScalingCurve({1: 1.0}), CostsInSeconds())


def test_training_jobs_that_share_a_node_stay_on_it():
    """Sites state nodes, and training jobs there hold slots; counted alike, three of four would have no room."""
    jobs = tuple(SiteTraining(sized(f"t{i}", 4, 4), site="a", nodes=1, state_bytes=1.0) for i in range(4))
    sites = (SiteView("a", (Offer(1),), slots_per_node=4, units_per_node=4), SiteView("b", (Offer(3),)))
    alike = (sites[0], replace(sites[1], slots_per_node=4, units_per_node=4))
    there = {("a", "b"): TransferRate(1.0, 5.0)}
    in_slots = in_common_units(SitesQuestion(0.0, 600.0, alike, jobs, there), sized)
    assert [site.offers[0].nodes for site in in_slots.sites] == [4, 12]
    assert {(one.trainer.min_nodes, one.trainer.max_nodes, one.nodes) for one in in_slots.trainings} == {(1, 8, 1)}
    stays = plan_sites(replace(in_slots, sites=(in_slots.sites[0], replace(in_slots.sites[1], offers=()))))
    assert {(one.verb, one.site, one.nodes) for one in stays.choices} == {(Verb.STAY, "a", 1)}
    assert stays.choices[0].reason == "1 of 4.0 slots expected at a"


def test_sites_with_different_nodes_are_compared_in_whole_nodes():
    job = SiteTraining(replace(sized("t", 4, 4), work_left=7.0), site="a", nodes=8)
    small = SiteTraining(sized("s", 4, 4), site="a", nodes=2)
    sites = (
        SiteView("a", (Offer(3),), slots_per_node=4, units_per_node=4),
        SiteView("b", (Offer(3),), slots_per_node=12, units_per_node=12),
        SiteView("silent", answers=False),
    )
    question = in_common_units(SitesQuestion(0.0, 600.0, sites, (job, small)), sized)
    assert [one.nodes for one in question.trainings] == [2, 1]
    assert question.trainings[0].trainer.max_nodes == 2
    assert question.trainings[0].trainer.work_left == 7.0
    assert [site.offers for site in question.sites] == [site.offers for site in sites]


def test_windows_that_close_before_the_next_look_count_in_part():
    view = SiteView("a", (Offer(4, 300.0), Offer(2)))
    assert view.mean_nodes(600.0) == 4.0
    assert replace(view, answers=False).mean_nodes(600.0) == 0.0


def test_the_fastest_of_several_checkpoints_is_taken_and_the_reason_says_so():
    training = SiteTraining(_trainer("t"), 1e9, frozenset({"slow", "fast"}))
    rates = {("slow", "a"): TransferRate(1e7), ("fast", "a"): TransferRate(1e8, 5.0)}
    question = SitesQuestion(0.0, 600.0, (SiteView("a", (Offer(3),)),), (training,), rates)
    (choice,) = plan_sites(question).choices
    assert (choice.verb, choice.source, choice.transfer_seconds) == (Verb.START, "fast", 15.0)
    assert choice.reason == "3 of 3.0 nodes expected at a; 1,000 MB from fast take 15 s"


def test_a_time_limit_that_is_reached_still_gives_a_plan():
    """The plan in force is the first candidate; optimality is not claimed."""
    rates = {("a", "b"): TransferRate(1e8), ("b", "a"): TransferRate(1e8)}
    bumpy = ScalingCurve({n: n * (1.0 + 0.3 * (n % 3)) for n in range(1, 41)})
    trainings = tuple(
        SiteTraining(
            PlannedJob(f"t{index:02}", 1 + index % 3, 40, bumpy, CostsInSeconds(18 + index, 12, 30), submitted=index),
            1e9,
            frozenset("ab"[index % 2]),
            "ab"[index % 2],
            5,
        )
        for index in range(24)
    )
    question = SitesQuestion(0.0, 600.0, (SiteView("a", (Offer(60),)), SiteView("b", (Offer(75),))), trainings, rates)
    plan = plan_sites(question, SitesSettings(time_limit=SitesSettings().time_limit / 1e5))
    assert not plan.proven_optimal
    assert plan.objective > 0
    assert sum(choice.nodes for choice in plan.choices if choice.site == "a") <= 60


def test_what_freetrain_plan_prints_becomes_offers():
    text = '{"blocks": [{"nodes": 4, "walltime": 1200.0, "trainings": []}, {"nodes": 1, "walltime": 90}], "notes": []}'
    assert offers_of_plan(json.loads(text)) == (Offer(4, 1200.0), Offer(1, 90.0))


@pytest.mark.parametrize("figures", [{}, {"blocks": 3}, {"blocks": [{"nodes": 3}]}, {"blocks": ["x"]}])
def test_anything_else_is_no_plan(figures):
    with pytest.raises(PlanningError, match="not a plan as 'freetrain plan --json' prints it"):
        offers_of_plan(figures)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Offer(-1), "zero or more nodes"),
        (lambda: Offer(math.nan), "zero or more nodes"),
        (lambda: Offer(1, math.nan), "zero or more nodes"),
        (lambda: TransferRate(0.0), "must be positive"),
        (lambda: TransferRate(1.0, math.inf), "latency"),
        (lambda: SiteTraining(_trainer("t"), math.inf), "zero or more bytes"),
        (lambda: SiteTraining(_trainer("t"), nodes=2), "impossible"),
        (lambda: SitesQuestion(0.0, 0.0, (), ()), "positive horizon"),
        (lambda: SitesQuestion(0.0, 1.0, (SiteView("a"), SiteView("a")), ()), "two sites have the same name 'a'"),
        (lambda: SitesQuestion(0.0, 1.0, (), (SiteTraining(_trainer("t"), site="x"),)), "unknown site 'x'"),
    ],
)
def test_impossible_situations_are_refused(make, message):
    with pytest.raises(PlanningError, match=message):
        make()


def test_settings_out_of_range_are_refused():
    with pytest.raises(InvalidSettings, match="hysteresis"):
        SitesSettings(hysteresis=-1.0)
    with pytest.raises(InvalidSettings, match="look must be a timedelta"):
        SitesSettings(look=600)  # type: ignore[arg-type]
