"""When a copy of a sharded state is due, and where none is made."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from freetrain_parsl.extensions.sharding.copies import Copies
from freetrain_parsl.extensions.sharding.parts import Label, StateParts, digest, pack
from freetrain_parsl.extensions.sharding.rounds import Layout
from freetrain_parsl.protocol.options import SessionOptions
from freetrain_parsl.training.node_memory import NodeMemory

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PART = 64_000  # bytes of each of two members
PARTS = StateParts([Layout((16_000, 2), torch.float32, 0)], [["w"]])


@dataclass
class Peers:
    """A group of members that answer as this one does, on nodes of their own."""

    size: int = 2
    generation: int = 1
    rank: int = 0
    is_first: bool = True
    nodes: tuple[int, ...] = (1, 2)

    def gather(self, mine: torch.Tensor) -> list[torch.Tensor]:
        rows = [mine.clone() for _ in self.nodes]
        for row, node in zip(rows, self.nodes, strict=True):
            row[0] = node
        return rows


@pytest.fixture
def memory() -> Iterator[NodeMemory]:
    with closing(NodeMemory("n0", "b0", lambda: (1 << 30, 8 * PART))) as memory:
        yield memory


def copies(memory: NodeMemory, root: Path, every: int | None, group: Peers) -> Copies:
    options = SessionOptions("t", root, snapshot_every=every, mean_time_between_failures=timedelta(hours=1))
    members: Any = SimpleNamespace(group=group)
    return Copies(memory, options, members)


def plan(copies: Copies, group: Peers) -> list[int] | None:
    """Choose the neighbours in a group."""
    targets = copies._plan(group, PARTS, "")  # type: ignore[arg-type]
    copies._targets, copies._generation = targets, group.generation
    return targets


def test_a_copy_is_due_after_a_number_of_steps_from_the_start(memory: NodeMemory, tmp_path: Path) -> None:
    group = Peers()
    every_3 = copies(memory, tmp_path, 3, group)
    assert [every_3.due(step, 0.0) for step in range(5, 10)] == [False, False, False, True, True]


def test_with_auto_it_is_due_by_cost_and_failures_as_for_checkpoints(memory: NodeMemory, tmp_path: Path) -> None:
    group = Peers()
    auto = copies(memory, tmp_path, 0, group)
    auto._schedule.measured(blocked=0.5, slowdown=0.0)  # sqrt(2 · 0.5 s · 1 h) = 60 s
    assert not auto.due(0, 100.0)
    assert not auto.due(1000, 158.0)
    assert auto.due(1000, 162.0)


def test_a_copy_follows_at_once_in_a_new_group_if_there_was_one_before(memory: NodeMemory, tmp_path: Path) -> None:
    """Also if it was made by another process of the slot."""
    label = Label(1, generation=1, size=2, step=7, owner=0, is_own=True)
    memory.shelves[2].open(0)
    memory.shelves[2].seal(pack(label, {}))
    group = Peers(generation=2)
    every_9 = copies(memory, tmp_path, 9, group)
    assert every_9._newest == 1, "the other pair of shelves is used first"
    assert every_9.due(7, 0.0)
    plan(every_9, group)
    assert not every_9.due(7, 0.0)


def test_no_copy_is_due_while_a_checkpoint_is_written_from_what_it_would_overwrite(
    memory: NodeMemory, tmp_path: Path
) -> None:
    group = Peers()
    every_3 = copies(memory, tmp_path, 3, group)
    plan(every_3, group)
    every_3.due(5, 0.0)
    every_3._being_saved = every_3._newest
    assert every_3.due(8, 0.0)
    every_3._being_saved = 1 - every_3._newest
    assert not every_3.due(8, 0.0)
    every_3.saved()
    assert every_3.due(8, 0.0)


def test_a_single_process_makes_no_copies(memory: NodeMemory, tmp_path: Path) -> None:
    assert not copies(memory, tmp_path, 1, Peers(size=1)).due(100, 0.0)


@pytest.mark.parametrize(("every", "made"), [(0, True), (5, True)])
def test_copies_are_made_where_there_is_memory(memory: NodeMemory, tmp_path: Path, every: int, made: bool) -> None:
    group = Peers()
    assert (plan(copies(memory, tmp_path, every, group), group) == [1, 0]) is made


@pytest.mark.parametrize(
    ("every", "nodes", "available", "reason"),
    [
        (0, (1, 2), 8 * PART - 2, "a node would need 256,000 bytes of memory for them and has 255,999 to spare"),
        (5, (1, 2), 4 * PART - 1, "a node would need 256,000 bytes of memory for them and has 255,999 to spare"),
        (5, (1, 1, 2, 2), 8 * PART - 1, "a node would need 512,000 bytes of memory for them and has 511,999 to spare"),
        (5, (1, 1, 2), 1 << 30, "more than half of its processes are on one node"),
    ],
    ids=["auto", "stated", "two-on-a-node", "unequal"],
)
def test_where_no_copies_are_made_the_log_says_why(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    every: int,
    nodes: tuple[int, ...],
    available: int,
    reason: str,
) -> None:
    with closing(NodeMemory("n0", "b0", lambda: (1 << 40, available))) as memory:
        group = Peers(size=2, nodes=nodes)
        some = copies(memory, tmp_path, every, group)
        assert plan(some, group) is None
        assert not some.due(1000, 1e6)
    (message,) = caplog.messages
    assert message.startswith(f"training job t: no copies of its state in the memory of other nodes: {reason}; after a")


def test_a_job_is_another_one_if_its_directory_is(tmp_path: Path) -> None:
    """Otherwise a job that begins anew would continue from copies."""
    options = SessionOptions("t", tmp_path)
    absent = Label.of_job(options)
    (tmp_path / "t").mkdir()
    present = Label.of_job(options)
    assert len({absent, present, Label.of_job(SessionOptions("u", tmp_path)), digest("")}) == 4
    assert Label.of_job(SessionOptions("t", tmp_path, snapshot_every=3)) == present
