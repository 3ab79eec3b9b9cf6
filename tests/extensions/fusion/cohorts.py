"""Cohorts in a world whose slots are only models: what happens there, and what has happened."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from freetrain_parsl.executor.journal import read_journal
from freetrain_parsl.extensions.fusion import messages as fused
from freetrain_parsl.protocol import journal as record
from freetrain_parsl.protocol import messages as msg

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.extensions.fusion.array_world import ArrayWorld


def records(world: ArrayWorld, kind: type[record.Record]) -> list[record.Record]:
    world.journal.commit()
    entries = [entry.record for _, entry in read_journal(world.journal.path, 0)]
    return [entry for entry in entries if isinstance(entry, kind)]


def arrays(world: ArrayWorld) -> list[int]:
    """Return the sizes of the arrays that run."""
    return sorted(len(process.members) for process in world.processes.values() if process.is_array)


def submit(world: ArrayWorld, count: int, **options: Any) -> None:
    for number in range(count):
        world.submit(f"t{number}", **options)


def train(world: ArrayWorld, count: int, **options: int) -> None:
    """Submit training jobs, and let them run on all nodes for two turns."""
    submit(world, count, **options)
    world.advance(1.0)
    world.assign_all()
    world.settle(2)


def busy_slot(world: ArrayWorld) -> str:
    """Return the only slot that runs something."""
    (slot,) = [name for name, process in world.processes.items() if process.run]
    return slot


def released(world: ArrayWorld, slot: str) -> list[str]:
    """Return the members that a process was commanded to release, and has not received yet."""
    return [message.member for message in world.processes[slot].inbox if isinstance(message, fused.ReleaseMember)]


def paused(world: ArrayWorld, slot: str) -> bool:
    """Return whether a process has a command to pause all members."""
    return any(isinstance(message, msg.PauseRun) for message in world.processes[slot].inbox)


def spread(make: Callable[..., ArrayWorld], *nodes: str, turns: int = 3) -> ArrayWorld:
    """Return a world of two nodes in which four members train on these."""
    world = make(nodes=2)
    world.best_size = 8
    world.steps = 60
    submit(world, 4)
    world.advance(1.0)
    world.assign("cohort-1", frozenset(nodes))
    world.settle(turns)
    return world
