"""The learning rate follows the batch size."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import optim

from freetrain_parsl.errors import UsageError
from freetrain_parsl.training.data.loader_options import chosen_lr_scaling
from freetrain_parsl.training.fragment import run_local
from freetrain_parsl.training.step.elastic_batch import ElasticBatch
from freetrain_parsl.training.step.learning_rate import RateScaling, check_schedulers


def optimizer(kind: Any = optim.SGD, **options: Any) -> Any:
    return kind([torch.zeros(1, requires_grad=True)], lr=0.1, **options)


def rate(rule: Any, kind: Any = optim.SGD, scale: float = 4.0, gain: Any = None) -> float:
    """Return the rate at a batch `scale` times the initial one, after the ramp."""
    scaling = RateScaling(rule, 1, *([gain] if gain else []))
    scaling.aim(scale)
    one = optimizer(kind)
    with scaling.applied([one]):
        return float(one.param_groups[0]["lr"])


@pytest.mark.parametrize(
    ("rule", "kind", "factor"),
    [
        ("auto", optim.SGD, 4.0),
        ("auto", optim.ASGD, 4.0),
        ("auto", optim.Adam, 2.0),
        ("auto", optim.AdamW, 2.0),
        ("auto", optim.RMSprop, 2.0),
        ("linear", optim.AdamW, 4.0),
        ("sqrt", optim.SGD, 2.0),
        ("none", optim.SGD, 1.0),
        (lambda scale: scale**0.25, optim.SGD, math.sqrt(2.0)),
    ],
)
def test_each_rule_has_its_factor(rule: Any, kind: Any, factor: float) -> None:
    assert rate(rule, kind) == pytest.approx(0.1 * factor)


def test_optimizers_of_different_kinds_have_their_own_factors() -> None:
    scaling = RateScaling("auto", 1)
    scaling.aim(9.0)
    slow, fast = optimizer(optim.Adam), optimizer(optim.SGD)
    with scaling.applied([slow, fast]):
        rates = [one.param_groups[0]["lr"] for one in (slow, fast)]
    assert rates == pytest.approx([0.3, 0.9])
    assert scaling.rate == pytest.approx(0.3)


def test_adascale_lies_between_none_and_linear_by_the_noise() -> None:
    """All noise: as linear. No noise: a larger batch is worth nothing more."""
    for square, variance, factor in ((0.0, 5.0, 4.0), (5.0, 0.0, 1.0), (1.0, 8.0, 1.6)):
        batch = ElasticBatch(8, 1, 64)
        batch.noise.load({"batches": 0, "measurements": 99, "weight": 1.0, "square": square, "variance": variance})
        assert rate("adascale", gain=batch.gain) == pytest.approx(0.1 * factor)


def test_adascale_without_an_estimate_keeps_the_rate() -> None:
    assert rate("adascale", gain=ElasticBatch(8, 1, 64).gain) == pytest.approx(0.1)


def test_a_ramp_begins_where_the_last_one_was_left() -> None:
    scaling = RateScaling("sqrt", ramp=4)
    seen = []
    for step in range(8):
        if step in (0, 2):
            scaling.aim(9.0 if step == 0 else 1.0)
        with scaling.applied([optimizer()]):
            seen.append(scaling.scale)
    assert seen == pytest.approx([3.0, 5.0, 4.0, 3.0, 2.0, 1.0, 1.0, 1.0])


def test_a_scheduler_sees_and_sets_the_unscaled_rate() -> None:
    scaling, one = RateScaling("linear", 1), optimizer()
    scheduler = optim.lr_scheduler.StepLR(one, 1, 0.5)
    scaling.aim(2.0)
    seen = []
    for _ in range(3):
        with scaling.applied([one]):
            one.step()
            seen.append(one.param_groups[0]["lr"])
        scheduler.step()
    assert seen == pytest.approx([0.2, 0.1, 0.05])
    assert scheduler.get_last_lr() == pytest.approx([0.0125])


@pytest.mark.parametrize("value", ["quadratic", 2, True, ("linear",)])
def test_an_unknown_rule_is_refused_with_the_choices(value: Any) -> None:
    with pytest.raises(UsageError, match="'linear', 'sqrt', 'adascale', 'none', or a function"):
        chosen_lr_scaling(value, elastic=True, scaled=False)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf, None, "2"])
def test_a_function_that_returns_no_factor_is_refused(value: Any) -> None:
    with pytest.raises(UsageError, match="must return a positive number"):
        rate(lambda _scale: value)


def test_a_batch_keeps_to_its_range_whatever_is_asked_or_restored() -> None:
    batch = ElasticBatch(16, 8, 64)
    sizes = []
    for size in (4, 8, 1000, 64, 32):
        batch.change(size)
        sizes.append((batch.size, batch.changes))
    assert sizes == [(8, 1), (8, 1), (64, 2), (64, 2), (32, 3)]
    narrower = ElasticBatch(16, 16, 24)
    narrower.load(batch.state())
    assert (narrower.size, narrower.changes, narrower.scale) == (24, 3, 1.5)


def test_a_scheduler_that_was_not_prepared_is_refused() -> None:
    """Each process that joins would begin its schedule anew."""
    one = optimizer()
    check_schedulers([one])
    scheduler = optim.lr_scheduler.StepLR(one, 1)
    check_schedulers([one, scheduler])
    with pytest.raises(UsageError, match="not given to the session"):
        check_schedulers([one])
    with pytest.raises(UsageError, match="not given to the session"):
        check_schedulers([one, optim.lr_scheduler.StepLR(optimizer(), 1)])


def test_a_scheduler_may_be_inside_of_another_object() -> None:
    class Schedules:
        def state_dict(self) -> dict[str, Any]:
            return {}

    one = optimizer()
    optim.lr_scheduler.StepLR(one, 1)
    check_schedulers([one, Schedules()])


@pytest.mark.parametrize("late", [False, True])
def test_the_session_refuses_it_before_the_first_step(late: bool) -> None:
    def train(session: Any) -> None:
        model = torch.nn.Linear(1, 1)
        one = optim.SGD(model.parameters(), lr=0.1)
        if not late:
            optim.lr_scheduler.StepLR(one, 1)
        session.prepare(model, one)
        if late:
            optim.lr_scheduler.StepLR(one, 1)
        session.epochs(1)

    with pytest.raises(UsageError, match="a learning-rate scheduler was made"):
        run_local(train)


def test_one_that_is_made_in_the_loop_is_refused_after_the_first_epoch() -> None:
    """It would begin anew in each process that joins or resumes."""

    def train(session: Any) -> None:
        model, one = session.prepare(torch.nn.Linear(1, 1), optim.SGD, lr=0.1)
        data = session.loader(torch.utils.data.TensorDataset(torch.randn(16, 1)), batch_size=4)
        for _ in session.epochs(3):
            scheduler = optim.lr_scheduler.StepLR(one, 2)
            for (x,) in data:
                session.step(model(x).pow(2).mean())
                scheduler.step()

    with pytest.raises(UsageError, match="a learning-rate scheduler was made"):
        run_local(train)
