"""A loss that is a mean over tokens has the gradient of the whole batch's mean, however the batch is divided."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from test_regroup import Event, lose
from training_crew import SAMPLES, run_member
from verbs import plain, tag

from freetrain_parsl.errors import UsageError
from freetrain_parsl.training.data.audit import Audit
from freetrain_parsl.training.data.loader_options import LoaderOptions
from freetrain_parsl.training.fragment import Finished, Membership, run_local

if TYPE_CHECKING:
    from pathlib import Path

    from crew import Crew


def assert_as_plain(value: dict[str, Any], epochs: int = 2) -> None:
    parameters, losses = plain(epochs)
    torch.testing.assert_close(value["parameters"], parameters, rtol=0, atol=1e-12)
    assert [row["loss"] for row in value["history"]] == pytest.approx(losses, abs=1e-12)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"as_tensor": True},
        {"by_backward": True},
        {"micro_batch": 1},
        {"micro_batch": 3, "by_backward": True},
        {"deterministic": True, "options": LoaderOptions(shards=4)},
        {"batch_range": (2, 32), "micro_batch": 3},
    ],
    ids=str,
)
def test_one_process_has_the_result_of_a_plain_loop(options: dict[str, Any]) -> None:
    assert_as_plain(run_local(tag, **options))


def test_without_pieces_the_result_is_the_same_bit_by_bit() -> None:
    assert torch.equal(run_local(tag)["parameters"], plain()[0])


def test_a_batch_without_items_changes_nothing_but_the_counts() -> None:
    def train(session: Any) -> Any:
        model = torch.nn.Linear(1, 1)
        session.prepare(model, torch.optim.SGD, lr=0.1)
        data = session.loader(torch.ones(4, 1), 2, micro_batch=1)
        before = model.weight.clone()
        for _ in session.epochs(1):
            for x in data:
                made = session.step(model(x)[:0].mean(), items=0)
                if made:
                    assert math.isnan(session.batch_loss)
        assert torch.equal(model.weight, before)
        return session.metrics["loss"], session.audit

    assert run_local(train) == (None, Audit(4, 0, 0))


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([1, -2], "not negative, got -2"),
        ([True], "not negative, got True"),
        ([math.inf], "not negative, got inf"),
        ([torch.ones(2)], r"got a tensor of shape \(2,\)"),
        ([3, None], "for all batches or for none"),
        ([None, 3], "for all batches or for none"),
    ],
)
def test_what_is_no_number_of_items_is_refused(items: list[Any], message: str) -> None:
    def train(session: Any) -> None:
        model = torch.nn.Linear(1, 1)
        session.prepare(model, torch.optim.SGD, lr=0.1)
        data = session.loader(torch.ones(4, 1), 2)
        for _ in session.epochs(1):
            for x, number in zip(data, items, strict=False):
                session.step(model(x).mean(), items=number)

    with pytest.raises(UsageError, match=message) as caught:
        run_local(train)
    assert "\n" not in str(caught.value)


def test_items_without_a_loss_are_refused() -> None:
    def train(session: Any) -> None:
        session.prepare(torch.nn.Linear(1, 1), torch.optim.SGD, lr=0.1)
        session.step(items=3)

    with pytest.raises(UsageError, match="items belong to a loss"):
        run_local(train)


def test_a_second_step_on_a_batch_weighs_its_own_items() -> None:
    """Two optimizers take turns, with losses over different numbers of items."""

    def train(session: Any) -> list[float]:
        models = [torch.nn.Linear(1, 1, bias=False) for _ in range(2)]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.0) for model in models]
        session.prepare(models[0], optimizers[0], models[1], optimizers[1])
        gradients = []
        data = session.loader(torch.ones(4, 1), 4)
        for _ in session.epochs(1):
            for x in data:
                for model, optimizer, items in zip(models, optimizers, (3, 5), strict=True):
                    session.backward(model(x).mean(), items=items)
                    gradients.append(float(model.weight.grad))  # type: ignore[arg-type]  # after backward
                    session.step(optimizer=optimizer)
        return gradients

    assert run_local(train) == [1.0, 1.0]


def test_the_loss_of_a_batch_as_a_tensor_is_the_number() -> None:
    def train(session: Any) -> None:
        model = torch.nn.Linear(1, 1)
        session.prepare(model, torch.optim.SGD, lr=0.1)
        data = session.loader(torch.ones(4, 1), 2)
        for _ in session.epochs(1):
            with pytest.raises(UsageError, match="batch_loss_tensor: this process has made no step"):
                _ = session.batch_loss_tensor
            for x in data:
                loss = model(x).mean()
                session.step(loss)
                assert session.batch_loss_tensor.shape == ()
                assert float(session.batch_loss_tensor) == session.batch_loss == loss.item()
                assert session.position == (0, 0 if session.metrics["steps"] == 1 else 2, False)
            assert session.position == (0, 4, True)
        assert session.position == (1, 0, False)

    run_local(train)


# ── several processes ─────────────────────────────────────────────────────────────────────────────


def disturbed(crew: Crew, root: Path, size: int, events: tuple[Event, ...], function: Any = tag, **kwargs: Any) -> Any:
    """Train with these disturbances; return the values of all processes that are there at the end."""
    gates = {event.step: root / f"gate-{event.step}" for event in events}
    run = crew.start(size, root / "cut", function, gates=gates, **kwargs)
    for event in events:
        gate = gates[event.step]
        if event.what == "regroup":
            run.regroup(event.size, release=gate.touch)
        elif event.what == "kill":
            lose(run, event.size, gate)
        else:
            run.pause(gate.touch)
            run = crew.start(event.size, root / "cut", function, gates=gates, **kwargs)
    outcomes = run.outcomes()
    assert all(outcome and not outcome.error for outcome in outcomes), outcomes
    assert all(isinstance(outcome.end, Finished) for outcome in outcomes if outcome)
    return [outcome.end.value for outcome in outcomes if outcome]


EVENTS = (Event(2, "regroup", 1), Event(4, "regroup", 3), Event(6, "kill", 1), Event(9, "restart", 2))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"micro_batch": 2}, {"deterministic": True, "options": LoaderOptions(shards=4)}], ids=str
)
def test_processes_come_go_and_die_and_the_result_is_that_of_a_plain_loop(
    crew: Crew, tmp_path: Path, options: dict[str, Any]
) -> None:
    """2 -> 1 -> 3 -> one killed -> a restart with 2."""
    for value in disturbed(crew, tmp_path, 2, EVENTS, **options):
        assert_as_plain(value)
        assert value["samples"] == 2 * SAMPLES


@pytest.mark.smoke
@pytest.mark.slow
def test_with_a_fixed_number_of_shards_it_is_the_same_bit_by_bit(crew: Crew, tmp_path: Path) -> None:
    options = {"deterministic": True, "options": LoaderOptions(shards=4)}
    alone = run_local(tag, **options)
    for value in disturbed(crew, tmp_path, 2, EVENTS, **options):
        assert torch.equal(value["parameters"], alone["parameters"])
        assert value["history"] == alone["history"]


@pytest.mark.slow
def test_the_batch_changes_meanwhile(crew: Crew, tmp_path: Path) -> None:
    """As with one process, and the same changes of the batch."""
    kwargs = {"batches": {1: 12, 5: 5}, "batch_range": (2, 32)}
    outcome = run_member(tag, dict(kwargs), root=tmp_path / "alone", membership=Membership("net"))
    assert isinstance(outcome.end, Finished), outcome.error
    alone = outcome.end.value
    for value in disturbed(crew, tmp_path, 2, (Event(3, "regroup", 1), Event(7, "regroup", 2)), **kwargs):
        torch.testing.assert_close(value["parameters"], alone["parameters"], rtol=0, atol=1e-12)
        assert value["steps"] == alone["steps"]
