"""A sharded training job changes its processes in place: no checkpoint is read, and the bits are the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from sharded_cases import EXACT, Case, train_case
from training_crew import equal, run_member

from freetrain_parsl.training.fragment import Finished, Membership, Paused

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from crew import Crew

pytestmark = pytest.mark.slow

ALL_SIZES = (2, 3, 1, 4, 2)
SIZES = (2, 3, 1)
EVEN = (2, 4, 1)
FOURS = (4, 2, 4)
CASES: dict[str, tuple[Case, Sequence[int]]] = {
    "tied, uneven, frozen, tiny": (Case(ema=True, two_optimizers=True), ALL_SIZES),
    "reshard_after_forward=True, wrapper, micro-batches": (
        Case(reshard=True, checkpointing="wrapper", micro_batch=6),
        SIZES,
    ),
    "reshard_after_forward=2, checkpoint": (Case(reshard=2, checkpointing="function"), FOURS),
    "reshard_after_forward=False, newcomers on meta": (Case(reshard=False, meta=True), (1, 3, 2)),
    "Shard(1), list of modules": (Case(columns=True, grouped=True, inner=16), EVEN),
    "averages in session.state": (Case(in_loop=True), SIZES),
    "torch.compile": (Case(compiled="aot_eager after", small=True), (2, 3, 2)),
    "bf16, fp32 reduction": (Case(dtype=torch.float32, reduced=True), (1, 3, 2)),
    "CPU offload": (Case(dtype=torch.float32, offload=True), SIZES),
}


def in_place(crew: Crew, root: Path, case: Case, sizes: Sequence[int]) -> list[Finished]:
    """Train through groups of these sizes, each for two steps."""
    root.mkdir()
    gates = {2 * number: root / f"gate-{number}" for number in range(1, len(sizes))}
    run = crew.start(sizes[0], root / "cut", train_case, case=case, gates=gates)
    for size, gate in zip(sizes[1:], gates.values(), strict=True):
        here = [gate.with_suffix(f".{rank}") for rank in range(len(run.members))]
        run.until(lambda here=here: run.ended or all(file.exists() for file in here))
        assert not run.ended, [member.outcome for member in run.members]
        run.regroup(size, release=gate.touch)
    ends = []
    for outcome in run.outcomes():
        assert outcome is not None
        assert isinstance(outcome.end, Finished), outcome.error
        assert outcome.end.progress.resumed_from is None
        ends.append(outcome.end)
    assert len(ends) == sizes[-1]
    return ends


def rebuilt(crew: Crew, root: Path, case: Case, sizes: Sequence[int]) -> Finished:
    """Train through the same groups, each with newly made models that resume from a checkpoint."""
    for number, size in enumerate(sizes[:-1], 1):
        for outcome in crew.run(size, root, train_case, case=case, pause_after=2 * number):
            assert outcome is not None
            assert isinstance(outcome.end, Paused), outcome.error
    outcome = crew.run(sizes[-1], root, train_case, case=case)[0]
    assert outcome is not None
    assert isinstance(outcome.end, Finished), outcome.error
    return outcome.end


@pytest.mark.parametrize("name", CASES)
def test_a_model_that_changes_in_place_has_the_bits_of_one_that_is_made_anew(
    crew: Crew, tmp_path: Path, name: str
) -> None:
    """Losses, parameters, optimizer states, averages; the user's objects stay, no process holds more than its part."""
    case, sizes = CASES[name]
    ends = in_place(crew, tmp_path / "in place", case, sizes)
    expected = rebuilt(crew, tmp_path / "rebuilt", case, sizes).value
    for end in ends:
        assert end.value["same"]
        assert end.value["largest"] < 1.2 / sizes[-1]
        assert_close(end.value["history"], expected["history"])  # a pause adds up the losses at another time
        for what in ("model", "states", "ema", "kept"):
            assert equal(end.value[what], expected[what]), what
    if case.dtype == torch.float64:
        alone = run_member(
            train_case, {"case": case, "shard": False}, root=tmp_path / "alone", membership=Membership("net")
        )
        assert isinstance(alone.end, Finished), alone.error
        assert difference(ends[0].value["model"], alone.end.value["model"]) < EXACT
        assert_close(ends[0].value["history"], alone.end.value["history"])


def assert_close(history: list[dict[str, Any]], other: list[dict[str, Any]]) -> None:
    assert [row["loss"] for row in history] == pytest.approx([row["loss"] for row in other], abs=EXACT)


def difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)
