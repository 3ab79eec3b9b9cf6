"""Compiled blocks of a sharded model follow a change of the processes in place."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from sharded_cases import EXACT, Case, train_case
from test_in_place import difference, in_place
from training_crew import run_member

from freetrain_parsl.training.fragment import Finished, Membership

if TYPE_CHECKING:
    from pathlib import Path

    from crew import Crew

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("compiled", ["inductor after", "aot_eager before", "aot_eager wrapped"])
def test_compiled_blocks_follow_and_are_compiled_again_only_for_another_batch(
    crew: Crew, tmp_path: Path, compiled: str
) -> None:
    """2 -> 3 -> 2 processes, with parts of 6, 4 and 6 samples: the graph of 6 is used again in the last group.

    `torch.compile` is called before or after ``fully_shard``, or replaces the block by another module.
    """
    ends = in_place(crew, tmp_path / "in place", Case(compiled=compiled, small=True), (2, 3, 2))
    alone = run_member(
        train_case, {"case": Case(small=True), "shard": False}, root=tmp_path / "alone", membership=Membership("net")
    )
    assert isinstance(alone.end, Finished), alone.error
    for end in ends:
        assert end.value["same"]
        assert end.value["largest"] < 1.2 / 2
        trained = {name.replace("_orig_mod.", ""): value for name, value in end.value["model"].items()}
        assert difference(trained, alone.end.value["model"]) < EXACT
        assert list(end.value["graphs"].values()) == [1] * 2 + [2] * 18, "one for both blocks"
