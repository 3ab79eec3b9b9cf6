"""The replay of several sites: equal to that of one site, and exact where training jobs move."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetrain_parsl.extensions.globus.sites.planning.model import (
    SiteChoice,
    SitePlan,
    SitesSettings,
    TransferRate,
    Verb,
)
from freetrain_parsl.extensions.globus.sites.planning.planner import plan_sites
from freetrain_parsl.extensions.replay.comparison import Contestant
from freetrain_parsl.extensions.replay.ideal import BestRates
from freetrain_parsl.extensions.replay.simulation import Cost, Knowledge, ReplaySettings, replay
from freetrain_parsl.extensions.replay.sites.comparison import SiteTerms, compare_sites
from freetrain_parsl.extensions.replay.sites.federation import FederationOutcome, replay_sites
from freetrain_parsl.extensions.replay.sites.logs import SiteLog, same_length
from freetrain_parsl.extensions.replay.trainers import TrainerSet
from freetrain_parsl.planning.curves.scaling import ScalingCurve
from freetrain_parsl.planning.model import CostsInSeconds, PlannedJob
from freetrain_parsl.planning.objectives.base import OBJECTIVES
from freetrain_parsl.planning.policies import MilpPolicy
from tests.extensions.replay.small_logs import SmallLog, random_logs, random_trainers

FULL = ReplaySettings(cost=Cost.FULL, start_seconds=2.0)
RATES = {("a", "b"): TransferRate(100.0, 1.0), ("b", "a"): TransferRate(50.0, 1.0)}


def _together(logs, trainers, planner=plan_sites, *, look=7.0, size=200.0, options=FULL) -> FederationOutcome:
    sites = [SiteLog(name, log) for name, log in zip("ab", logs, strict=False)]
    return replay_sites(
        same_length(sites),
        BestRates(trainers, OBJECTIVES["throughput"]),
        lambda: MilpPolicy("throughput"),
        options,
        planner,
        look=look,
        transfers=RATES,
        state_bytes={trainer.name: size for trainer in trainers},
    )


@settings(max_examples=20, deadline=None)
@given(log=random_logs(), trainers=random_trainers(), knowledge=st.sampled_from(Knowledge))
def test_with_one_site_it_is_the_replay_of_that_site(log, trainers, knowledge):
    """Bit for bit, with looks at any time."""
    options = replace(FULL, knowledge=knowledge)
    alone = replay(log, BestRates(trainers, OBJECTIVES["throughput"]), MilpPolicy("throughput"), options)
    (outcome,) = _together([log], trainers, options=options).sites.values()
    assert outcome.value == alone.value
    assert outcome.losses == alone.losses
    assert (outcome.events, outcome.used_seconds) == (alone.events, alone.used_seconds)
    submitted = [account for account in alone.accounts if account.submitted < log.end]
    assert {one.trainer.name: one for one in outcome.accounts} == {one.trainer.name: one for one in submitted}


def _restless(question) -> SitePlan:
    """Move every training job to the other site at every look."""
    choices = []
    for one in question.trainings:
        site = "b" if one.site == "a" else "a"
        in_transit = one.arrives > question.now
        source = next(iter(one.checkpoints), None)
        moved = source not in (None, site) and not in_transit
        rate = question.transfers[source, site] if moved else None
        choices.append(
            SiteChoice(
                one.name,
                Verb.STAY if in_transit else Verb.MOVE,
                one.site if in_transit else site,
                0,
                0.0,
                "always",
                source if moved else None,
                rate.seconds(one.state_bytes) if rate else 0.0,
                one.state_bytes if moved else 0.0,
            )
        )
    return SitePlan(tuple(choices), 0.0, 0.0, proven_optimal=True)


@settings(max_examples=20, deadline=None)
@given(
    logs=st.tuples(random_logs(), random_logs()),
    trainers=random_trainers(),
    planner=st.sampled_from([_restless, plan_sites, partial(plan_sites, settings=SitesSettings(hysteresis=0.0))]),
)
def test_no_move_loses_or_repeats_a_sample(logs, trainers, planner):
    outcome = _together(logs, trainers, planner)
    assert outcome.audit() == (0.0, 0.0)
    for name, stints in outcome.stints.items():
        for before, after in pairwise(stints):
            assert before.left == after.came, f"{name} was at two sites, or at none"
            assert after.account.node_seconds == 0 or after.account.started >= after.account.submitted
        assert all(math.isfinite(stint.left) for stint in stints[:-1])
    used = sum(site.used_seconds for site in outcome.sites.values())
    held = sum(stint.account.node_seconds for stints in outcome.stints.values() for stint in stints)
    assert held == pytest.approx(used)


def test_the_audit_finds_gaps_and_overlaps():
    outcome = _together([_always(60.0), _always(60.0)], (_trainer(),), _restless)
    stints = outcome.stints["t"]
    assert len(stints) > 3
    stints[1].first += 5.0
    stints[2].first -= 3.0
    lost, twice = outcome.audit()
    assert (lost, twice) == (pytest.approx(5.0 + 3.0), pytest.approx(5.0 + 3.0))


def _always(end: float, nodes: int = 2) -> SmallLog:
    return SmallLog([(f"n{number}", 0.0, end) for number in range(nodes)])


def _trainer(**more) -> PlannedJob:
    return PlannedJob("t", 1, 4, ScalingCurve({1: 10.0, 4: 40.0}), CostsInSeconds(1.0, 1.0, 2.0), **more)


def test_a_training_follows_the_holes():
    """When the nodes of a close, those of b open: it goes there, and its pause is what the transfer takes."""
    first = SmallLog([("x", 0.0, 100.0), ("y", 0.0, 100.0), ("z", 0.0, 1.0)], 0.0, 1000.0)
    second = SmallLog([("x", 100.0, 1000.0), ("y", 100.0, 1000.0)], 0.0, 1000.0)
    outcome = _together([first, second], (_trainer(),), look=50.0, size=900.0)
    assert [(stint.site, stint.came) for stint in outcome.stints["t"]] == [("a", 0.0), ("b", 100.0)]
    (move,) = outcome.moves
    assert (move.source, move.target, move.seconds, move.size) == ("a", "b", 10.0, 900.0)
    never = partial(plan_sites, settings=SitesSettings(hysteresis=1e9))
    apart = _together([first, second], (_trainer(),), never, look=50.0)
    assert outcome.value > 5 * apart.value
    assert not apart.moves


def test_transfers_on_a_link_follow_one_another():
    trainers = (_trainer(), replace(_trainer(), name="u"))
    outcome = _together([_always(40.0), _always(40.0)], trainers, _restless, look=20.0)
    moves = [move for move in outcome.moves if move.time == 20.0]
    assert [move.seconds for move in moves] == [3.0, 6.0] or len(moves) < 2


def test_a_training_that_ends_at_a_look_is_not_taken_away():
    """It starts in 2 s and has 20 samples a second on two nodes: it ends at the second look."""
    outcome = _together([_always(60.0), _always(60.0)], (_trainer(work_left=120.0),), _restless, look=8.0)
    assert [stint.site for stint in outcome.stints["t"]] == ["a"]
    assert outcome.times_to_finish() == [8.0]
    assert outcome.audit() == (0.0, 0.0)


def test_a_finished_training_is_not_looked_at_again():
    outcome = _together([_always(200.0), _always(200.0)], (_trainer(work_left=400.0),), _restless, look=9.0)
    assert outcome.times_to_finish()
    assert outcome.audit() == (0.0, 0.0)
    assert sum(stint.account.samples for stint in outcome.stints["t"]) == pytest.approx(400.0)


@pytest.mark.parametrize(("closes", "loss"), [(75.0, "5.4 %"), (95.0, None)])
def test_moves_that_have_cost_more_than_they_have_gained_are_noted_with_the_figure(closes, loss):
    """Site b has four nodes for 15 or 35 seconds, which nobody can foresee at the look at which they open."""
    sites = [
        SiteLog("a", SmallLog([("n0", 0.0, 600.0)], 0.0, 600.0)),
        SiteLog("b", SmallLog([(f"m{number}", 60.0, closes) for number in range(4)], 0.0, 600.0)),
    ]
    trainer = PlannedJob("t", 1, 4, ScalingCurve({1: 1.0, 2: 2.0, 4: 4.0}), CostsInSeconds(1.0, 1.0, 2.0))
    terms = SiteTerms(SitesSettings(look=timedelta(seconds=60)), RATES, 200.0)
    contestant = Contestant("milp", objective="throughput")
    result = compare_sites(sites, TrainerSet("one", (trainer,), "throughput"), contestant, FULL, terms)
    value = {way["way"]: way["value"] for way in result["ways"]}
    assert (value["together"] < value["apart"]) == (loss is not None)
    assert [note.partition(" less")[0] for note in result["notes"]] == (
        [f"with moves the sites do {loss}"] if loss else []
    )
