"""`sweep` and `grid` of a training app: what is submitted, under which names, and what is refused before."""

from __future__ import annotations

import pytest

from freetrain_parsl import training_app
from freetrain_parsl.errors import InvalidApp
from tests.recording_kernel import RecordingKernel


def train(session, lr, width=16): ...


def takes_seeds(session, seeds=0): ...


@pytest.fixture
def kernel() -> RecordingKernel:
    return RecordingKernel(answer=lambda call: (call.args, call.kwargs))


def app(kernel: RecordingKernel, function=train, **options):
    return training_app(data_flow_kernel=kernel, **options)(function)


def test_a_sweep_returns_its_futures_in_order(kernel) -> None:
    futures = app(kernel).sweep(lr=[0.1, 0.2, 0.3], width=8)
    assert [future.result() for future in futures] == [((), {"lr": lr, "width": 8}) for lr in (0.1, 0.2, 0.3)]


def test_a_grid_submits_every_combination(kernel) -> None:
    futures = app(kernel).grid([0.1, 0.2], width=[4, 8], seeds=range(2))
    assert [future.result() for future in futures][::2] == [
        ((lr,), {"width": width}) for lr in (0.1, 0.2) for width in (4, 8)
    ]
    assert [request.options.seed for request in kernel.requests] == [0, 1] * 4


def test_a_training_of_a_sweep_is_that_of_the_same_call(kernel) -> None:
    """So a call finds the checkpoints of a sweep, and the other way round."""
    app(kernel).sweep(lr=[0.1, 0.2], seeds=[0, 5])
    app(kernel)(lr=0.1)
    app(kernel, seed=5)(lr=0.2)
    swept, called = kernel.requests[:2], kernel.requests[2:]
    assert swept == called


def test_trainings_of_a_named_app_are_numbered(kernel) -> None:
    app(kernel, name="net").sweep(lr=[0.1, 0.2])
    assert [request.name for request in kernel.requests] == ["net-1", "net-2"]


def test_trainings_may_be_named_after_their_arguments(kernel) -> None:
    app(kernel).options(name="lr{lr:.0e}-w{width}-{seed}").sweep(lr=[0.1, 0.2], seeds=range(2))
    assert [request.name for request in kernel.requests] == ["lr1e-01-w16-0", "lr2e-01-w16-1"]


def test_all_trainings_of_a_sweep_may_run_fused_with_each_other(kernel) -> None:
    app(kernel, fuse=8).grid(lr=[0.1, 0.2], seeds=range(2))
    (fusion,) = {request.fusion for request in kernel.requests}
    assert fusion.limit == 8


@pytest.mark.parametrize(
    ("options", "lists", "error", "message"),
    [
        ({}, {"rate": [1, 2]}, TypeError, "train(): missing a required argument: 'lr'"),
        ({}, {"lr": [1], "rate": [1]}, TypeError, "unexpected keyword argument 'rate'"),
        ({}, {"lr": [1, 2, 1]}, InvalidApp, "train.sweep: training jobs 1 and 3 have the same arguments and seed"),
        ({"name": "t"}, {"lr": [1, 1]}, InvalidApp, "training jobs 1 and 2 have the same arguments and seed"),
        ({"name": "t{lr}"}, {"lr": [1, 1]}, InvalidApp, "training jobs 1 and 2 have the same arguments and seed"),
        (
            {"name": "t{lr}"},
            {"lr": [1, 1], "width": [4, 8]},
            InvalidApp,
            "training jobs 1 and 2 are both named 't1'; name them after the arguments in which they differ",
        ),
        ({}, {"lr": [1, 2], "seeds": [1, -1]}, InvalidApp, "seed must be a whole number of at least 0, got -1"),
        ({}, {"lr": [1, 2], "width": [1]}, InvalidApp, "train.sweep: the lists must have the same length"),
        ({}, {"lr": [object(), object()]}, InvalidApp, "give one: train.options(name='…')(…)"),
    ],
)
def test_a_mistake_is_refused_before_anything_is_submitted(kernel, options, lists, error, message: str) -> None:
    with pytest.raises(error) as refused:
        app(kernel, **options).sweep(**lists)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
    assert kernel.calls == []


def test_arguments_without_a_stable_identity_need_a_name_only(kernel) -> None:
    app(kernel, name="t").sweep(lr=[object(), object()])
    assert [request.name for request in kernel.requests] == ["t-1", "t-2"]


@pytest.mark.parametrize("method", ["sweep", "grid"])
def test_a_function_with_a_parameter_called_seeds_has_no_sweeps(kernel, method: str) -> None:
    with pytest.raises(InvalidApp, match=f"takes_seeds.{method}: the function has a parameter 'seeds', but"):
        getattr(app(kernel, takes_seeds), method)(seeds=range(3))
