"""Members join, leave and die during a training job; its result equals that of an undisturbed one."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from training_crew import SAMPLES, classify, diverge, fail, first_before_the_loop, lag, pass_states, run_member

from freetrain_parsl.protocol.reports import GroupFailed, Joined, PauseReason, Progress
from freetrain_parsl.training.data.loader_options import LoaderOptions
from freetrain_parsl.training.fragment import Finished, Membership, Paused

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from crew import Crew, CrewRun
    from training_crew import Outcome

pytestmark = pytest.mark.slow

EPOCHS = 3
STEPS = EPOCHS * -(-SAMPLES // 8)
BITWISE = {"deterministic": True, "options": LoaderOptions(shards=4), "dropout": 0.3}
MODES: tuple[dict[str, Any], ...] = ({}, BITWISE, {"micro_batch": 2})


@dataclass(frozen=True)
class Event:
    """A disturbance at a step."""

    step: int
    what: str
    size: int = 1
    """Number of members afterwards, for ``regroup`` and ``restart``."""


def parameters(end: Finished | Paused | None) -> torch.Tensor:
    """Return all parameters of a checkpoint in one vector."""
    assert end is not None
    assert end.checkpoint is not None
    model = torch.load(end.checkpoint / "state.pt", weights_only=True)["objects"]["model"]
    return torch.cat([tensor.flatten() for tensor in model.values()])


def undisturbed(root: Path, **kwargs: Any) -> Finished:
    outcome = run_member(classify, {"epochs": EPOCHS, **kwargs}, root=root, membership=Membership("net"))
    assert isinstance(outcome.end, Finished), outcome.error
    return outcome.end


def disturbed(crew: Crew, root: Path, size: int, events: Iterable[Event], **kwargs: Any) -> Finished:
    """Train with these disturbances, each at its step."""
    events = sorted(events, key=lambda event: event.step)
    gates = {event.step: root / f"gate-{event.step}" for event in events}
    kwargs = {"epochs": EPOCHS, "gates": gates, "session_options": {"keep": 3}, **kwargs}
    run = crew.start(size, root / "cut", classify, **kwargs)
    for event in events:
        gate = gates[event.step]
        if event.what == "regroup":
            run.regroup(event.size, release=gate.touch)
        elif event.what == "replace first":
            run.regroup(len(run.members), replace=1, release=gate.touch)
        elif event.what == "kill" and len(run.members) > 1:
            lose(run, event.size % len(run.members), gate)
        elif event.what in ("restart", "corrupt"):
            run.pause(gate.touch)
            checkpoints = sorted((root / "cut" / "net").glob("step-*"))
            if event.what == "corrupt" and len(checkpoints) > 1:
                (checkpoints[-1] / "state.pt").write_bytes(b"not what was written")
            run = crew.start(event.size, root / "cut", classify, **kwargs)
        else:
            gate.touch()
    return first(run)


def lose(run: CrewRun, rank: int, gate: Path) -> None:
    """Kill a member and wait until the others continue."""
    run.until(lambda: run.progress)  # before the first group has formed there is nothing to save
    before = len(run.members)
    run.kill(rank)
    gate.touch()
    run.until(lambda: len(run.members) < before or run.ended)


def first(run: CrewRun) -> Finished:
    outcomes = run.outcomes()
    assert all(outcome and not outcome.error for outcome in outcomes), outcomes
    assert outcomes[0] is not None
    assert isinstance(outcomes[0].end, Finished)
    return outcomes[0].end


def assert_same(end: Finished, whole: Finished, *, bits: bool) -> None:
    """Compare samples, history and parameters."""
    assert (end.progress.step, end.progress.samples) == (STEPS, EPOCHS * SAMPLES)
    assert (end.progress.samples_lost, end.progress.duplicate_samples) == (0, 0)
    assert len(end.value["history"]) == EPOCHS
    if bits:
        assert end.value == whole.value
        assert torch.equal(parameters(end), parameters(whole))
    else:
        for row, expected in zip(end.value["history"], whole.value["history"], strict=True):
            assert row == pytest.approx(expected, abs=1e-5)
        assert torch.allclose(parameters(end), parameters(whole), atol=1e-4)


@pytest.mark.parametrize("mode", MODES, ids=["default", "deterministic", "micro-batches"])
def test_members_come_go_and_die_and_the_result_is_the_same(crew: Crew, tmp_path: Path, mode: dict[str, Any]) -> None:
    """2 -> 4 -> 3 -> one of them killed -> the first replaced; no checkpoint is read."""
    events = (
        Event(2, "regroup", 4),
        Event(7, "regroup", 3),
        Event(12, "kill", 0),
        Event(17, "replace first"),
    )
    end = disturbed(crew, tmp_path, 2, events, **mode)
    assert end.progress.resumed_from is None
    assert_same(end, undisturbed(tmp_path / "whole", **mode), bits=mode is BITWISE)


def test_orders_that_take_long_to_arrive_are_carried_out_at_their_step(crew: Crew, tmp_path: Path) -> None:
    """One member, with commands for its first two steps, which it receives half a second late."""
    gates = {step: tmp_path / f"gate-{step}" for step in (1, 2, 3)}
    run = crew.start(1, tmp_path / "cut", classify, epochs=EPOCHS, gates=gates)
    slow = run.members[0]
    slow.tell("hear slowly", 0.5)
    run.regroup(2, release=gates[1].touch)
    run.regroup(1, release=gates[2].touch)
    slow.tell("hear slowly", 0.0)
    run.pause(gates[3].touch)
    assert run.progress is not None
    assert run.progress.step == 3


@settings(
    max_examples=12,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],  # an example takes seconds, so shrinking is too slow
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    size=st.integers(1, 4),
    mode=st.sampled_from(MODES),
    steps=st.lists(st.integers(1, STEPS - 1), min_size=2, max_size=4, unique=True),
    data=st.data(),
)
def test_no_schedule_of_disturbances_changes_the_result(
    crew: Crew, tmp_path_factory: pytest.TempPathFactory, size: int, mode: dict[str, Any], steps: list[int], data: Any
) -> None:
    """Growing, shrinking, killing, restarting, damaged checkpoints, in any order."""
    kinds = data.draw(
        st.lists(
            st.sampled_from(["regroup", "regroup", "replace first", "kill", "restart", "corrupt"]),
            min_size=len(steps),
            max_size=len(steps),
        ).filter(lambda kinds: kinds.count("kill") < 2)  # starting a process takes seconds
    )
    events = [Event(step, kind, data.draw(st.integers(1, 4))) for step, kind in zip(steps, kinds, strict=True)]
    root = tmp_path_factory.mktemp("schedule")
    end = disturbed(crew, root, size, events, **mode)
    assert_same(end, undisturbed(root / "whole", **mode), bits=mode is BITWISE)


@pytest.mark.smoke
def test_survivors_stay_and_pause_for_a_moment_only(crew: Crew, tmp_path: Path) -> None:
    """The same processes, an unchanged checkpoint directory, and every member reports its pause."""
    gates = {4: tmp_path / "go"}
    crew.warm(3)
    run = crew.start(2, tmp_path, classify, gates=gates)
    before = {member.process.pid for member in run.members}
    run.regroup(3, release=gates[4].touch)
    told = [member.last(Joined) for member in run.members]
    assert before < {member.process.pid for member in run.members}
    assert len({regrouped.generation for regrouped in told}) == 1
    assert max(regrouped.paused for regrouped in told) < 5
    first(run)


def test_only_one_process_is_the_first_before_the_loop_too(crew: Crew, tmp_path: Path) -> None:
    """A newcomer is not the first before it joins: ``if session.is_main_process`` before the loop is true once."""
    gates = {4: tmp_path / "go"}
    run = crew.start(1, tmp_path, first_before_the_loop, gates=gates)
    run.regroup(3, release=gates[4].touch)
    ends = [outcome.end for outcome in run.outcomes() if outcome]
    assert [end.value for end in ends if isinstance(end, Finished)] == [(True, 0, 1), (False, -1, 1), (False, -1, 1)]


@pytest.mark.smoke
def test_who_leaves_ends_without_a_checkpoint_of_its_own(crew: Crew, tmp_path: Path) -> None:
    gates = {4: tmp_path / "go"}
    run = crew.start(3, tmp_path, classify, gates=gates)
    leaver = run.members[2]
    run.regroup(2, release=gates[4].touch)
    run.until(lambda: leaver.outcome)
    assert leaver.outcome is not None
    assert isinstance(leaver.outcome.end, Paused)
    assert (leaver.outcome.end.reason, leaver.outcome.end.checkpoint) == (PauseReason.LEFT, None)
    first(run)


def test_a_stopped_member_is_left_behind_by_order(crew: Crew, tmp_path: Path) -> None:
    """SIGSTOP causes no error by itself; the abort command wakes the members that wait in a collective."""
    gates = {4: tmp_path / "go"}
    run = crew.start(3, tmp_path, classify, gates=gates)
    run.until(lambda: run.progress)
    stopped = run.members[1]
    os.kill(stopped.process.pid, signal.SIGSTOP)
    try:
        gates[4].touch()
        with pytest.raises(TimeoutError):
            run.until(lambda: run.ended or any(member.last(GroupFailed) for member in run.members), 0.5)
        run.order([run.members[0], run.members[2]], [], abort=True)
        assert run.members[0].last(Joined) is not None
    finally:
        os.kill(stopped.process.pid, signal.SIGKILL)
    assert_same(first(run), undisturbed(tmp_path / "whole"), bits=False)


def test_a_member_that_is_alone_goes_on_and_can_be_joined(crew: Crew, tmp_path: Path) -> None:
    end = disturbed(crew, tmp_path, 1, (Event(3, "regroup", 3), Event(9, "regroup", 1), Event(15, "regroup", 2)))
    assert_same(end, undisturbed(tmp_path / "whole"), bits=False)


@pytest.mark.parametrize("mode", MODES[:2], ids=["default", "deterministic"])
@pytest.mark.parametrize("at", [3, 6, 7], ids=["in an epoch", "at its last step", "at its first step"])
def test_who_is_a_step_behind_gets_the_state_of_who_is_ahead(
    crew: Crew, tmp_path: Path, mode: dict[str, Any], at: int
) -> None:
    """One member received the sum of the gradients, the other an error: the step is made once."""
    run = crew.start(2, tmp_path / "cut", lag, at=at, epochs=EPOCHS, **mode)
    run.until(lambda: all(member.last(GroupFailed) for member in run.members))
    run.order(run.members, [], abort=True)
    assert_same(first(run), undisturbed(tmp_path / "whole", **mode), bits=mode is BITWISE)


@pytest.mark.smoke
def test_states_of_all_kinds_arrive_as_they_are(crew: Crew, tmp_path: Path) -> None:
    """Two sources, two receivers; small, large, empty, zero-dimensional and non-contiguous tensors."""
    outcomes = crew.run(4, tmp_path, pass_states)
    assert [outcome and (outcome.error, outcome.end and outcome.end.value) for outcome in outcomes] == [("", True)] * 4


def test_a_loss_that_is_not_a_number_ends_the_training_on_all_members(crew: Crew, tmp_path: Path) -> None:
    outcomes = crew.run(2, tmp_path, diverge)
    assert [kind(outcome) for outcome in outcomes] == ["NonFiniteLoss"] * 2
    assert not list((tmp_path / "net").glob("step-*")), "a non-finite state is not saved"


def test_an_error_of_the_users_own_ends_the_others_too(crew: Crew, tmp_path: Path) -> None:
    run = crew.start(3, tmp_path, fail, rank=1)
    assert [kind(outcome) for outcome in run.outcomes()] == ["PeerFailed", "ZeroDivisionError", "PeerFailed"]


def kind(outcome: Outcome | None) -> str:
    assert outcome is not None
    return outcome.error.partition(":")[0]


def test_reports_come_from_the_first_member_only(crew: Crew, tmp_path: Path) -> None:
    run = crew.start(2, tmp_path, classify, epochs=1)
    run.outcomes()
    told = [any(isinstance(report, Progress) for report in member.reports) for member in run.members]
    assert told == [True, False]
