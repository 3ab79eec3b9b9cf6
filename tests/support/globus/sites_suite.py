"""The contract of a planner over sites, as a pytest class to subclass.

::

    from tests.support.globus.sites_suite import SitesConformance

    class TestMyPlanner(SitesConformance):
        def make_planner(self):
            return my_planner
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from freetrain_parsl.extensions.globus.sites.planning.model import (
    Offer,
    SitesQuestion,
    SiteTraining,
    SiteView,
    TransferRate,
    Verb,
)
from freetrain_parsl.planning.curves.scaling import ScalingCurve
from freetrain_parsl.planning.model import CostsInSeconds, PlannedJob
from tests.support.globus.random_sites import random_sites

if TYPE_CHECKING:
    from freetrain_parsl.extensions.globus.sites.planning.model import SitePlan, SitesPlanner

__all__ = ["SitesConformance"]

_SEEDS = range(25)
_RATES = {pair: TransferRate(1e8, 10.0) for pair in (("a", "b"), ("b", "a"), ("archive", "a"), ("archive", "b"))}


def _training(name: str = "t", *, most: int = 8, start: float = 30.0) -> SiteTraining:
    """Make a training job with a linear curve and a state of 1 GB, which takes 20 s from one site to another."""
    curve = ScalingCurve({1: 10.0, 8: 80.0})
    return SiteTraining(PlannedJob(name, 1, most, curve, CostsInSeconds(start=start)), state_bytes=1e9)


def _at(training: SiteTraining, site: str, nodes: int, lease_until: float = math.inf) -> SiteTraining:
    return replace(training, site=site, nodes=nodes, checkpoints=frozenset({site}), lease_until=lease_until)


def _question(
    offers: dict[str, float], *trainings: SiteTraining, silent: tuple[str, ...] = (), now: float = 1000.0
) -> SitesQuestion:
    views = tuple(SiteView(name, (Offer(nodes),), name not in silent) for name, nodes in offers.items())
    return SitesQuestion(now, 600.0, views, trainings, _RATES)


class SitesConformance(ABC):
    """Properties of every planner over sites, whatever it maximises."""

    @abstractmethod
    def make_planner(self) -> SitesPlanner:
        """Make a new planner; two must return the same plans."""

    def _only(self, question: SitesQuestion) -> tuple[Verb, str | None]:
        (choice,) = self.make_planner()(question).choices
        return choice.verb, choice.site

    # Feasible and deterministic.

    @pytest.mark.parametrize("seed", _SEEDS)
    def test_every_training_has_one_choice(self, seed: int) -> None:
        """No training job is at two sites, and none is forgotten."""
        question = random_sites(seed)
        plan = self.make_planner()(question)
        assert sorted(choice.training for choice in plan.choices) == sorted(one.name for one in question.trainings)
        assert {choice.site for choice in plan.choices} <= {None, *(view.name for view in question.sites)}

    @pytest.mark.parametrize("seed", _SEEDS)
    def test_no_site_is_overbooked(self, seed: int) -> None:
        """The nodes expected at an answering site are at most those that it offers; each count is within bounds."""
        question = random_sites(seed)
        plan = self.make_planner()(question)
        trainings = {one.name: one for one in question.trainings}
        for view in question.sites:
            counts = [choice.nodes for choice in plan.choices if choice.site == view.name]
            assert not view.answers or sum(counts) <= view.mean_nodes(question.horizon) + 1e-9
        for choice in plan.choices:
            trainer = trainings[choice.training].trainer
            leased = choice.site == trainings[choice.training].site
            assert leased or choice.nodes == 0 or trainer.min_nodes <= choice.nodes <= trainer.max_nodes

    @pytest.mark.parametrize("seed", _SEEDS)
    def test_verbs_say_what_changes(self, seed: int) -> None:
        """Who stays is where it was; who moves or starts is somewhere else; what is transferred comes from a holder."""
        question = random_sites(seed)
        trainings = {one.name: one for one in question.trainings}
        for choice in self.make_planner()(question).choices:
            before = trainings[choice.training]
            assert choice.reason
            if choice.verb is Verb.STAY:
                assert choice.site == before.site
            if choice.verb in (Verb.MOVE, Verb.START):
                assert choice.site not in (None, before.site)
            if choice.source is not None:
                assert choice.source in before.checkpoints | {before.site}
                assert (choice.source, choice.site) in question.transfers
                assert choice.transfer_bytes == before.state_bytes

    @pytest.mark.parametrize("seed", _SEEDS)
    def test_same_question_same_answer(self, seed: int) -> None:
        """Neither earlier calls nor the order of sites and training jobs change a plan."""
        question, used = random_sites(seed), self.make_planner()
        used(random_sites(seed + len(_SEEDS)))
        turned = replace(question, sites=question.sites[::-1], trainings=question.trainings[::-1])
        answer = self._essence(self.make_planner()(question))
        assert self._essence(used(question)) == answer
        assert self._essence(used(turned)) == answer

    @staticmethod
    def _essence(plan: SitePlan) -> set[tuple[str, Verb, str | None, int]]:
        return {(choice.training, choice.verb, choice.site, choice.nodes) for choice in plan.choices}

    @pytest.mark.parametrize("seed", _SEEDS)
    def test_bound_is_consistent(self, seed: int) -> None:
        """The objective is a number and does not exceed its bound."""
        plan = self.make_planner()(random_sites(seed))
        slack = 1e-6 * max(1.0, abs(plan.objective))
        assert math.isfinite(plan.objective)
        assert plan.bound >= plan.objective - slack
        assert not plan.proven_optimal or plan.bound <= plan.objective + slack

    # Hysteresis.

    def test_equal_sites_are_no_reason_to_move(self) -> None:
        """Even if a move costs nothing."""
        training = replace(_at(_training(start=0.0), "a", 4), state_bytes=0.0)
        assert self._only(_question({"a": 4, "b": 4}, training)) == (Verb.STAY, "a")

    @pytest.mark.parametrize("start", [0.0, 30.0, 200.0])
    def test_a_gain_below_the_cost_of_a_move_is_no_reason_to_move(self, start: float) -> None:
        """Between two sites whose nodes take turns in being slightly more, nothing moves."""
        cost = (20 + start) * 8  # at the rate of 8 nodes
        extra = math.floor(cost / 600)  # nodes whose value in 600 s is below it
        training = _training(most=16, start=start)
        for site, other in (("a", "b"), ("b", "a")):
            held = _at(training, site, 8)
            assert self._only(_question({site: 8, other: 8 + extra}, held)) == (Verb.STAY, site)

    def test_a_large_gain_is_a_reason_to_move(self) -> None:
        """A site that is left without nodes loses its training job to one with nodes."""
        training = _at(_training(), "a", 1)
        assert self._only(_question({"a": 1, "b": 8}, training)) == (Verb.MOVE, "b")

    def test_a_plan_that_was_carried_out_is_kept(self) -> None:
        """The same situation with training jobs at the sites and on the nodes of the plan has no moves."""
        trainings = [_training(f"t{index}", most=6) for index in range(4)]
        plan = self.make_planner()(_question({"a": 9, "b": 7}, *trainings))
        placed = [
            _at(one, choice.site, choice.nodes)
            for one, choice in zip(trainings, sorted(plan.choices, key=lambda choice: choice.training), strict=True)
            if choice.site is not None
        ]
        again = self.make_planner()(_question({"a": 9, "b": 7}, *placed))
        assert {choice.verb for choice in again.choices} == {Verb.STAY}

    def test_a_transfer_that_takes_until_the_next_look_is_not_begun(self) -> None:
        """It could gain nothing."""
        training = replace(_at(_training(), "a", 1), state_bytes=1e8 * 600)
        assert self._only(_question({"a": 1, "b": 8}, training)) == (Verb.STAY, "a")

    def test_state_on_its_way_is_awaited(self) -> None:
        """A training job goes where its state is being transferred to."""
        training = replace(_at(_training(), "b", 0), checkpoints=frozenset({"a"}), arrives=1100.0)
        assert self._only(_question({"a": 8, "b": 2}, training)) == (Verb.STAY, "b")

    # Leases and silent sites.

    def test_a_silent_site_keeps_its_trainings_until_the_lease_ends(self) -> None:
        """However good another site is."""
        training = _at(_training(), "a", 1, lease_until=1000.5)
        assert self._only(_question({"a": 1, "b": 8}, training, silent=("a",))) == (Verb.STAY, "a")

    def test_after_the_lease_a_training_goes_on_from_a_whole_checkpoint(self) -> None:
        """From the collection that has one, which need not be that of a site."""
        training = replace(_at(_training(), "a", 4, lease_until=1000.0), checkpoints=frozenset({"archive"}))
        (choice,) = self.make_planner()(_question({"a": 8, "b": 8}, training, silent=("a",))).choices
        assert (choice.verb, choice.site, choice.source) == (Verb.MOVE, "b", "archive")

    def test_a_silent_site_gets_no_trainings(self) -> None:
        """Neither new ones nor those of others."""
        trainings = _training("x"), _at(_training("y"), "b", 1)
        plan = self.make_planner()(_question({"a": 8, "b": 1}, *trainings, silent=("a",)))
        assert {choice.site for choice in plan.choices} == {"b"}

    def test_if_no_site_answers_everything_waits(self) -> None:
        """A training job without an owner has no site then."""
        assert self._only(_question({"a": 8, "b": 8}, _training(), silent=("a", "b"))) == (Verb.WAIT, None)

    def test_state_that_cannot_be_transferred_waits(self) -> None:
        """Nothing starts from the beginning because its checkpoint is out of reach."""
        training = replace(_training(), checkpoints=frozenset({"elsewhere"}))
        assert self._only(_question({"a": 8, "b": 8}, training)) == (Verb.WAIT, None)

    def test_without_a_checkpoint_everything_is_queued_somewhere(self) -> None:
        """A training job that gets no nodes may use some that become idle before the next look."""
        plan = self.make_planner()(_question({"a": 0, "b": 0}, _training("x"), _training("y")))
        assert {choice.site for choice in plan.choices} == {"a", "b"}
        assert {choice.verb for choice in plan.choices} == {Verb.WAIT}

    def test_no_trainings_no_choices(self) -> None:
        """An empty question has an empty plan."""
        assert self.make_planner()(_question({"a": 8})).choices == ()
