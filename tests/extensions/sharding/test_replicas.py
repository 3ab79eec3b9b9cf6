"""Replicas of a sharded job: their gradients are summed, and one continues when a process of another is killed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from replicated_trainings import shard_with_an_int, train_replicas
from training_crew import run_member

from freetrain_parsl.training.fragment import Finished, Membership
from tests.extensions.sharding.test_in_place import difference

if TYPE_CHECKING:
    from pathlib import Path

    from crew import Crew
    from training_crew import Outcome

pytestmark = pytest.mark.slow

OPTIONS = {"session_options": {"replicas": 2}, "replicas": 2}


def alone(root: Path, **options: Any) -> Any:
    outcome = run_member(train_replicas, {"shard": False, **options}, root=root, membership=Membership("net"))
    assert isinstance(outcome.end, Finished), outcome.error
    return outcome.end.value


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return alone(tmp_path_factory.mktemp("alone"))


def check_equal(outcomes: list[Outcome | None], expected: Any, *, members: int) -> list[Any]:
    assert len(outcomes) == members
    values = []
    for outcome in outcomes:
        assert outcome is not None
        assert isinstance(outcome.end, Finished), outcome.error
        value = outcome.end.value
        assert outcome.end.progress.resumed_from is None
        assert value["steps"] == expected["steps"]
        losses = [[epoch["loss"] for epoch in run["history"]] for run in (value, expected)]
        assert losses[0] == pytest.approx(losses[1], abs=1e-12)
        assert difference(value["parameters"], expected["parameters"]) < 1e-12
        assert difference(value["states"], expected["states"]) < 1e-12
        assert value["same"]
        values.append(value)
    return values


@pytest.mark.parametrize("members", [2, 4, 6])
def test_replicas_train_as_one_process_does(crew: Crew, tmp_path: Path, undisturbed: Any, members: int) -> None:
    """Batches of 7 samples: the members have different shares."""
    outcomes = crew.run(members, tmp_path, train_replicas, **OPTIONS)
    for value in check_equal(outcomes, undisturbed, members=members):
        assert (value["largest"] == 1.0) == (members == 2)


@pytest.mark.parametrize("point", ["forward", "backward", "hook", "optimizer", "between"])
@pytest.mark.parametrize("rank", [1, 2])
def test_a_replica_continues_when_a_process_of_another_is_killed(
    crew: Crew, tmp_path: Path, undisturbed: Any, point: str, rank: int
) -> None:
    """No step is repeated: each of the two makes the interrupted one again at most."""
    outcomes = crew.start(4, tmp_path, train_replicas, kill=(point, 5, (rank,)), **OPTIONS).outcomes()
    values = check_equal(outcomes, undisturbed, members=2)
    assert all(value["members"] == 2 and value["made"] <= undisturbed["steps"] + 1 for value in values)


@pytest.mark.parametrize(
    "options",
    [{"root_too": False, "clip": None}, {"micro_batch": 1}, {"micro_batch": 1, "root_too": False, "clip": None}],
)
@pytest.mark.parametrize("point", ["backward", "hook"])
def test_it_continues_within_a_batch_of_several_pieces_and_with_parameters_that_are_not_sharded(
    crew: Crew, tmp_path: Path, point: str, options: dict[str, Any]
) -> None:
    expected = alone(tmp_path / "alone", **options)
    run = crew.start(4, tmp_path / "cut", train_replicas, kill=(point, 5, (3,)), **options, **OPTIONS)
    check_equal(run.outcomes(), expected, members=2)


def test_the_others_of_three_replicas_continue(crew: Crew, tmp_path: Path, undisturbed: Any) -> None:
    options = {"session_options": {"replicas": 3}, "replicas": 3}
    run = crew.start(6, tmp_path, train_replicas, kill=("hook", 5, (2,)), **options)
    check_equal(run.outcomes(), undisturbed, members=4)


def test_processes_of_two_replicas_are_killed_at_once(crew: Crew, tmp_path: Path, undisturbed: Any) -> None:
    options = {"session_options": {"replicas": 3}, "replicas": 3}
    run = crew.start(6, tmp_path, train_replicas, kill=("backward", 5, (1, 4)), **options)
    check_equal(run.outcomes(), undisturbed, members=2)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((2, 1), (4, 2)),  # a replica joins
        ((4, 2), (2, 1)),  # one leaves
        ((4, 2), (6, 3)),
        ((4, 2), (6, 2)),  # each gets larger
        ((6, 2), (4, 2)),
        ((4, 2), (2, 2)),
        ((3, 1), (4, 2)),
        ((4, 2), (3, 1)),
        ((1, 1), (2, 2)),
    ],
)
def test_replicas_change_in_place(
    crew: Crew, tmp_path: Path, undisturbed: Any, before: tuple[int, int], after: tuple[int, int]
) -> None:
    """From so many processes and replicas to so many."""
    gate = tmp_path / "gate"
    options = {"session_options": {"replicas": 3}, "replicas": before[1]}
    run = crew.start(before[0], tmp_path, train_replicas, gates={4: gate}, **options)
    here = [gate.with_suffix(f".{rank}") for rank in range(before[0])]
    run.until(lambda: run.ended or all(file.exists() for file in here))
    run.regroup(after[0], replicas=after[1], release=gate.touch)
    values = check_equal(run.outcomes(), undisturbed, members=after[0])
    assert {value["members"] for value in values} == {after[0]}


def test_the_others_continue_if_a_replica_that_joins_is_killed_while_the_groups_of_replicas_form(
    crew: Crew, tmp_path: Path, undisturbed: Any
) -> None:
    gate = tmp_path / "gate"
    settings = {"kill": ("forming", -1, (-1,)), "gates": {4: gate}, "timeout": 3, **OPTIONS, "replicas": 1}
    run = crew.start(2, tmp_path, train_replicas, **settings)
    run.until(lambda: run.ended or all(gate.with_suffix(f".{rank}").exists() for rank in range(2)))
    run.regroup(4, replicas=2, release=gate.touch)
    check_equal(run.outcomes(), undisturbed, members=2)


def test_a_lost_replica_is_filled_from_the_other_and_survives_it(crew: Crew, tmp_path: Path, undisturbed: Any) -> None:
    """The second of two is killed, joins again, and continues when the first is killed."""
    gate, second = tmp_path / "gate", tmp_path / "second"
    run = crew.start(4, tmp_path, train_replicas, kill=("hook", 3, (2,)), gates={6: gate, 9: second}, **OPTIONS)
    run.until(lambda: run.ended or all(gate.with_suffix(f".{rank}").exists() for rank in range(2)))
    assert len(run.members) == 2
    run.regroup(4, replicas=2, release=gate.touch)
    run.until(lambda: run.ended or all(second.with_suffix(f".{rank}").exists() for rank in range(4)))
    run.kill(0)
    second.touch()
    check_equal(run.outcomes(), undisturbed, members=2)


def test_an_int_of_reshard_after_forward_is_refused(crew: Crew, tmp_path: Path) -> None:
    """In torch, processes of different replicas would form groups of the same name, and wait for each other."""
    errors = [outcome.error for outcome in crew.run(8, tmp_path, shard_with_an_int, **OPTIONS) if outcome]
    assert len(errors) == 8
    assert all(error.startswith("UsageError: fully_shard(reshard_after_forward=2) cannot be") for error in errors)


def test_replicas_of_a_model_that_is_not_sharded_are_refused(crew: Crew, tmp_path: Path) -> None:
    outcomes = crew.run(2, tmp_path, train_replicas, shard=False, **OPTIONS)
    assert all(outcome and outcome.error.startswith("UsageError: replicas is for models") for outcome in outcomes)
