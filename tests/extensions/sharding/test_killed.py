"""A process is killed at every point of a change in place: the others continue, or resume from their checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from sharded_cases import EXACT, Case, train_case
from training_crew import run_member

from freetrain_parsl.training.fragment import Finished, Membership
from tests.extensions.sharding.test_in_place import difference

if TYPE_CHECKING:
    from pathlib import Path

    from crew import Crew
    from training_crew import Outcome

pytestmark = pytest.mark.slow

CASE = Case(ema=True)
POINTS = ("before the move", "in the move", "after the move", "after all have moved", "after its commit")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    root = tmp_path_factory.mktemp("alone")
    outcome = run_member(train_case, {"case": CASE, "shard": False}, root=root, membership=Membership("net"))
    assert isinstance(outcome.end, Finished), outcome.error
    return outcome.end.value


def changed(
    crew: Crew, root: Path, before: int, after: int, point: str, ranks: tuple[int, ...]
) -> list[Outcome | None]:
    """Change the number of members at a step; some of these ranks, -1 for newcomers, are killed at a point."""
    root.mkdir(exist_ok=True)
    gate = root / "gate"
    run = crew.start(before, root / "cut", train_case, case=CASE, gates={4: gate}, dies=(point, ranks))
    here = [gate.with_suffix(f".{rank}") for rank in range(before)]
    run.until(lambda: run.ended or all(file.exists() for file in here))
    run.regroup(after, release=gate.touch)
    return run.outcomes()


def check_same(outcomes: list[Outcome | None], alone: Any, *, members: int) -> None:
    assert len(outcomes) == members
    for outcome in outcomes:
        assert outcome is not None
        assert isinstance(outcome.end, Finished), outcome.error
        assert outcome.end.progress.resumed_from is None
        assert outcome.end.value["same"]
        assert difference(outcome.end.value["model"], alone["model"]) < EXACT


def check_given_up(outcomes: list[Outcome | None]) -> None:
    """Compare with members that resume from their checkpoint."""
    assert outcomes
    assert {outcome.error.partition(":")[0] for outcome in outcomes if outcome} <= {"StateLost", "PeerFailed"}


@pytest.mark.parametrize("point", POINTS)
def test_the_others_continue_without_a_newcomer(crew: Crew, tmp_path: Path, alone: Any, point: str) -> None:
    """They still have their old shards."""
    check_same(changed(crew, tmp_path / "root", 2, 3, point, (-1,)), alone, members=2)


def test_the_others_continue_without_two_newcomers(crew: Crew, tmp_path: Path, alone: Any) -> None:
    check_same(changed(crew, tmp_path / "root", 2, 4, "in the move", (-1,)), alone, members=2)


@pytest.mark.parametrize("point", ["in the move", "after all have moved", "after the drop"])
def test_without_a_member_that_stays_the_job_resumes_from_its_checkpoint(
    crew: Crew, tmp_path: Path, point: str
) -> None:
    """It alone had its part."""
    check_given_up(changed(crew, tmp_path / "root", 2, 3, point, (1,)))


@pytest.mark.parametrize("point", ["before the move", "in the move"])
def test_without_a_member_that_leaves_the_job_resumes_from_its_checkpoint(
    crew: Crew, tmp_path: Path, point: str
) -> None:
    """It had not given its part away yet."""
    check_given_up(changed(crew, tmp_path / "root", 3, 2, point, (2,)))


def test_the_others_continue_without_a_member_that_has_given_its_part_away(
    crew: Crew, tmp_path: Path, alone: Any
) -> None:
    """All that stay have their new parts by then."""
    check_same(changed(crew, tmp_path / "root", 3, 2, "after it has given its part away", (2,)), alone, members=2)
