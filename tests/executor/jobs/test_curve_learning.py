"""Throughput reports become scaling curves for the planner."""

from __future__ import annotations

import pytest

from freetrain_parsl.executor.jobs import curve_learning
from freetrain_parsl.executor.jobs.curve_learning import CurveLearning
from freetrain_parsl.planning import events as planner
from freetrain_parsl.planning.curves.scaling import ScalingCurve
from freetrain_parsl.planning.model import CostsInSeconds, PlannedJob
from freetrain_parsl.protocol.reports import BatchReport, Progress


def trainer(name: str = "t", curve: ScalingCurve | None = None, **changes) -> PlannedJob:
    values = {"min_nodes": 1, "max_nodes": 8, "costs": CostsInSeconds(), "work_left": 1000.0, **changes}
    return PlannedJob(name=name, curve=curve or ScalingCurve.default(), **values)


class Run:
    """A training job that reports at a given rate."""

    def __init__(self, curve: ScalingCurve | None = None, **changes) -> None:
        self.learning = CurveLearning()
        self.submitted = self.learning.completed(planner.TrainerSubmitted(0.0, trainer(curve=curve, **changes)))
        self.samples, self.slot_seconds, self.group = 0, 0.0, 0

    def trains(
        self, nodes: int, rate: float, seconds: float = 10.0, *, slots_per_node: int = 1, reports: int = 2
    ) -> PlannedJob | None:
        """Return what the planner receives last."""
        self.group += 1
        slots, last = nodes * slots_per_node, None
        for _ in range(reports):
            report = Progress(samples=self.samples, slot_seconds=self.slot_seconds)
            events = self.learning.observe(0.0, "t", group=self.group, nodes=nodes, slots=slots, progress=report)
            last = events[0].trainer if events else last
            self.samples += round(rate * seconds)
            self.slot_seconds += seconds * slots
        return last


def rates(found: PlannedJob | None, *nodes: int) -> list[float]:
    assert found is not None
    assert not found.curve.relative
    return [found.curve(count) for count in nodes]


def test_a_training_of_which_nothing_is_known_has_the_default_curve() -> None:
    assert Run().submitted == planner.TrainerSubmitted(0.0, trainer())


def test_the_first_measurement_scales_the_default_curve() -> None:
    assert rates(Run().trains(2, 90.0), 1, 2, 4) == pytest.approx([50.0, 90.0, 162.0])


def test_a_size_that_is_not_worthwhile_is_seen_when_it_is_measured() -> None:
    run = Run()
    run.trains(1, 100.0)
    assert rates(run.trains(2, 90.0), 1, 2, 4) == pytest.approx([100.0, 90.0, 162.0])


def test_a_curve_to_be_learned_begins_on_the_fewest_nodes_and_doubles_while_that_pays() -> None:
    run = Run(ScalingCurve.to_be_learned(), min_nodes=1)
    assert isinstance(run.submitted, planner.TrainerSubmitted)
    assert run.submitted.trainer.max_nodes == 1
    sizes = []
    for nodes, rate in ((1, 100.0), (2, 190.0), (4, 195.0), (8, 190.0)):
        found = run.trains(nodes, rate)
        assert found is not None
        sizes.append((found.max_nodes, rates(found, nodes)))
    assert sizes == [(2, [100.0]), (4, [190.0]), (8, [195.0]), (8, [190.0])]


def test_a_stated_curve_keeps_its_shape_around_what_is_measured() -> None:
    run = Run(ScalingCurve({1: 10.0, 2: 18.0, 4: 30.0}))
    assert rates(run.trains(2, 9.0), 1, 2, 4) == [5.0, 9.0, 15.0]


def test_an_unknown_training_does_not_wait_behind_those_that_are_known() -> None:
    run = Run()
    other = run.learning.completed(planner.TrainerSubmitted(0.0, trainer("other")))
    assert isinstance(other, planner.TrainerSubmitted)
    assert other.trainer.curve(1) == 1.0
    for samples in (0, 1000):
        report = Progress(samples=samples, slot_seconds=samples / 100)
        changed = run.learning.observe(5.0, "t", group=1, nodes=1, slots=1, progress=report)
    assert [(event.trainer.name, event.trainer.curve(1)) for event in changed] == [("t", 100.0), ("other", 100.0)]
    assert [event.trainer.curve.relative for event in changed] == [False, True]
    late = run.learning.completed(planner.TrainerSubmitted(6.0, trainer("late")))
    assert isinstance(late, planner.TrainerSubmitted)
    assert late.trainer.curve(2) == 180.0


def test_slots_of_a_node_train_at_the_same_time() -> None:
    assert rates(Run().trains(1, 100.0, slots_per_node=4), 1) == pytest.approx([100.0])


def test_a_period_that_spans_a_change_of_the_group_is_not_measured() -> None:
    run = Run()
    assert [run.trains(nodes, 100.0, reports=1) for nodes in (1, 2, 1, 4)] == [None] * 4


def test_the_planner_receives_significant_changes_only() -> None:
    run = Run()
    run.trains(1, 100.0, seconds=100.0)
    assert run.trains(1, 101.0, seconds=10.0) is None
    assert rates(run.trains(1, 400.0, seconds=100.0), 1)[0] > 150


def test_later_descriptions_of_the_training_keep_the_measured_curve() -> None:
    run = Run()
    run.trains(1, 100.0)
    costs = CostsInSeconds(up=9.0)
    learned = run.learning.completed(planner.TrainerLearned(1.0, trainer(costs=costs)))
    assert isinstance(learned, planner.TrainerLearned)
    assert (learned.trainer.costs, rates(learned.trainer, 1)) == (costs, pytest.approx([100.0]))
    run.learning.completed(planner.TrainerProgressed(2.0, "t", 7.0))
    withheld = planner.TrainerWithheld(3.0, "t")
    assert run.learning.completed(withheld) is withheld
    again = run.learning.completed(planner.TrainerSubmitted(4.0, trainer()))
    assert isinstance(again, planner.TrainerSubmitted)
    assert rates(again.trainer, 1) == pytest.approx([100.0])


def test_a_new_training_of_the_same_name_is_unknown() -> None:
    run = Run()
    run.trains(1, 100.0)
    run.learning.completed(planner.TrainerFinished(1.0, "t"))
    assert run.trains(1, 100.0) is None
    again = planner.TrainerSubmitted(2.0, trainer())
    assert run.learning.completed(again) == again


def test_a_training_begins_with_what_one_like_it_has_measured_until_its_own_steps_outweigh_that() -> None:
    earlier = Run(ScalingCurve.to_be_learned())
    for nodes, rate in ((1, 100.0), (2, 190.0), (4, 300.0)):
        earlier.trains(nodes, rate)
    rates_before = earlier.learning.measured("t")
    assert rates_before == {"": {1: 100.0, 2: 190.0, 4: 300.0}}
    learning = CurveLearning()
    learning.recall("t", rates_before)
    later = learning.completed(planner.TrainerSubmitted(0.0, trainer(curve=ScalingCurve.to_be_learned())))
    assert isinstance(later, planner.TrainerSubmitted)
    assert rates(later.trainer, 1, 2, 4) == [100.0, 190.0, 300.0]
    assert later.trainer.max_nodes == 8
    run = Run()
    run.learning = learning
    found = run.trains(2, 380.0, seconds=1000.0)
    assert rates(found, 1, 2)[1] == pytest.approx(380.0, rel=0.01)


@pytest.mark.parametrize("kept", [{1: 10.0, 2: 19.0, 4: 36.0}, {1: 1e6, 2: 1.0}, {1: 1e-6, 8: 1e-6}])
@pytest.mark.parametrize("curve", [None, ScalingCurve.to_be_learned()], ids=["default", "to be learned"])
def test_wrong_rates_are_forgotten_when_a_measurement_contradicts_them(kept, curve) -> None:
    """Otherwise they would exclude numbers of nodes, which would then never be measured."""
    run, unbiased = Run(curve), Run(curve)
    run.learning = CurveLearning()
    run.learning.recall("t", {"": kept})
    run.learning.completed(planner.TrainerSubmitted(0.0, trainer(curve=curve)))
    assert run.trains(1, 100.0, reports=4) == unbiased.trains(1, 100.0, reports=4)
    assert run.learning.measured("t") == {"": {1: 100.0}}


def test_rates_are_not_forgotten_for_a_short_disturbance() -> None:
    run = Run()
    run.learning = CurveLearning()
    run.learning.recall("t", {"": {1: 100.0, 2: 190.0}})
    run.learning.completed(planner.TrainerSubmitted(0.0, trainer()))
    assert rates(run.trains(1, 10.0, seconds=1.0), 2) == [190.0]


def test_rates_of_kinds_of_nodes_that_there_are_no_more_are_not_used() -> None:
    learning = CurveLearning()
    learning.recall("t", {"gpu": {1: 100.0}})
    assert learning.completed(planner.TrainerSubmitted(0.0, trainer())) == planner.TrainerSubmitted(0.0, trainer())


def test_rates_of_an_elastic_batch_are_not_kept() -> None:
    run = ElasticRun()
    run.settle(1)
    assert run.learning.measured("t") == {}


class ElasticRun:
    """A training job with elastic batches: a step takes 10 ms, and 0.1 ms for each sample on a node."""

    def __init__(self, noise_scale: float = 1000.0, **changes) -> None:
        self.learning = CurveLearning()
        self.learning.completed(planner.TrainerSubmitted(0.0, trainer(**changes)))
        self.batch, self.noise = 32, noise_scale
        self.step = self.samples = 0
        self.seconds = 0.0

    def report(self, nodes: int, steps: int = 50, group: int = 1) -> list[planner.TrainerLearned]:
        self.step, self.samples = self.step + steps, self.samples + steps * self.batch
        self.seconds += steps * (0.01 + 1e-4 * self.batch / nodes) * nodes
        batch = BatchReport(self.batch, 32, 16, 512, 1.0, self.noise)
        progress = Progress(step=self.step, samples=self.samples, slot_seconds=self.seconds, batch=batch)
        return self.learning.observe(0.0, "t", group=group, nodes=nodes, slots=nodes, progress=progress)

    def settle(self, nodes: int, group: int = 1) -> planner.TrainerLearned | None:
        """Train until the batch no longer changes; return what the planner receives last."""
        last = None
        for _ in range(40):
            last = next(iter(self.report(nodes, group=group)), last)
            self.batch = self.learning.next_batch("t", nodes) or self.batch
        return last


def test_an_elastic_batch_grows_and_the_planner_gets_the_goodput() -> None:
    run = ElasticRun()
    found = run.settle(1)
    assert run.batch > 128
    assert found is not None
    efficiency = 1032 / (1000 + run.batch)
    assert found.trainer.curve(1) == pytest.approx(run.batch / (0.01 + 1e-4 * run.batch) * efficiency, rel=0.1)


def test_a_batch_without_noise_stays_as_it_is() -> None:
    run = ElasticRun(noise_scale=1.0)
    run.settle(1)
    assert run.batch <= 32


def test_the_work_left_is_counted_in_the_samples_of_the_curve() -> None:
    """Otherwise a job of fixed epochs would seem to take longer in larger batches, which are less efficient."""
    run = ElasticRun()
    found = run.settle(1)
    assert found is not None
    event = run.learning.completed(planner.TrainerProgressed(0.0, "t", 10_000.0))
    assert isinstance(event, planner.TrainerProgressed)
    seconds = 10_000 / (run.batch / (0.01 + 1e-4 * run.batch))
    assert event.work_left / found.trainer.curve(1) == pytest.approx(seconds, rel=0.1)


def test_a_period_in_which_the_batch_changed_is_not_measured() -> None:
    run = ElasticRun()
    run.report(1)
    run.batch = 64
    run.report(1)
    assert run.learning.next_batch("t", 1) is None
    run.report(1)
    assert run.learning.next_batch("t", 1) is not None


def test_a_training_with_a_fixed_batch_is_told_nothing() -> None:
    run = Run()
    run.trains(1, 100.0)
    assert run.learning.next_batch("t", 1) is None
    assert run.learning.next_batch("unknown", 1) is None


def test_a_new_training_is_compared_with_what_is_known_not_with_each_other_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With ten thousand, submitting them all would take minutes."""
    seen: list[ScalingCurve] = []
    best = curve_learning.best_rate_per_node
    monkeypatch.setattr(
        curve_learning, "best_rate_per_node", lambda curves: best([seen.append(one) or one for one in curves])
    )
    learning = CurveLearning()
    for number in range(100):
        stated = ScalingCurve({1: 100.0 + number}) if number < 2 else None
        learning.completed(planner.TrainerSubmitted(0.0, trainer(f"t{number}", stated)))
    assert learning.best_rate() == 101.0
    learning.completed(planner.TrainerFinished(1.0, "t1"))
    assert learning.best_rate() == 100.0
    learning.completed(planner.TrainerFinished(1.0, "t0"))
    assert learning.best_rate() == 1.0
    assert len(seen) == 2
