"""Successive halving over a fake kernel, and once on a real embedded cluster."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freetrain_parsl import training_app
from freetrain_parsl.errors import InvalidApp, NonFiniteLoss, TrainingInterrupted
from freetrain_parsl.extensions.sweeps.halving import is_usable, promoted, ranked, successive_halving
from tests.recording_kernel import Call, RecordingKernel

CONFIGURATIONS = [{"lr": lr} for lr in range(9)]
VALUES = st.lists(st.none() | st.floats(), min_size=1, max_size=40)
MODES = st.sampled_from(["min", "max"])


def train(session, lr, width=16): ...


def trains_for(session, lr, epochs): ...


def metrics(call: Call) -> dict:
    """Return the metrics of a training job whose loss is best for lr=4 and falls with each epoch."""
    history = [
        {"epoch": epoch, "loss": 10 + abs(call.kwargs["lr"] - 4) - epoch, "accuracy": call.kwargs["lr"] / 10}
        for epoch in range(call.request.options.epochs)
    ]
    return {"epochs": len(history), "loss": history[-1]["loss"], "history": history}


def search(answer=metrics, configurations=CONFIGURATIONS, function=train, options=None, **settings):
    """Return the result of a search, and its calls."""
    kernel = RecordingKernel(answer)
    app = training_app(data_flow_kernel=kernel, **(options or {}))(function)
    return successive_halving(app, configurations, **settings), kernel


def rates(rung) -> list[int]:
    return [evaluation.configuration["lr"] for evaluation in rung.evaluations]


def test_the_best_third_of_each_rung_goes_on() -> None:
    result, _ = search()
    assert [rung.epochs for rung in result.rungs] == [1, 3, 9]
    assert [rates(rung) for rung in result.rungs] == [[4, 3, 5, 2, 6, 1, 7, 0, 8], [4, 3, 5], [4]]
    assert (result.best, result.value) == ({"lr": 4}, 2.0)


def test_the_largest_value_may_be_the_best_of_those_that_were_logged() -> None:
    result, _ = search(metric="accuracy", mode="max", epochs=(2, 4), eta=4)
    assert [rates(rung)[:2] for rung in result.rungs] == [[8, 7], [8, 7]]
    assert result.value == 0.8


def test_a_configuration_keeps_its_name_so_that_it_goes_on_from_its_checkpoint() -> None:
    _, kernel = search()
    names = [(call.kwargs["lr"], call.request.name) for call in kernel.calls]
    assert len(set(names)) == 9
    assert [call.request.options.epochs for call in kernel.calls] == [1] * 9 + [3] * 3 + [9]


@pytest.mark.parametrize("options", [{}, {"name": "net"}, {"name": "net-{lr}"}, {"name": "net-{lr}-{epochs}"}])
def test_a_function_may_take_the_number_of_epochs(options) -> None:
    _, kernel = search(function=trains_for, options=options)
    assert [call.kwargs["epochs"] for call in kernel.calls] == [1] * 9 + [3] * 3 + [9]
    assert len({(call.kwargs["lr"], call.request.name) for call in kernel.calls}) == 9


def test_the_callback_gets_each_rung_when_it_is_done() -> None:
    told = []
    result, _ = search(on_rung=told.append)
    assert tuple(told) == result.rungs


def test_a_metric_may_be_computed_from_what_the_function_returned() -> None:
    result, _ = search(lambda call: [call.kwargs["lr"]], metric=lambda returned: -returned[0])
    assert (result.best, result.value) == ({"lr": 8}, -8.0)


def test_a_search_that_is_repeated_ranks_by_the_values_of_the_time_not_by_those_of_now() -> None:
    """Training jobs that have continued before are ahead of the first rung."""

    def ahead(call: Call) -> dict:
        value = metrics(call)
        later = {"epoch": 9, "loss": 100.0 if call.kwargs["lr"] == 4 else 0.0}
        return {**value, "loss": later["loss"], "history": [*value["history"], later]}

    assert search(ahead)[0].rungs[0].evaluations[0].value == search()[0].rungs[0].evaluations[0].value == 10.0


def failing(*failures: int, at: int = 1, error: Exception | None = None):
    def answer(call: Call) -> dict:
        if call.kwargs["lr"] in failures and call.request.options.epochs >= at:
            raise error or NonFiniteLoss("the loss is nan at step 1")
        return metrics(call)

    return answer


def test_a_training_that_fails_is_ranked_last_with_its_error() -> None:
    result, _ = search(failing(4, 3))
    assert rates(result.rungs[0])[-2:] == [3, 4]
    assert isinstance(result.rungs[0].evaluations[-1].error, NonFiniteLoss)
    assert [rates(rung) for rung in result.rungs[1:]] == [[5, 2, 6], [5]]


@pytest.mark.parametrize("value", [math.nan, None, "high"])
def test_a_value_that_is_no_number_is_ranked_last_with_the_reason(value) -> None:
    result, _ = search(lambda call: {"loss": value if call.kwargs["lr"] == 4 else 1.0})
    last = result.rungs[0].evaluations[-1]
    assert last.configuration == {"lr": 4}
    assert last.error is not None


def test_if_all_fail_later_the_best_of_the_rung_before_is_the_result() -> None:
    result, _ = search(failing(3, 4, 5, at=3))
    assert [rung.epochs for rung in result.rungs] == [1, 3]
    assert (result.best, result.value) == ({"lr": 4}, 10.0)


def test_if_all_fail_at_once_the_first_error_is_raised() -> None:
    with pytest.raises(NonFiniteLoss, match="at step 1"):
        search(failing(*range(9)))
    with pytest.raises(InvalidApp, match=r"successive_halving: the result has no 'accuracy'; it has: loss$"):
        search(lambda call: {"loss": 1.0}, metric="accuracy")
    with pytest.raises(InvalidApp, match="the function returned float, in which there is no 'loss'; return"):
        search(lambda call: 1.0)


def test_an_error_that_is_not_due_to_the_configuration_is_raised() -> None:
    """To rank an interrupted training job last would be wrong."""
    with pytest.raises(TrainingInterrupted, match="shut down"):
        search(failing(4, error=TrainingInterrupted("executor was shut down")))


@pytest.mark.parametrize(
    ("configurations", "settings", "error", "message"),
    [
        ([], {}, InvalidApp, "there are no configurations"),
        (
            [{"lr": 1}, {"lr": 1}],
            {},
            InvalidApp,
            "successive_halving: training jobs 1 and 2 have the same arguments and seed",
        ),
        ([{"rate": 1}], {}, TypeError, "missing a required argument: 'lr'"),
        ([{"lr": 1, "epochs": 2}], {}, InvalidApp, "configuration 1 has 'epochs', which the rungs set"),
        (CONFIGURATIONS, {"epochs": ()}, InvalidApp, "epochs must be increasing numbers such as (1, 3, 9), got ()"),
        (CONFIGURATIONS, {"epochs": (3, 3)}, InvalidApp, "epochs must be increasing numbers"),
        (CONFIGURATIONS, {"epochs": (0, 3)}, InvalidApp, "each of epochs must be a whole number of at least 1"),
        (CONFIGURATIONS, {"eta": 1}, InvalidApp, "successive_halving: eta must be a whole number of at least 2, got 1"),
        (CONFIGURATIONS, {"mode": "least"}, InvalidApp, "successive_halving: mode must be 'min' or 'max', got 'least'"),
    ],
)
def test_a_mistake_is_refused_in_one_line_before_anything_is_submitted(configurations, settings, error, message):
    kernel = RecordingKernel(metrics)
    with pytest.raises(error) as refused:
        successive_halving(training_app(data_flow_kernel=kernel)(train), configurations, **settings)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
    assert kernel.calls == []


@pytest.mark.cluster
def test_survivors_go_on_from_their_checkpoints_on_a_cluster(start) -> None:
    """Each epoch is trained once; one training job fails."""
    site = start(nodes=2)

    @training_app
    def regress(session, lr):
        import torch

        if lr < 0:
            raise ValueError("the user's own mistake")
        x = torch.randn(64, 4)
        model, _ = session.prepare(torch.nn.Linear(4, 1), torch.optim.SGD, lr=lr)
        data = session.loader(torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16)
        for _ in session.epochs():
            for inputs, targets in data:
                session.step(torch.nn.functional.mse_loss(model(inputs), targets))
        return session.metrics

    configurations = [{"lr": lr} for lr in (0.1, 0.001, -1.0, 0.05)]
    result = successive_halving(regress, configurations, epochs=(1, 3), eta=2)
    assert result.best == {"lr": 0.1}
    assert [rates(rung) for rung in result.rungs] == [[0.1, 0.05, 0.001, -1.0], [0.1, 0.05]]
    assert isinstance(result.rungs[0].evaluations[-1].error, ValueError)
    assert [(one.result["epochs"], one.result["steps"]) for one in result.rungs[1].evaluations] == [(3, 12)] * 2
    # In names, since one that changes its node before its next step resumes there once more.
    assert len({fragment.training for fragment in site.run.fragments if fragment.resumed_from == 4}) == 2


@given(VALUES, MODES, st.integers(2, 5))
def test_those_that_go_on_are_the_best(values, mode, eta) -> None:
    chosen = promoted(values, mode, eta)
    usable = [position for position, value in enumerate(values) if is_usable(value)]
    assert len(chosen) == min(len(usable), max(1, len(values) // eta)) == len(set(chosen))
    assert set(chosen) <= set(usable)
    sign = 1 if mode == "min" else -1
    others = [sign * values[position] for position in usable if position not in chosen]
    assert all(sign * values[position] <= other for position in chosen for other in others)


@given(VALUES, MODES)
def test_a_ranking_has_every_position_once_with_failures_last(values, mode) -> None:
    order = ranked(values, mode)
    assert sorted(order) == list(range(len(values)))
    usable = [is_usable(values[position]) for position in order]
    assert usable == sorted(usable, reverse=True)


@pytest.mark.parametrize(
    ("values", "mode", "order"),
    [
        ([3.0, 1.0, 2.0], "min", [1, 2, 0]),
        ([3.0, 1.0, 2.0], "max", [0, 2, 1]),
        ([1.0, 0.0, 1.0, 0.0], "min", [1, 3, 0, 2]),
        ([1.0, 0.0, 1.0, 0.0], "max", [0, 2, 1, 3]),
        ([math.nan, None, 5.0, math.inf], "min", [2, 3, 0, 1]),
        ([math.nan, None, 5.0, math.inf], "max", [3, 2, 0, 1]),
    ],
)
def test_equal_values_keep_their_order_and_failures_are_last(values, mode, order) -> None:
    assert ranked(values, mode) == order


def test_a_third_goes_on_rounded_down_but_at_least_one() -> None:
    assert [len(promoted([1.0] * number, "min", 3)) for number in range(1, 10)] == [1, 1, 1, 1, 1, 2, 2, 2, 3]
    assert promoted([None, math.nan], "min", 3) == []
