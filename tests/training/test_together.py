"""`session.all_reduce` and `session.broadcast`: the same result on all processes, also while these come, go and die."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from test_items import EVENTS, Event, disturbed
from training_crew import SAMPLES
from verbs import decide, plain

from freetrain_parsl.errors import PeerFailed, UsageError
from freetrain_parsl.training.data.loader_options import LoaderOptions
from freetrain_parsl.training.fragment import run_local

if TYPE_CHECKING:
    from pathlib import Path

    from crew import Crew


def test_one_process_agrees_with_itself() -> None:
    value = run_local(decide)
    assert value["sums"] == [SAMPLES] * 3
    assert value["agreed"][2] == {"rank": 0, "epoch": 2, "late": None, "sizes": (1, 2.5)}


def test_results_are_the_callers_own() -> None:
    def train(session: Any) -> Any:
        session.prepare(torch.nn.Linear(1, 1), torch.optim.SGD, lr=0.1)
        for _ in session.epochs(0):
            pass
        mine, value = torch.ones(2), [1]
        session.all_reduce(mine).add_(1)
        session.broadcast(value).append(2)
        return mine.tolist(), value, session.all_reduce(torch.tensor([True, True])).tolist()

    assert run_local(train) == ([1.0, 1.0], [1], [1, 1])


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("function", "inside or after `for epoch"),
        ("epoch", "before the batches of an epoch"),
        ("batch", "cannot be combined with deterministic=True"),
    ],
)
def test_a_call_that_other_processes_would_not_make_is_refused(where: str, message: str) -> None:
    def train(session: Any) -> None:
        model = torch.nn.Linear(1, 1)
        session.prepare(model, torch.optim.SGD, lr=0.1)
        data = session.loader(torch.ones(4, 1), 2, deterministic=where == "batch", options=LoaderOptions(shards=2))
        if where == "function":
            session.broadcast(1)
        for _ in session.epochs(1):
            if where == "epoch":
                session.broadcast(1)
            for x in data:
                session.all_reduce(x)
                session.step(model(x).sum())

    with pytest.raises(UsageError, match=message) as caught:
        run_local(train)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda session: session.broadcast({"a": [object()]}), "dictionaries of these, got object"),
        (lambda session: session.broadcast(torch.ones(1)), "got Tensor"),
        (lambda session: session.all_reduce(3), r"needs a tensor, got int"),
    ],
)
def test_what_cannot_be_sent_is_refused(call: Any, message: str) -> None:
    def train(session: Any) -> None:
        session.prepare(torch.nn.Linear(1, 1), torch.optim.SGD, lr=0.1)
        for _ in session.epochs(0):
            pass
        call(session)

    with pytest.raises(UsageError, match=message):
        run_local(train)


# ── several processes ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.smoke
@pytest.mark.slow
def test_all_processes_have_the_same_results_while_some_come_go_and_die(crew: Crew, tmp_path: Path) -> None:
    parameters, _ = plain(3)
    for value in disturbed(crew, tmp_path, 2, EVENTS, decide):
        assert set(value["sums"]) == {SAMPLES}, "those since this process has joined"
        assert all(agreed["rank"] == 0 for agreed in value["agreed"])
        torch.testing.assert_close(value["parameters"], parameters, rtol=0, atol=1e-12)


@pytest.mark.slow
def test_a_process_that_dies_before_a_decision_in_a_batch_changes_no_result(crew: Crew, tmp_path: Path) -> None:
    """The others wait for the first in `broadcast`, and repeat the batch; then all leave the loop at the same step."""
    events = (Event(3, "kill", 0), Event(6, "regroup", 3))
    values = disturbed(crew, tmp_path, 3, events, decide, in_batch=True, stop_at=10, epochs=2)
    assert [value["steps"] for value in values] == [10] * 3
    assert all(set(value["sums"]) <= {8, SAMPLES % 8} for value in values)
    assert all(torch.equal(value["parameters"], values[0]["parameters"]) for value in values)


def losing(session: Any, *, at: int, verb: str, rank: int = 1, **kwargs: Any) -> Any:
    """Train like `decide`; at a step, this member receives a result, and then notices a failure instead."""
    runtime = session._runtime
    together = runtime.together

    def call(operation: Any, *, name: str, of_parts: bool) -> Any:
        if name == verb and session.metrics["steps"] == at and session.rank == rank and not lost:

            def operation_that_fails(group: Any) -> Any:
                if not lost:
                    lost.append(operation(group))
                    raise PeerFailed("a network that fails for this member only")
                return operation(group)

            return together(operation_that_fails, name=name, of_parts=of_parts)
        return together(operation, name=name, of_parts=of_parts)

    lost: list[Any] = []
    runtime.together = call
    return decide(session, **kwargs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("verb", "in_batch", "at"), [("broadcast", False, 7), ("broadcast", True, 4), ("all_reduce", True, 4)]
)
def test_who_misses_a_result_gets_it_from_who_has_it(
    crew: Crew, tmp_path: Path, verb: str, in_batch: bool, at: int
) -> None:
    from freetrain_parsl.protocol.reports import GroupFailed

    run = crew.start(2, tmp_path / "cut", losing, at=at, verb=verb, in_batch=in_batch)
    run.until(lambda: all(member.last(GroupFailed) for member in run.members) or run.ended)
    assert all(member.last(GroupFailed) for member in run.members), "one has noticed a failure"
    run.order(run.members, [], abort=True)
    values = [outcome.end.value for outcome in run.outcomes() if outcome]  # type: ignore[union-attr]  # both finish
    assert values[0]["agreed"] == values[1]["agreed"]
    assert values[0]["sums"] == values[1]["sums"]
    torch.testing.assert_close(values[0]["parameters"], plain(3)[0], rtol=0, atol=1e-12)
