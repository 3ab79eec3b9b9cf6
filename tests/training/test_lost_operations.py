"""A failure reaches some processes before and others after the end of an operation; all repeat the same batch."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import torch
from crew import Crew, CrewRun
from lost_operations import BODIES, Loss, train, train_and_count, train_at_a_sign, train_by_iterators, train_in_pieces

from freetrain_parsl.protocol.reports import GroupFailed, Ready
from freetrain_parsl.training.fragment import Finished, run_local
from freetrain_parsl.training.mailbox import Regroup

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from crew import Member
    from training_crew import Outcome

OPERATIONS = {"in_loss": range(2, 14), "before_step": range(2, 9), "decision_after_step": range(2, 8)}
"""From the first boundary to the second operation of the second batch."""
BOUNDARIES = {"sum_after_step": (2, 6)}
"""A sum after the step is lost with a process: then the training job resumes from its checkpoint."""


def assert_undisturbed(crew: Crew, root: Path, kind: str, losses: Sequence[Loss], size: int) -> None:
    outcomes = crew.start(size, root, train, kind=kind, losses=losses).outcomes()
    assert len(outcomes) == size - len(losses), losses
    assert_equal(outcomes, run_local(train, kind=kind))


def assert_equal(outcomes: Sequence[Outcome | None], alone: dict[str, Any]) -> None:
    for outcome in outcomes:
        assert outcome is not None
        assert isinstance(outcome.end, Finished), outcome.error
        torch.testing.assert_close(outcome.end.value["parameters"], alone["parameters"], rtol=0, atol=1e-11)
        assert outcome.end.value["samples"] == alone["samples"]


@pytest.mark.slow
@pytest.mark.parametrize("behind", [0, 2])
@pytest.mark.parametrize("kind", BODIES)
def test_a_process_misses_the_result_of_an_operation(crew: Crew, tmp_path: Path, kind: str, behind: int) -> None:
    operations = (OPERATIONS | BOUNDARIES)[kind]
    for operation in operations[behind // 2 :: 2] if kind == "in_loss" else operations:  # they take twice as long
        assert_undisturbed(crew, tmp_path / str(operation), kind, [Loss(operation, 1, (behind,))], 3)


@pytest.mark.slow
@pytest.mark.parametrize("operation", [4, 7, 8])
def test_a_loop_with_an_iterator_for_each_batch(crew: Crew, tmp_path: Path, operation: int) -> None:
    for behind in ((0,), (2,)):
        losses = [Loss(operation, 1, behind)]
        outcomes = crew.start(3, tmp_path / str(behind), train_by_iterators, losses=losses).outcomes()
        assert len(outcomes) == 2
        assert_equal(outcomes, run_local(train_by_iterators))


@pytest.mark.slow
def test_what_would_not_be_repeated_is_not_undone(crew: Crew, tmp_path: Path) -> None:
    """The training job resumes from its checkpoint instead."""
    (first,) = crew.start(2, tmp_path, train_and_count).outcomes()
    assert first is not None
    assert first.error.startswith("PeerFailed")
    (last,) = crew.start(1, tmp_path, train_and_count).outcomes()
    alone = run_local(train_and_count)
    assert_equal([last], alone)
    assert last is not None
    assert last.end.value["epochs"] == alone["epochs"]  # type: ignore[union-attr]  # it has finished


@pytest.mark.slow
def test_processes_that_have_the_same_piece_of_a_batch_repeat_it_and_others_resume(crew: Crew, tmp_path: Path) -> None:
    alone = run_local(train_in_pieces)
    for operation in range(2, 9):
        outcomes = crew.start(3, tmp_path / str(operation), train_in_pieces, losses=[Loss(operation, 1, ())]).outcomes()
        assert len(outcomes) == 2
        assert_equal(outcomes, alone)
    in_first_piece, first_call = (0,), 3
    outcomes = crew.start(3, tmp_path, train_in_pieces, losses=[Loss(first_call, 1, in_first_piece)]).outcomes()
    assert [outcome and outcome.error.partition(":")[0] for outcome in outcomes] == ["OutOfSync"] * 2


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("kind", OPERATIONS)
def test_another_one_is_lost_while_the_batch_is_repeated(crew: Crew, tmp_path: Path, kind: str, seed: int) -> None:
    draw = random.Random(seed)
    first, second, *others = draw.sample(range(4), 4)
    behind = draw.choice([(others[0],), (others[0], second), (second,)])
    losses = [
        Loss(draw.choice(OPERATIONS[kind]), first, behind),
        Loss(draw.randint(1, 8), second, (draw.choice(others),)),
    ]
    assert_undisturbed(crew, tmp_path, kind, losses, 4)


class RunByHand(CrewRun):
    """One whose members get their commands from the test."""

    def _lose(self, member: Member) -> None:
        member.lost = True

    def command(self, members: list[Member]) -> None:
        for member, membership in zip(members, self._memberships(len(members)), strict=True):
            member.tell("order", Regroup(membership, abort=True))
        self.members = members

    def lose_beside_a_newcomer(self, sign: Path) -> Member:
        """Lose the second member when a newcomer is ready; let those that are left continue with it."""
        (newcomer,) = self.newcomers = self._crew.idle(1, self.members)
        self._begin(newcomer, None, 3)
        self.until(lambda: newcomer.last(Ready))
        sign.touch()
        self.until(lambda: self.members[1].lost)
        survivors = [self.members[0], self.members[2]]
        self.until(lambda: all(member.last(GroupFailed) for member in survivors))
        self.newcomers = []
        self.command([*survivors, newcomer])
        return newcomer

    def continue_without(self, newcomer: Member) -> None:
        """Let the others continue once its end has reached them."""
        survivors = [member for member in self.members if member is not newcomer]
        self.until(lambda: all(len([r for r in one.reports if isinstance(r, GroupFailed)]) == 2 for one in survivors))
        self.command(survivors)


def by_hand(crew: Crew, root: Path, **kwargs: Any) -> RunByHand:
    return RunByHand(crew, 3, root / "cut", train_at_a_sign, sign=root / "sign", **kwargs)


@pytest.mark.slow
@pytest.mark.parametrize(("operation", "behind"), [(1, 0), (2, 0), (2, 2)])
@pytest.mark.parametrize("kind", BODIES)
def test_a_newcomer_takes_part_in_the_interrupted_batch(
    crew: Crew, tmp_path: Path, kind: str, operation: int, behind: int
) -> None:
    """One of the others has passed the boundary before it, or the exchange before that, and one has not."""
    run = by_hand(crew, tmp_path, kind=kind, losses=[Loss(operation, 1, (behind,))])
    run.lose_beside_a_newcomer(tmp_path / "sign")
    outcomes = run.outcomes()
    assert len(outcomes) == 3
    assert_equal(outcomes, run_local(train, kind=kind))


@pytest.mark.slow
def test_a_newcomer_does_not_join_where_it_has_missed_a_call(crew: Crew, tmp_path: Path) -> None:
    """The others have ended the first of two calls in the loop's body; they continue without it."""
    run = by_hand(crew, tmp_path, kind="before_step", losses=[Loss(3, 1, ())])
    newcomer = run.lose_beside_a_newcomer(tmp_path / "sign")
    run.until(lambda: newcomer.outcome)
    assert newcomer.outcome is not None
    assert newcomer.outcome.error.startswith("OutOfSync"), newcomer.outcome.error
    run.continue_without(newcomer)
    assert_equal(run.outcomes(), run_local(train, kind="before_step"))
