"""Processes of one training job that come to differ are noticed, with a name; those that do not are left alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import diverging
import pytest
import torch
from habits import HELD
from training_crew import run_member

from freetrain_parsl.training.data.loader_options import LoaderOptions
from freetrain_parsl.training.fragment import Finished, Membership, Paused

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from crew import Crew, CrewRun
    from training_crew import Outcome

pytestmark = pytest.mark.slow


def accusations(outcomes: list[Outcome | None]) -> set[str]:
    """Return the errors of all members that are alive."""
    return {outcome.error for outcome in outcomes if outcome is not None}


def ends(outcomes: list[Outcome | None]) -> list[Finished]:
    found = []
    for outcome in outcomes:
        if outcome is not None:
            assert isinstance(outcome.end, Finished), outcome.error
            found.append(outcome.end)
    return found


def until_held(run: CrewRun, root: Path) -> None:
    run.until(lambda: (root / "net" / "files" / HELD).exists() or run.ended)


class Accused(NamedTuple):
    """A training job whose two processes come to differ, and parts of the message."""

    train: Callable[..., object]
    differs: str
    cause: str
    options: dict[str, Any] = {}  # noqa: RUF012 - not changed


_OF_PARAMETERS = (
    "random numbers or a process's own values were added to parameters or to .grad after session.backward: use the "
    "same on all processes, from a generator seeded with session.metrics['steps'], or session.all_reduce(tensor)"
)
_OF_BUFFERS = (
    "it was computed from a process's own share of the batch: add up the shares first, "
    "session.all_reduce(x.sum(0)), or "
    "register it with persistent=False if it is no part of the state"
)
_LOCAL = "(session.rank, the loss of its own share of the batch, the clock)"
_OF_NUMBERS = f"it was set from something that differs between processes {_LOCAL}: compute it from session.metrics or"
_OF_PLACES = "a loop was left or a batch was skipped on some processes only: decide by a value that all have, such as"
_FIRST = "(after step 1, equal after step 0)"
_FOURTH = "(after step 4, equal after step 0)"
_WEIGHTS = "; ".join(f"parameter model.{name} is not the same on rank 0 and rank 1" for name in ("0.weight", "0.bias"))

ACCUSED = {
    "learning rate": Accused(
        diverging.rates,
        f"lr of optimizer group 0 is 0.1 on rank 0, 0.6 on rank 1, and 4 other values {_FIRST}",
        _OF_NUMBERS,
    ),
    "weight decay": Accused(diverging.rates_of_the_loss, "weight_decay of optimizer group 0 is 0.00", _OF_NUMBERS),
    "noise": Accused(diverging.noise, _WEIGHTS, _OF_PARAMETERS),
    "buffer in place": Accused(
        diverging.statistic,
        f"buffer model.mean is not the same on rank 0 and rank 1 {_FOURTH}",
        _OF_BUFFERS,
        {"how": "in place"},
    ),
    "buffer reassigned": Accused(
        diverging.statistic,
        f"buffer model.mean is not the same on rank 0 and rank 1 {_FOURTH}",
        _OF_BUFFERS,
        {"how": "reassigned"},
    ),
    "frozen": Accused(
        diverging.frozen,
        "requires_grad of parameter model.0.bias is True on rank 0, False on rank 1 (after step 2, equal after step 1)",
        f"parameters were frozen by something that differs between processes {_LOCAL}",
    ),
    "left early": Accused(
        diverging.left_early,
        "the position in the data is epoch 0, sample 16 on rank 0, epoch 1, sample 0 on rank 1",
        _OF_PLACES,
    ),
    "grown": Accused(
        diverging.grown,
        "the shape of parameter 0 of optimizer group 1 is (2, 2) on rank 0, missing on rank 1",
        "the model or the optimizer was changed on some processes only",
    ),
    "one weight": Accused(
        diverging.perturbed, "parameter model.0.weight is not the same on rank 0 and rank 1", _OF_PARAMETERS
    ),
}


@pytest.mark.parametrize("what", ACCUSED)
def test_a_difference_ends_the_training_with_its_name_and_cause(crew: Crew, tmp_path: Path, what: str) -> None:
    """All members raise the same error, which names what differs, on which ranks, and since which step."""
    train, differs, cause, options = ACCUSED[what]
    (error,) = accusations(crew.run(2, tmp_path, train, **options))
    assert error.startswith("ReplicasDiffer: job 'net': its processes no longer agree: ")
    assert differs in error
    assert f"; usually {cause}" in error
    assert "\n" not in error


@pytest.mark.smoke
def test_the_ranks_with_equal_values_are_named_together(crew: Crew, tmp_path: Path) -> None:
    (error,) = accusations(crew.run(3, tmp_path, diverging.frozen))
    assert "requires_grad of parameter model.0.bias is True on ranks 0, 2, False on rank 1" in error


@pytest.mark.smoke
def test_survivors_that_differ_do_not_go_on_with_the_parameters_of_one(crew: Crew, tmp_path: Path) -> None:
    """They have made the same steps; nothing tells which of them is right."""
    outcomes = crew.start(3, tmp_path, diverging.perturbed, at=3, die_at=3).outcomes()
    (error,) = accusations(outcomes)
    assert "ReplicasDiffer" in error
    assert "parameter model.0.weight is not the same on rank 0 and rank 1" in error


def test_a_process_that_joins_with_other_local_variables_is_named(crew: Crew, tmp_path: Path) -> None:
    run = crew.start(1, tmp_path, diverging.counted_locally, hold_at=3)
    until_held(run, tmp_path)
    run.regroup(2)
    (error,) = accusations(run.outcomes())
    assert "lr of optimizer group 0 is 0.025 on rank 0, 0.1 on rank 1" in error
    assert "(after step 4, equal after step 3)" in error


# ── what may differ, or does not ──────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", ["BatchNorm", "InstanceNorm", "spectral norm", "dropout"])
@pytest.mark.parametrize("size", [3, 1])
def test_nobody_is_accused_in_a_group_that_changes(crew: Crew, tmp_path: Path, kind: str, size: int) -> None:
    """Local statistics are known by their kind, also in an average; micro-batches are padded in some processes."""
    micro = {} if kind == "BatchNorm" else {"micro_batch": 5}  # BatchNorm needs two samples in each
    run = crew.start(2, tmp_path, diverging.usual, kind=kind, hold_at=5, **micro)
    until_held(run, tmp_path)
    run.regroup(size)
    sizes = ends(run.outcomes())[0].value
    assert sizes == [(step, 2 if step <= 5 else size) for step in range(1, 13)]


@pytest.mark.parametrize("kind", ["BatchNorm", "spectral norm", "dropout"])
@pytest.mark.parametrize("die_at", [0, 5])
def test_the_survivors_of_a_failure_are_not_accused(crew: Crew, tmp_path: Path, kind: str, die_at: int) -> None:
    outcomes = crew.start(3, tmp_path, diverging.usual, kind=kind, die_at=die_at).outcomes()
    sizes = ends(outcomes)[0].value
    assert sizes == [(step, 3 if step <= die_at else 2) for step in range(1, 13)]


def test_buffers_that_are_not_persistent_may_differ(crew: Crew, tmp_path: Path) -> None:
    """Even in shape: a cache for the lengths that a process has seen."""
    assert {len(end.value) for end in ends(crew.run(3, tmp_path, diverging.statistic, how="not persistent"))} == {3, 2}


@pytest.mark.parametrize("how", ["in place", "reassigned"])
def test_with_fixed_shards_a_buffer_is_the_mean_over_them(crew: Crew, tmp_path: Path, how: str) -> None:
    """So it is equal on all processes, and on any number of them; it is the tensor that the model uses and saves."""
    options: dict[str, Any] = {"how": how, "deterministic": True, "options": LoaderOptions(shards=4)}
    alone = run_member(diverging.statistic, options, root=tmp_path / "alone", membership=Membership("net"))
    group = crew.run(3, tmp_path / "crew", diverging.statistic, **options)
    (expected,), others = ends([alone]), ends(group)
    assert expected.value.abs().sum() > 0
    assert all(torch.equal(expected.value, end.value) for end in others)
    assert others[0].checkpoint is not None
    saved = torch.load(others[0].checkpoint / "state.pt", weights_only=True)["objects"]["model"]["mean"]
    assert torch.equal(saved, expected.value)


def test_on_unlike_processors_bits_may_differ_and_numbers_may_not(crew: Crew, tmp_path: Path) -> None:
    ends(crew.run(2, tmp_path / "bits", diverging.on_unlike_processors, train=diverging.perturbed))
    (error,) = accusations(crew.run(2, tmp_path / "rates", diverging.on_unlike_processors, train=diverging.rates))
    assert "lr of optimizer group 0 is 0.1 on rank 0, 0.6 on rank 1 (after" in error


# ── frozen parameters ─────────────────────────────────────────────────────────────────────────────


FROZEN = (False, False, True, True)


def test_a_process_that_joins_freezes_what_the_others_have_frozen(crew: Crew, tmp_path: Path) -> None:
    run = crew.start(1, tmp_path, diverging.frozen_once, hold_at=15)
    until_held(run, tmp_path)
    run.regroup(2)
    veteran, newcomer = ends(run.outcomes())
    assert veteran.value == [(True, True, True, True), FROZEN, FROZEN, FROZEN]
    assert newcomer.value == [FROZEN, FROZEN]


def test_a_resumed_training_has_the_same_parameters_frozen(crew: Crew, tmp_path: Path) -> None:
    paused = crew.run(1, tmp_path, diverging.frozen_once, pause_at=15)[0]
    assert paused is not None
    assert isinstance(paused.end, Paused), paused.error
    (resumed,) = ends(crew.run(1, tmp_path, diverging.frozen_once))
    assert resumed.value == [FROZEN, FROZEN]
