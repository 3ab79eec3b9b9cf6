"""Objects may be prepared in any order, and what is restored wins over what the code before the loop has set."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest
import torch
from habits import HELD
from loop_trainings import net64
from order_trainings import gan, one_cycle, own_checkpoint, unfreeze
from test_loop_state import assert_close, value_of
from torch import nn
from training_crew import equal, run_member

from freetrain_parsl.errors import UsageError
from freetrain_parsl.training.fragment import Membership, Paused, run_local

if TYPE_CHECKING:
    from pathlib import Path

    from crew import Crew


def run(function: Any, root: Path, **kwargs: Any) -> Any:
    return run_member(function, kwargs, root=root, membership=Membership("net"))


CASES = [
    (one_cycle, {"order": "loader first"}),
    (one_cycle, {"order": "scheduler last"}),
    (one_cycle, {"order": "all again"}),
    (gan, {"calls": 2}),
    (unfreeze, {}),
]
NAMES = ["-".join([function.__name__, *map(str, kwargs.values())]) for function, kwargs in CASES]
PLAIN: dict[Any, dict[str, Any]] = {one_cycle: {"order": "loader first"}, gan: {"calls": 1}, unfreeze: {}}


@pytest.mark.parametrize(("function", "kwargs"), CASES, ids=NAMES)
@pytest.mark.parametrize("pauses", [[], [9], [7], [3, 16]])
def test_a_training_that_was_paused_has_the_result_of_one_that_was_not(
    tmp_path: Path, function: Any, kwargs: dict[str, Any], pauses: list[int]
) -> None:
    """Whatever the order of the calls; bit by bit."""
    alone = value_of(run(function, tmp_path / "alone", **PLAIN[function]))
    for step in pauses:
        paused = run(function, tmp_path / "paused", pause_at=step, **kwargs)
        assert isinstance(paused.end, Paused), paused.error
    resumed = value_of(run(function, tmp_path / "paused", **kwargs))
    assert equal(resumed, alone)


@pytest.mark.slow
@pytest.mark.parametrize(("function", "kwargs"), CASES, ids=NAMES)
def test_a_process_that_joins_has_the_same_state(
    crew: Crew, tmp_path: Path, function: Any, kwargs: dict[str, Any]
) -> None:
    alone = value_of(run(function, tmp_path / "alone", **PLAIN[function]))
    crew_run = crew.start(2, tmp_path / "crew", function, hold_at=10, **kwargs)
    crew_run.until(lambda: (tmp_path / "crew" / "net" / "files" / HELD).exists() or crew_run.ended)
    crew_run.regroup(2, replace=1)
    for outcome in crew_run.outcomes():
        assert_close(value_of(outcome), alone)


def test_names_in_checkpoints_do_not_depend_on_the_number_of_calls(tmp_path: Path) -> None:
    names = []
    for calls in (1, 2):
        end = run(gan, tmp_path / str(calls), calls=calls).end
        names.append(list(torch.load(end.checkpoint / "state.pt", weights_only=True)["objects"]))
    assert names[0] == names[1] == ["model", "optimizer", "Linear 1", "Adam 2"]


def test_the_checkpoint_of_the_session_wins_over_one_that_the_code_loads(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And it is said once, with the names."""
    alone = value_of(run(own_checkpoint, tmp_path / "alone"))
    assert isinstance(run(own_checkpoint, tmp_path / "paused", pause_at=10).end, Paused)
    with caplog.at_level(logging.WARNING):
        resumed = value_of(run(own_checkpoint, tmp_path / "paused"))
    assert equal(resumed, alone)
    (record,) = [record for record in caplog.records if "loaded again" in record.message]
    assert record.message.startswith("model, optimizer changed after session.prepare had restored it; ")
    assert record.message.endswith("step-0000000010 was loaded again: it is the newest state")


def test_rates_that_a_scheduler_sets_are_no_reason_for_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert isinstance(run(one_cycle, tmp_path, order="scheduler last", pause_at=10).end, Paused)
    with caplog.at_level(logging.WARNING):
        value_of(run(one_cycle, tmp_path, order="scheduler last"))
    assert not [record for record in caplog.records if "loaded again" in record.message]


@pytest.mark.parametrize(
    ("things", "options", "message"),
    [
        ((), {}, "needs a torch.nn.Module first, got nothing"),
        ((nn.Linear(1, 1), lambda parameters: parameters), {}, "needs a torch optimizer, got generator"),
        ((nn.Linear(1, 1),), {"lr": 0.1}, "give lr to the optimizer, or pass the optimizer class"),
    ],
)
def test_what_cannot_be_prepared_is_refused(things: tuple[Any, ...], options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        run_local(lambda session: session.prepare(*things, **options))


def test_a_loop_needs_an_optimizer() -> None:
    def train(session: Any) -> None:
        assert session.prepare(model := net64()) is model
        session.epochs(1)

    with pytest.raises(UsageError, match=r"call session\.prepare\(model, optimizer\) before session\.epochs"):
        run_local(train)


def test_a_parameter_that_is_made_in_the_loop_is_refused() -> None:
    """Its gradients would not be summed, and no process that joins would have it."""

    def train(session: Any) -> None:
        model, optimizer = session.prepare(net64(), torch.optim.SGD, lr=0.1)
        data = session.loader(torch.utils.data.TensorDataset(torch.randn(32, 6, dtype=torch.float64)), batch_size=8)
        for epoch in session.epochs(2):
            if epoch == 1:
                optimizer.add_param_group({"params": [nn.Parameter(torch.ones(()))]})
            for (x,) in data:
                session.step(model(x).pow(2).mean())

    with pytest.raises(UsageError, match=r"SGD.add_param_group: group 1 has a parameter that was made in the loop"):
        run_local(train)
