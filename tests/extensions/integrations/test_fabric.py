"""A loop with Lightning Fabric trains in a session as it does alone."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
from fabric_trainings import in_session, plain
from held import resize
from torch import nn
from torch.utils.data import DataLoader
from training_crew import run_member

from freetrain_parsl.extensions.integrations.fabric import SessionFabric
from freetrain_parsl.training.fragment import Finished, Membership, Paused
from tests.extensions.fusion.sweep_trainings import together

if TYPE_CHECKING:
    from crew import Crew

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # Lightning's own, which differ between its versions
]


@pytest.fixture(params=[1, 4], ids=["plain", "accumulated"], scope="module")
def accumulate(request) -> int:
    return request.param


@pytest.fixture(scope="module")
def expected(accumulate) -> dict[str, Any]:
    torch.set_num_threads(1)
    return plain(accumulate)


def check(outcome, expected, *, within) -> None:
    assert outcome is not None
    assert isinstance(outcome.end, Finished), outcome.error
    result = outcome.end.value
    assert float((result["weights"] - expected["weights"]).abs().max()) <= within
    assert (result["rate"], result["hits"]) == (expected["rate"], expected["hits"])
    assert result["audit"] == (0, 0)


def test_one_process_trains_as_without_a_session(accumulate, expected, tmp_path) -> None:
    outcome = run_member(in_session, {"accumulate": accumulate}, root=tmp_path, membership=Membership("net"))
    check(outcome, expected, within=0.0 if accumulate == 1 else 1e-6)


@pytest.mark.parametrize("step", [7, 9])
def test_a_restart_in_mid_epoch_or_at_its_end_changes_nothing(accumulate, expected, tmp_path, step) -> None:
    settings = {"accumulate": accumulate, "disturbances": {"pause_at": step}}
    first = run_member(in_session, settings, root=tmp_path, membership=Membership("net"))
    assert isinstance(first.end, Paused), first.error
    outcome = run_member(in_session, {"accumulate": accumulate}, root=tmp_path, membership=Membership("net"))
    check(outcome, expected, within=0.0 if accumulate == 1 else 1e-6)


def test_processes_leave_and_join_in_one_run(accumulate, expected, tmp_path, crew: Crew) -> None:
    run = crew.start(2, tmp_path, in_session, accumulate=accumulate, disturbances={"hold_at": (6, 14)})
    resize(run, tmp_path, [(6, 1), (14, 2)])
    for outcome in run.outcomes():
        check(outcome, expected, within=1e-5)


@pytest.mark.smoke
def test_the_others_go_on_when_one_is_killed(accumulate, expected, tmp_path, crew: Crew) -> None:
    disturbances = {"die_at": 8}
    run = crew.start(2, tmp_path, in_session, accumulate=accumulate, disturbances=disturbances)
    check(run.outcomes()[0], expected, within=1e-5)


def test_members_of_an_array_are_fused(tmp_path) -> None:
    outcome = together(tmp_path / "array", [{}, {}], in_session)
    assert outcome.engine.fused_steps > 0
    expected = run_member(in_session, {}, root=tmp_path / "alone", membership=Membership("net")).end.value
    for name in ("0", "1"):
        assert torch.allclose(outcome.value(name)["weights"], expected["weights"], atol=1e-6)


def _setup(fabric) -> tuple[Any, Any]:
    model = nn.Linear(2, 1)
    return fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))


def _twice(fabric) -> None:
    _setup(fabric)
    _setup(fabric)


def _without_data(fabric) -> None:
    _setup(fabric)
    fabric.epochs(1)


def _own_batches(fabric) -> None:
    _setup(fabric)
    fabric.setup_dataloaders(DataLoader(range(4), batch_sampler=[[0, 1], [2, 3]]))
    fabric.epochs(1)


def _forgotten_scheduler(fabric) -> None:
    _, optimizer = _setup(fabric)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    fabric.setup_dataloaders(DataLoader(range(4)))
    fabric.epochs(1)


def test_a_scheduler_that_the_epochs_do_not_know_is_refused(tmp_path) -> None:
    outcome = run_member(
        lambda session: _forgotten_scheduler(SessionFabric(session)), {}, root=tmp_path, membership=Membership("net")
    )
    assert outcome.error.startswith("UsageError: a learning-rate scheduler was made, but not given to the session")


def test_clipping_by_value_survives_the_death_of_a_process(tmp_path, crew: Crew) -> None:
    """The interrupted batch has no gradients, at which torch's function raises an error."""
    run = crew.start(2, tmp_path / "killed", in_session, clip=0.01, disturbances={"die_at": 8})
    alone = run_member(in_session, {"clip": 0.01}, root=tmp_path / "alone", membership=Membership("net"))
    check(run.outcomes()[0], alone.end.value, within=1e-5)


def _closure(fabric) -> None:
    _, optimizer = _setup(fabric)
    optimizer.step(lambda: 0.0)


def _accumulation(fabric) -> None:
    model, _ = _setup(fabric)
    with fabric.no_backward_sync(model):
        pass


@pytest.mark.parametrize(
    ("use", "why"),
    [
        (_twice, "setup: call it once"),
        (lambda fabric: fabric.setup(nn.Linear(2, 1)), "with its optimizers"),
        (_without_data, "setup_dataloaders before it"),
        (_own_batches, "no batch_size, or its own batch_sampler"),
        (_closure, r"optimizer.step\(closure\)"),
        (_accumulation, "divides batches itself"),
        (lambda fabric: fabric.load("x"), "load is not supported"),
        (lambda fabric: fabric.load_raw("x", nn.Linear(1, 1)), "load_raw is not supported"),
        (lambda fabric: fabric.all_gather(torch.ones(1)), "all_gather is not supported"),
        (lambda fabric: fabric.all_reduce(torch.ones(1), reduce_op="max"), "reduce_op is 'sum' or 'mean'"),
        (lambda fabric: fabric.broadcast(1, src=1), "src must be 0"),
        (lambda fabric: list(fabric.setup_dataloaders(DataLoader(range(4)))), "inside `for epoch in fabric.epochs"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path, use, why) -> None:
    outcome = run_member(lambda session: use(SessionFabric(session)), {}, root=tmp_path, membership=Membership("net"))
    assert re.match(f"UsageError: SessionFabric.*{why}", outcome.error), outcome.error
    assert "\n" not in outcome.error


@pytest.mark.parametrize(
    ("options", "why"), [({"precision": "16-mixed"}, "one of 32-true, bf16-mixed"), ({"accumulate": 0}, "at least 1")]
)
def test_options_that_are_not_supported_are_refused_by_name(tmp_path, options, why) -> None:
    outcome = run_member(
        lambda session: SessionFabric(session, **options), {}, root=tmp_path, membership=Membership("net")
    )
    assert re.match(f"UsageError: SessionFabric.*{why}", outcome.error), outcome.error
