"""Which of the copies in the members' memory is used."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from freetrain_parsl.extensions.sharding.parts import Label, StateParts, pack, unpack
from freetrain_parsl.extensions.sharding.recall import choose

STEP_6 = Label(1, generation=4, size=3, step=6, owner=0, is_own=True)
STEP_3 = replace(STEP_6, step=3)


def member(owner: int, *copies: Label) -> list[Label]:
    """Return what a member has: its own part of each copy, and that of the member before."""
    return [
        label
        for copy in copies
        for label in (
            replace(copy, owner=owner),
            replace(copy, owner=(owner - 1) % copy.size, is_own=False),
        )
    ]


def test_the_newest_copy_is_chosen_and_each_part_has_a_keeper() -> None:
    choice = choose([member(2, STEP_3, STEP_6), member(0, STEP_6, STEP_3)], known=-1)
    assert choice is not None
    assert (choice.label, choice.root, choice.keepers) == (STEP_6, 0, (1, 0, 0))


def test_members_without_copies_do_not_matter() -> None:
    choice = choose([[], member(2, STEP_6), [], member(0, STEP_6)], known=-1)
    assert choice is not None
    assert (choice.root, choice.keepers) == (1, (3, 1, 1))


def test_a_copy_that_lacks_a_part_is_passed_over_for_an_older_one() -> None:
    late = [label for label in member(2, STEP_3, STEP_6) if label.is_own or label.step == 3]
    choice = choose([late, member(0, STEP_3, STEP_6)], known=-1)
    assert choice is not None
    assert choice.label == STEP_3


@pytest.mark.parametrize(
    "labels",
    [
        [],
        [[], []],
        [member(0, STEP_6)],  # its own part and that of rank 2
        [member(0, STEP_6), member(2, replace(STEP_6, generation=5))],  # of different groups
        [[replace(STEP_6, owner=owner, is_own=False)] for owner in range(3)],  # none has the rest of the state
    ],
    ids=["no-members", "no-copies", "two-neighbours-lost", "different-groups", "others-only"],
)
def test_what_is_not_complete_is_not_chosen(labels: list[list[Label]]) -> None:
    assert choose(labels, known=-1) is None


def test_a_newer_checkpoint_is_preferred() -> None:
    labels = [member(0, STEP_6), member(2, STEP_6)]
    assert choose(labels, known=7) is None
    assert choose(labels, known=6) is not None


def test_labels_and_heads_survive_their_transfer() -> None:
    assert Label.from_numbers(STEP_6.numbers()) == STEP_6
    body = {"plain": {"a": [1, None], "b": torch.arange(3)}, "parts": [((7, 2), torch.float64, 0, ["x", "y"])]}
    loaded = unpack(pack(STEP_6, body))
    assert torch.equal(loaded["plain"].pop("b"), body["plain"].pop("b"))  # type: ignore[attr-defined]
    assert loaded == body
    parts = StateParts.from_plain(loaded["parts"])
    assert [parts.size(owner, 3) for owner in range(3)] == [64, 64, 64]  # 3, 3 and 1 rows of 16 bytes
    assert [next(parts.views(torch.zeros(64, dtype=torch.uint8), owner, 3)).shape for owner in range(3)] == [
        (3, 2),
        (3, 2),
        (1, 2),
    ]
