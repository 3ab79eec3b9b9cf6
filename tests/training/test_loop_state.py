"""What a loop carries from step to step is the same in a group that changes, after failures and after a restart."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from habits import HELD
from loop_trainings import (
    agree_and_die,
    average_normed,
    begin_epochs,
    carry,
    change_before_the_step,
    count_and_fall_behind,
    own,
    stop_by_count,
    two_steps,
)
from torch import nn
from training_crew import equal, run_member
from training_runs import Run, loop

from freetrain_parsl.errors import CheckpointError, UsageError
from freetrain_parsl.protocol.reports import GroupFailed
from freetrain_parsl.training.fragment import Finished, Membership, Paused, run_local
from freetrain_parsl.training.group.process_group import Group
from freetrain_parsl.training.loop_state import LoopStates

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from crew import Crew

CPU = torch.device("cpu")
PAIR = Group(0, 2)


def value_of(outcome: Any) -> Any:
    assert outcome is not None
    assert isinstance(outcome.end, Finished), outcome.error
    return outcome.end.value


def assert_close(one: Any, other: Any, where: str = "") -> None:
    """Equal but for the rounding of sums in float64."""
    assert type(one) is type(other), where
    if isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_close(one[key], other[key], f"{where}[{key!r}]")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), where
        for mine, its in zip(one, other, strict=True):
            assert_close(mine, its, where)
    elif isinstance(one, torch.Tensor):
        assert torch.allclose(one, other, rtol=1e-10, atol=1e-12), where
    else:
        assert one == (pytest.approx(other, rel=1e-10) if isinstance(other, float) else other), where


# ── in groups ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.smoke
@pytest.mark.slow
@pytest.mark.parametrize("size", [3, 1])
def test_it_is_sent_to_processes_that_join(crew: Crew, tmp_path: Path, size: int) -> None:
    alone = value_of(run_member(carry, {}, root=tmp_path / "alone", membership=Membership("net")))
    run = crew.start(2, tmp_path / "crew", carry, hold_at=5)
    run.until(lambda: (tmp_path / "crew" / "net" / "files" / HELD).exists() or run.ended)
    run.regroup(size, replace=1)
    for outcome in run.outcomes():
        assert_close(value_of(outcome), alone)
    assert alone["it"] == alone["steps"] == 21


@pytest.mark.parametrize("pause_at", [1, 9, 13, 14, 15])
def test_what_begins_an_epoch_is_not_done_again_after_a_restart_inside_it(tmp_path: Path, pause_at: int) -> None:
    """Of seven batches; also after the last one of an epoch, before the code that follows it. Bit by bit."""
    alone = value_of(run_member(begin_epochs, {}, root=tmp_path / "alone", membership=Membership("net")))
    paused = run_member(begin_epochs, {"pause_at": pause_at}, root=tmp_path / "crew", membership=Membership("net"))
    assert isinstance(paused.end, Paused), paused.error
    resumed = value_of(run_member(begin_epochs, {}, root=tmp_path / "crew", membership=Membership("net")))
    assert equal(resumed, alone)


@pytest.mark.slow
def test_what_begins_an_epoch_is_not_done_again_in_a_process_that_joins(crew: Crew, tmp_path: Path) -> None:
    alone = value_of(run_member(begin_epochs, {}, root=tmp_path / "alone", membership=Membership("net")))
    run = crew.start(2, tmp_path / "crew", begin_epochs, hold_at=10)
    run.until(lambda: (tmp_path / "crew" / "net" / "files" / HELD).exists() or run.ended)
    run.regroup(3, replace=1)
    for outcome in run.outcomes():
        assert_close(value_of(outcome), alone)


@pytest.mark.slow
def test_hyperparameters_that_are_set_in_a_batch_that_is_repeated_are_set_once(crew: Crew, tmp_path: Path) -> None:
    alone = value_of(run_member(begin_epochs, {}, root=tmp_path / "alone", membership=Membership("net")))
    outcomes = crew.start(3, tmp_path / "crew", begin_epochs, die_at=5).outcomes()
    for outcome in (outcomes[0], outcomes[-1]):
        assert_close(value_of(outcome), alone)


@pytest.mark.smoke
@pytest.mark.slow
@pytest.mark.parametrize("before_step", [False, True])
def test_a_batch_that_is_repeated_counts_once(crew: Crew, tmp_path: Path, before_step: bool) -> None:
    """Without ``if session.step(…)``; tensors and objects that were changed in place, too."""
    alone = value_of(
        run_member(carry, {"before_step": before_step}, root=tmp_path / "alone", membership=Membership("net"))
    )
    outcomes = crew.start(3, tmp_path / "crew", carry, die_at=5, before_step=before_step).outcomes()
    for outcome in (outcomes[0], outcomes[-1]):
        assert_close(value_of(outcome), alone)


@pytest.mark.slow
def test_a_loop_that_ends_by_its_counter_makes_all_steps(crew: Crew, tmp_path: Path) -> None:
    """Although its last step was interrupted: the counter does not advance in a batch that is repeated."""
    outcomes = crew.start(2, tmp_path, stop_by_count, die_at=9, last=10).outcomes()
    assert value_of(outcomes[0]) == (10, 10)


@pytest.mark.slow
def test_a_member_that_missed_the_end_of_a_step_takes_the_others_values_and_keeps_its_own(
    crew: Crew, tmp_path: Path
) -> None:
    """What follows the step in its loop has been done by the others; its own part of the batch counts."""
    run = crew.start(2, tmp_path, count_and_fall_behind, at=4)
    run.until(lambda: all(member.last(GroupFailed) for member in run.members))
    run.order(run.members, [], abort=True)
    assert [value_of(outcome) for outcome in run.outcomes()] == [(21, 21, 21)] * 2


@pytest.mark.slow
def test_a_failure_between_two_changes_of_a_batch_undoes_both(crew: Crew, tmp_path: Path) -> None:
    """Before the step; after it, the training job resumes from its checkpoint, as the step is not repeated."""
    outcomes = crew.start(2, tmp_path / "before", agree_and_die, die_at=4, after_step=False).outcomes()
    assert value_of(outcomes[0]) == (42, 42)
    outcomes = crew.start(2, tmp_path / "after", agree_and_die, die_at=4, after_step=True).outcomes()
    assert outcomes[0].error.startswith("PeerFailed")


@pytest.mark.slow
def test_running_statistics_of_an_average_may_differ_as_those_of_its_model_do(crew: Crew, tmp_path: Path) -> None:
    """Each process normalizes its own part of a batch; the parameters are compared."""
    run = crew.start(2, tmp_path, average_normed, hold_at=4)
    run.until(lambda: (tmp_path / "net" / "files" / HELD).exists() or run.ended)
    run.regroup(3)
    results = [value_of(outcome) for outcome in run.outcomes()]
    assert equal(results[0], results[1])
    assert equal(results[0], results[2])


@pytest.mark.slow
def test_a_small_tensor_that_changes_before_the_step_is_put_back(crew: Crew, tmp_path: Path) -> None:
    outcomes = crew.start(2, tmp_path, change_before_the_step, die_at=4, large=False).outcomes()
    assert value_of(outcomes[0]) == 14


@pytest.mark.slow
def test_what_cannot_be_put_back_resumes_from_the_checkpoint(crew: Crew, tmp_path: Path) -> None:
    """A large tensor that changed before the step; a count after the first of two steps on a batch."""
    outcomes = crew.start(2, tmp_path / "large", change_before_the_step, die_at=4, large=True).outcomes()
    assert outcomes[0].error.startswith("PeerFailed")
    for guarded in (True, False):
        outcomes = crew.start(2, tmp_path / f"two {guarded}", two_steps, guarded=guarded, die=True).outcomes()
        assert outcomes[0].error.startswith("PeerFailed")
    outcomes = crew.run(1, tmp_path / "two True", two_steps, guarded=True, die=False)
    assert value_of(outcomes[0]) == (14, 14)


@pytest.mark.slow
def test_each_process_keeps_its_own_and_newcomers_begin_with_the_first_values(crew: Crew, tmp_path: Path) -> None:
    run = crew.start(2, tmp_path, own, hold_at=5)
    run.until(lambda: (tmp_path / "net" / "files" / HELD).exists() or run.ended)
    run.regroup(2, replace=1)
    stayed, joined = (value_of(outcome) for outcome in run.outcomes())
    assert stayed == {"begun": (0, [0, 0]), "mine": 21, "hidden": [21, 21], "seen": [0] * 21, "it": 21}
    assert joined == {"begun": (0, [0, 0]), "mine": 16, "hidden": [32, 32], "seen": [1] * 16, "it": 21}


@pytest.mark.slow
def test_each_rank_gets_back_its_own_after_a_restart(crew: Crew, tmp_path: Path) -> None:
    for outcome in crew.run(2, tmp_path, own, pause_at=5):
        assert isinstance(outcome.end, Paused), outcome.error
    first, second, third = (value_of(outcome) for outcome in crew.run(3, tmp_path, own))
    assert first == {"begun": (5, [5, 5]), "mine": 21, "hidden": [21, 21], "seen": [0] * 21, "it": 21}
    assert second == {"begun": (5, [10, 10]), "mine": 21, "hidden": [42, 42], "seen": [1] * 21, "it": 21}
    assert third == {"begun": (0, [0, 0]), "mine": 16, "hidden": [48, 48], "seen": [2] * 16, "it": 21}


# ── in one process ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("pauses", [[7], [3, 10, 18]])
def test_it_is_restored_after_a_pause(tmp_path: Path, pauses: list[int]) -> None:
    alone = value_of(run_member(carry, {}, root=tmp_path / "alone", membership=Membership("net")))
    for step in pauses:
        paused = run_member(carry, {"pause_at": step}, root=tmp_path / "paused", membership=Membership("net"))
        assert isinstance(paused.end, Paused), paused.error
    resumed = value_of(run_member(carry, {}, root=tmp_path / "paused", membership=Membership("net")))
    assert torch.equal(resumed["total"], alone["total"])
    assert_close(resumed, alone)


def test_what_was_not_saved_keeps_its_first_value(tmp_path: Path) -> None:
    """A checkpoint of code that did not have the name."""

    def train(session: Any, **values: Any) -> Any:
        model, _ = session.prepare(nn.Linear(6, 3), torch.optim.SGD, lr=0.1)
        state = session.state(**values)
        for x, y in loop(session, 1):
            session.step(nn.functional.cross_entropy(model(x), y))
            state.it += 1
        return vars(state)

    run = Run(tmp_path)
    assert run(train, it=0).value["it"] == 7
    again = run(train, it=0, more=5).value
    assert (again["it"], again["more"]) == (7, 5)


def declared(**values: Any) -> Any:
    return LoopStates().declare(values, per_process=False, device=CPU)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda s: setattr(s, "itt", 1), r"'itt' is not declared, .* it has it, best: add itt=… to the call"),
        (lambda s: setattr(s, "best", np.zeros(2)), r"'best' is a ndarray; convert it: torch.as_tensor\(…\); it holds"),
        (lambda s: setattr(s, "best", {1, 2}), "'best' is a set; it holds numbers, strings, tensors, lists"),
        (lambda s: setattr(s, "best", (1, {2})), "'best' contains a set"),
        (lambda s: setattr(s, "best", torch.Generator()), r"keep its get_state\(\)"),
        (lambda s: setattr(s, "best", nn.Linear(1, 1)), r"'best' began as None, and a Linear .* keep its state_dict"),
        (lambda s: delattr(s, "best"), "cannot be deleted; assign None"),
    ],
)
def test_what_cannot_be_kept_is_refused_at_the_assignment(act: Callable[[Any], None], message: str) -> None:
    state = declared(it=0, best=None)
    with pytest.raises(UsageError, match=message) as caught:
        act(state)
    assert "\n" not in str(caught.value)
    assert (state.it, state.best) == (0, None)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "needs names and first values"),
        ({"_it": 0}, "begins with an underscore"),
        ({"opt": torch.optim.SGD([torch.zeros(1)], lr=1)}, "'opt' is a SGD; pass it to session.prepare"),
        ({"function": len}, "'function' is a builtin_function_or_method; it holds"),
        ({"model": nn.Linear}, "'model' is a type"),
    ],
)
def test_what_cannot_be_declared_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        declared(**values)


def test_names_are_declared_once_and_before_the_loop() -> None:
    def twice(session: Any) -> None:
        session.state(it=0)
        session.state(more=0, it=0)

    def late(session: Any) -> None:
        session.prepare(nn.Linear(6, 3), torch.optim.SGD, lr=0.1)
        for _ in loop(session, 1):
            session.state(it=0)

    with pytest.raises(UsageError, match="'it' is declared twice"):
        run_local(twice)
    with pytest.raises(UsageError, match=r"call session\.state before `for epoch in"):
        run_local(late)


def test_a_wrong_element_is_refused_when_it_is_saved() -> None:
    states = LoopStates()
    state = states.declare({"seen": []}, per_process=False, device=CPU)
    state.seen.append({1})
    with pytest.raises(UsageError, match="'seen' contains a set; it holds"):
        states.state()


def test_an_object_whose_state_cannot_be_saved_is_refused() -> None:
    class Odd:
        def state_dict(self) -> dict[str, Any]:
            return {"odd": self}

        def load_state_dict(self, state: Any) -> None: ...

    with pytest.raises(CheckpointError, match=r"the state of session\.state's odd cannot be saved"):
        declared(odd=Odd())


def test_numbers_of_numpy_become_pythons() -> None:
    states = LoopStates()
    state = states.declare({"best": np.float64(0.5), "seen": [np.int64(3)]}, per_process=False, device=CPU)
    assert type(state.best) is float
    state.best = np.float32(0.25)
    saved = states.state()["shared"]
    assert saved == {"best": 0.25, "seen": [3]}
    assert [type(saved["best"]), type(saved["seen"][0])] == [float, int]


def test_a_value_assigned_in_the_loop_is_not_overwritten_but_replaced() -> None:
    """It may be a view of other memory, such as the dataset."""
    states = LoopStates()
    first = torch.zeros(2)
    state = states.declare({"kept": first, "last": torch.zeros(2)}, per_process=False, device=CPU)
    dataset = torch.arange(4.0)
    state.last = dataset[:2]
    states.load({"shared": {"kept": torch.ones(2), "last": torch.ones(2)}, "own": []})
    assert state.kept is first
    assert first.tolist() == state.last.tolist() == [1, 1]
    assert dataset.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "value",
    [3, "text", None, torch.arange(3.0), [1, [2, torch.ones(1)]], {"a": (1, torch.ones(2))}, deque([1, 2], maxlen=2),
     OrderedDict(a=1), nn.Linear(2, 2), nn.Linear(600, 600)],
)  # fmt: skip
def test_what_an_interrupted_batch_changes_is_undone(value: Any) -> None:
    """After the interruption, in place or by assignment; and assignments are possible again with the next batch."""
    states = LoopStates()
    state = states.declare({"value": value, "it": 0}, per_process=False, device=CPU)
    before = states.state()["shared"]
    before = torch.utils._pytree.tree_map(lambda leaf: leaf.clone() if torch.is_tensor(leaf) else leaf, before)
    states.open_batch(PAIR)
    assert states.can_be_undone(has_stepped=False)
    states.cut()
    states.hold(repeats=True)
    change(state.value)
    state.it += 1
    assert state.it == 0
    states.release()
    assert_close(states.state()["shared"], before)
    assert state.value is value
    state.it += 1
    assert state.it == 1


def change(value: Any) -> None:
    """Change a value in place, if it can be."""
    if isinstance(value, torch.Tensor):
        value += 1
    elif isinstance(value, dict):
        value["b"] = 1
        change(value["a"])
    elif isinstance(value, tuple):
        change(value[-1])
    elif isinstance(value, (list, deque)):
        change(value[-1])
        value.append(5)
    elif isinstance(value, nn.Module):
        with torch.no_grad():
            value.weight += 1


def test_a_single_process_copies_nothing() -> None:
    states = LoopStates()
    states.declare({"value": torch.zeros(1)}, per_process=False, device=CPU)
    states.open_batch(Group())
    assert states._saved == {}
