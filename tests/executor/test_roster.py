"""The roster: which nodes are complete, and how many slot tasks HTEX must have."""

from __future__ import annotations

from freetrain_parsl.executor.control.slot_registry import Block, Roster, Slot


def slot(name: str, node: str, block: str = "b") -> Slot:
    return Slot(name, f"token-{name}", node, block, heard=0.0)


def add(roster: Roster, new: Slot) -> bool:
    roster.slots[new.name] = new
    return roster.completes(new)


def test_a_node_is_complete_with_its_last_slot_and_incomplete_with_the_first_lost() -> None:
    roster = Roster(slots_per_node=2)
    first, second = slot("1", "n"), slot("2", "n")
    assert not add(roster, first)
    assert roster.complete_slots(["n"]) is None
    assert add(roster, second)
    assert roster.complete_slots(["n"]) == [first, second]
    del roster.slots["1"]
    assert roster.incomplete(first)
    assert not roster.incomplete(second), "a node leaves the pool once"


def test_every_awaited_slot_needs_a_task() -> None:
    roster = Roster(slots_per_node=2)
    roster.blocks["b"] = Block("b", ("n", "m"), 60.0, None)
    assert roster.missing_tasks() == 4
    roster.tasks_queued = 3
    assert roster.missing_tasks() == 1


def test_tasks_that_went_down_with_a_block_are_not_counted_on() -> None:
    """HTEX reports them lost only after its heartbeat, too late for the next block."""
    roster = Roster(slots_per_node=1)
    roster.blocks["b"] = Block("b", ("n", "m"), 60.0, None)
    roster.tasks_queued = 2
    roster.blocks["b"].start(0.0, ("n", "m"), 60.0)
    assert roster.drop_block("b") is not None
    roster.blocks["c"] = Block("c", ("x",), 60.0, None)
    assert roster.missing_tasks() == 1


def test_tasks_for_a_block_that_never_started_still_wait_for_the_next() -> None:
    roster = Roster(slots_per_node=1)
    roster.blocks["b"] = Block("b", ("n",), 60.0, None)
    roster.tasks_queued = 1
    roster.drop_block("b")
    roster.blocks["c"] = Block("c", ("x",), 60.0, None)
    assert roster.missing_tasks() == 0


def test_slots_long_missing_are_counted_once_a_patience() -> None:
    roster = Roster(slots_per_node=1)
    roster.blocks["b"] = Block("b", ("n", "m"), 600.0, None)
    assert roster.overdue(100.0, 60.0) == 0, "it has not started"
    roster.blocks["b"].start(0.0, ("n", "m"), None)
    add(roster, slot("1", "n"))
    assert [roster.overdue(now, 60.0) for now in (60.0, 61.0, 62.0, 122.0)] == [0, 1, 0, 1]


def test_a_block_loses_its_nodes_at_its_walltime_or_its_windows_close_whichever_is_first() -> None:
    block = Block("b", ("n",), seconds=100.0, closes=150.0)
    assert block.loses_nodes_at(20.0) == 120.0, "not known to have started: from now at the latest"
    assert block.loses_nodes_at(90.0) == 150.0
    block.start(10.0, ("n",), 110.0)
    assert block.loses_nodes_at(90.0) == 110.0


def test_a_node_set_aside_is_not_complete_until_its_time_is_over_each_time_twice_as_long() -> None:
    roster = Roster(slots_per_node=1)
    first = slot("1", "n")
    assert add(roster, first)
    assert roster.set_aside("n", now=0.0, pause=10.0) == 10.0
    assert roster.incomplete(first)
    assert not add(roster, slot("2", "n")), "nor with a new slot"
    del roster.slots["2"]
    assert roster.returning(9.0) == []
    assert roster.returning(10.0) == [first]
    assert roster.completes(first)
    assert roster.set_aside("n", now=20.0, pause=10.0) == 20.0
    assert roster.set_aside("m", now=20.0, pause=10.0) == 10.0
    for _ in range(20):
        longest = roster.set_aside("n", now=20.0, pause=10.0)
    assert longest == 1800.0
    assert roster.returning(20.0 + 1800.0) == [first]
