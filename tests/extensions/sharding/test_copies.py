"""Copies of a sharded state in the memory of other nodes: after the loss of a node, nothing is read from disk."""

from __future__ import annotations

import shutil
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch
from sharded_cases import EXACT
from sharded_trainings import Fault, classify_sharded, classify_with_faults
from training_crew import SAMPLES, run_member

from freetrain_parsl.training.fragment import Finished, Membership

if TYPE_CHECKING:
    from pathlib import Path

    from crew import Crew
    from training_crew import Outcome

pytestmark = pytest.mark.slow

EPOCHS = 2
HABIT = {"double": True, "awaits_copies": True, "clip": 0.05}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    root = tmp_path_factory.mktemp("plain")
    outcome = run_member(classify_sharded, {"shard": False, **HABIT}, root=root, membership=Membership("net"))
    assert isinstance(outcome.end, Finished), outcome.error
    return outcome.end


@pytest.mark.smoke
@pytest.mark.parametrize("size", [2, 3])
def test_a_lost_node_costs_the_steps_since_the_last_copy(
    crew: Crew, tmp_path: Path, expected: Finished, size: int
) -> None:
    """Every rank once: the others continue on one node less, from step 6, with the result of an undisturbed run."""
    for rank in range(size):
        root = tmp_path / str(rank)
        lost = crew.run(size, root, classify_sharded, kill_after=8, kill_rank=rank, **every(3), **HABIT)
        assert errors(lost) == ["PeerFailed"] * (size - 1)
        end = ends(crew.run(size - 1, root, classify_sharded, **every(3), **HABIT))[0]
        assert end.progress.resumed_from == 6
        assert end.progress.checkpoint_step is not None
        assert_same(end, expected)


COPIES = "freetrain_parsl.extensions.sharding.copies"
SEND = f"{COPIES}:_Transfer._exchange"  # sizes, head and content of each copy
SEAL = "freetrain_parsl.training.node_memory:Shelf.seal"  # one's own, then the other member's
POINTS = {
    "forward": ("torch.nn:Tanh.forward", 8),
    "step": ("torch.optim:Adam.step", 8),
    "before a copy": (f"{COPIES}:Copies.begin", 2),
    "between the own copy and the transfer": (f"{COPIES}:_Transfer.__init__", 2),
    "sizes": (SEND, 4),
    "head": (SEND, 5),
    "content": (SEND, 6),
    "complete": (f"{COPIES}:Copies.complete", 2),
}


@pytest.mark.parametrize("point", POINTS)
def test_a_process_is_killed_at_any_point(crew: Crew, tmp_path: Path, expected: Finished, point: str) -> None:
    """A new process takes its place, which has no copies. In a copy, the one before counts."""
    fault = Fault(1, *POINTS[point])
    lost = crew.run(3, tmp_path, classify_with_faults, faults=(fault,), **every(3), **{**HABIT, "awaits_copies": False})
    assert errors(lost) == ["PeerFailed"] * 2
    end = ends(crew.run(3, tmp_path, classify_sharded, **every(3), **HABIT))[0]
    assert end.progress.resumed_from in ((3, 6) if point in {"forward", "step", "content", "complete"} else (3,))
    assert_same(end, expected)


def test_two_neighbours_that_are_lost_cost_the_steps_since_the_checkpoint(
    crew: Crew, tmp_path: Path, expected: Finished
) -> None:
    ends(crew.run(3, tmp_path, classify_sharded, pause_after=4, **every(3), **HABIT))
    faults = tuple(Fault(rank, "torch.nn:Tanh.forward", 5) for rank in (0, 1))
    assert errors(crew.run(3, tmp_path, classify_with_faults, faults=faults, **every(1), **HABIT)) == ["PeerFailed"]
    end = ends(crew.run(2, tmp_path, classify_sharded, **every(3), **HABIT))[0]
    assert end.progress.resumed_from == 4
    assert_same(end, expected, from_memory=False)


@pytest.mark.parametrize(
    ("stall", "resumed"),
    [(Fault(2, SEND, 6, kills=False), 3), (Fault(0, SEAL, 4, kills=False), 6)],
    ids=["a part is missing", "all parts are there"],
)
def test_a_copy_that_did_not_arrive_everywhere_is_used_only_if_all_parts_are_there(
    crew: Crew, tmp_path: Path, expected: Finished, stall: Fault, resumed: int
) -> None:
    """Rank 1 is lost, whose part is kept by rank 2; rank 0 keeps that of rank 2, which is not lost."""
    faults = (stall, Fault(1, "torch.nn:Tanh.forward", 10))
    habit = {**HABIT, "awaits_copies": False, "pauses": 0.1}
    lost = crew.run(3, tmp_path, classify_with_faults, faults=faults, **every(3), **habit)
    assert errors(lost) == ["PeerFailed"] * 2
    end = ends(crew.run(2, tmp_path, classify_sharded, **every(3), **HABIT))[0]
    assert end.progress.resumed_from == resumed
    assert_same(end, expected)


def test_a_copy_that_never_arrives_does_not_stop_the_training(crew: Crew, tmp_path: Path, expected: Finished) -> None:
    """Nor the end of the job, with a thread that still waits for its neighbour."""
    stall = (Fault(0, SEND, 6, kills=False),)
    habit = {**HABIT, "awaits_copies": False}
    run = crew.run(3, tmp_path, classify_with_faults, faults=stall, **every(3), **habit)
    assert_same(ends(run)[0], expected, from_memory=False)
    assert max(outcome.seconds for outcome in run if outcome) < 30


def test_a_second_node_may_be_lost_as_soon_as_the_others_continue(
    crew: Crew, tmp_path: Path, expected: Finished
) -> None:
    """A copy follows at once in the new group: parts of the old one are on one node only."""
    crew.run(3, tmp_path, classify_sharded, kill_after=8, kill_rank=2, **every(6), **HABIT)
    assert errors(crew.run(2, tmp_path, classify_sharded, kill_after=7, **every(6), **HABIT)) == ["PeerFailed"]
    end = ends(crew.run(1, tmp_path, classify_sharded, **every(6), **HABIT))[0]
    assert end.progress.resumed_from == 6
    assert_same(end, expected)


@pytest.mark.parametrize("change", [3, 2], ids=["grown", "shrunk"])
def test_after_a_change_in_place_the_next_copy_is_of_the_new_group(
    crew: Crew, tmp_path: Path, expected: Finished, change: int
) -> None:
    """Made at once: parts of the one before may be on nodes that have left, or on new ones not at all."""
    gates = {step: tmp_path / f"gate-{step}" for step in (6, 8)}
    habit = {**HABIT, "gates": gates, "kill_after": 9, "kill_rank": 1}
    run = crew.start(5 - change, tmp_path / "cut", classify_sharded, recover=False, **every(5), **habit)
    run.until(gates[6].with_suffix(".reached").exists)
    run.regroup(change, release=gates[6].touch)
    gates[8].touch()
    run.until(lambda: run.ended)
    assert errors(run.outcomes()) == ["PeerFailed"] * (change - 1)
    end = ends(crew.run(change - 1, tmp_path / "cut", classify_sharded, **every(5), **HABIT))[0]
    assert end.progress.resumed_from == 7
    assert_same(end, expected)


def test_without_copies_the_training_job_resumes_from_its_checkpoint(crew: Crew, tmp_path: Path) -> None:
    ends(crew.run(2, tmp_path, classify_sharded, pause_after=4, **every(None), **HABIT))
    crew.run(2, tmp_path, classify_sharded, kill_after=9, **every(None), **HABIT)
    assert ends(crew.run(1, tmp_path, classify_sharded, **every(None), **HABIT))[0].progress.resumed_from == 4


def test_copies_are_those_of_one_training_job(crew: Crew, tmp_path: Path) -> None:
    """Another job in the same processes, or the same one after its directory was removed, begins anew."""
    for root, removed in ((tmp_path / "one", False), (tmp_path / "other", True)):
        crew.run(2, root, classify_sharded, kill_after=9, **every(2), **HABIT)
        if removed:
            shutil.rmtree(root / "net")
            (tmp_path / "in its place").mkdir()
        else:
            root = tmp_path / "third"  # noqa: PLW2901 - of another training job
        assert ends(crew.run(1, root, classify_sharded, **every(2), **HABIT))[0].progress.resumed_from is None


ONLY_SAVES = {"session_options": {"snapshot_every": 1000, "checkpoint_interval": timedelta(milliseconds=1)}}


@pytest.mark.parametrize("from_memory", [True, False], ids=["copy", "checkpoint"])
def test_what_is_copied_for_a_checkpoint_is_copied_to_a_neighbour_as_well(
    crew: Crew, tmp_path: Path, expected: Finished, from_memory: bool
) -> None:
    """One copy of the state, with which the training job continues from either."""
    lost = crew.run(3, tmp_path, classify_sharded, kill_after=8, kill_rank=1, **ONLY_SAVES, **HABIT)
    assert errors(lost) == ["PeerFailed"] * 2
    end = ends(crew.run(2, tmp_path, classify_sharded, **every(1000 if from_memory else None), **HABIT))[0]
    assert end.progress.resumed_from is not None
    assert_same(end, expected, from_memory=from_memory)


def test_a_process_that_is_killed_while_it_writes_from_a_copy_leaves_the_checkpoint_before(
    crew: Crew, tmp_path: Path, expected: Finished
) -> None:
    write = "torch.distributed.checkpoint.filesystem:FileSystemWriter.write_data"
    habit = {**HABIT, "awaits_copies": False, "pauses": 0.1}
    lost = crew.run(3, tmp_path, classify_with_faults, faults=(Fault(1, write, 2),), **ONLY_SAVES, **habit)
    assert errors(lost) == ["PeerFailed"] * 2
    [before] = [int(path.name.partition("-")[2]) for path in (tmp_path / "net").glob("step-*")]
    end = ends(crew.run(2, tmp_path, classify_sharded, **every(None), **HABIT))[0]
    assert end.progress.resumed_from == before
    assert_same(end, expected, from_memory=False)


def every(steps: int | None) -> dict[str, Any]:
    return {"session_options": {"snapshot_every": steps}}


def errors(outcomes: list[Outcome | None]) -> list[str]:
    return [outcome.error.partition(":")[0] for outcome in outcomes if outcome]


def ends(outcomes: list[Outcome | None]) -> list[Any]:
    assert all(outcome and not outcome.error for outcome in outcomes), outcomes
    return [outcome.end for outcome in outcomes if outcome]


def assert_same(end: Any, expected: Finished, *, from_memory: bool = True) -> None:
    """Compare samples, history and parameters with those of an undisturbed run, in float64."""
    assert isinstance(end, Finished)
    assert (end.progress.step, end.progress.samples) == (expected.progress.step, EPOCHS * SAMPLES)
    assert (end.progress.samples_lost, end.progress.duplicate_samples) == (0, 0)
    assert end.progress.from_memory is from_memory
    assert end.value["seen"] == expected.value["seen"]
    assert end.value["mine"] == expected.value["mine"]
    for row, other in zip(end.value["history"], expected.value["history"], strict=True):
        assert row == pytest.approx(other, abs=EXACT)
    for name, value in expected.value["parameters"].items():
        assert torch.allclose(end.value["parameters"][name], value, atol=EXACT, rtol=0), name
