"""A process is lost after any operation: the others do in all once what their code does around its steps.

Where that cannot be undone or continued, the training job resumes from its checkpoint.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from lost_habits import HABITS, counts_epochs, counts_epochs_at_a_sign
from lost_operations import Loss
from test_lost_operations import RunByHand

from freetrain_parsl.training.fragment import Finished, run_local

if TYPE_CHECKING:
    from pathlib import Path

    from crew import Crew
    from training_crew import Outcome

OPERATIONS = range(2, 9)
"""From the first boundary to the second batch."""
RESUMES = ("PeerFailed", "OutOfSync")


def assert_same(outcome: Outcome | None, alone: dict[str, Any]) -> None:
    assert outcome is not None
    assert isinstance(outcome.end, Finished), outcome.error
    torch.testing.assert_close(outcome.end.value["parameters"], alone["parameters"], rtol=0, atol=1e-11)
    for name in ("value", "samples", "steps"):
        assert outcome.end.value.get(name) == alone.get(name), name


def check(crew: Crew, root: Path, habit: str, loss: Loss) -> bool:
    """Lose a process of three; return whether all others have continued."""
    alone = run_local(HABITS[habit])
    run = crew.start(3, root, HABITS[habit], losses=[loss], timeout=10, without_ended=True)
    outcomes = run.outcomes()
    for outcome in (*outcomes, *(member.outcome for member in run.gone)):
        assert outcome is not None
        assert not outcome.error or outcome.error.startswith(RESUMES), outcome.error
        if isinstance(outcome.end, Finished):
            assert_same(outcome, alone)
    if not any(outcome and outcome.end for outcome in outcomes):
        outcomes = crew.start(2, root, HABITS[habit]).outcomes()
        for outcome in outcomes:
            assert_same(outcome, alone)
        return False
    return len(outcomes) == 2


@pytest.mark.slow
@pytest.mark.parametrize("behind", [(), (2,)], ids=["", "one-behind"])
@pytest.mark.parametrize("habit", HABITS)
def test_a_habit(crew: Crew, tmp_path: Path, habit: str, behind: tuple[int, ...]) -> None:
    continued = [check(crew, tmp_path / str(n), habit, Loss(n, 1, behind)) for n in OPERATIONS]
    assert any(continued), continued


@pytest.mark.slow
@pytest.mark.parametrize("operation", [3, 4])
def test_a_newcomer_repeats_no_code_before_the_batches(crew: Crew, tmp_path: Path, operation: int) -> None:
    """The others are in the first batch of the epoch."""
    run = run_by_hand(crew, tmp_path, operation)
    run.lose_beside_a_newcomer(tmp_path / "sign")
    outcomes = run.outcomes()
    assert len(outcomes) == 3
    for outcome in outcomes:
        assert_same(outcome, run_local(counts_epochs))


@pytest.mark.slow
@pytest.mark.parametrize("operation", [8, 9, 10])
def test_a_newcomer_repeats_no_code_after_the_batches(crew: Crew, tmp_path: Path, operation: int) -> None:
    """The others are in a call there, and continue without it."""
    run = run_by_hand(crew, tmp_path, operation)
    newcomer = run.lose_beside_a_newcomer(tmp_path / "sign")
    run.until(lambda: newcomer.outcome)
    assert newcomer.outcome is not None
    assert newcomer.outcome.error.startswith("OutOfSync"), newcomer.outcome.error
    run.continue_without(newcomer)
    for outcome in run.outcomes():
        assert_same(outcome, run_local(counts_epochs))


def run_by_hand(crew: Crew, root: Path, operation: int) -> RunByHand:
    losses = [Loss(operation, 1, ())]
    return RunByHand(crew, 3, root / "cut", counts_epochs_at_a_sign, sign=root / "sign", losses=losses)
