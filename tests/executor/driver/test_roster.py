"""The slot registry: which nodes are complete, and how many slot tasks HTEX needs."""

from __future__ import annotations

from freetrain_parsl.executor.driver.slot_registry import Block, Slot, SlotRegistry


def slot(name: str, node: str, block: str = "b") -> Slot:
    return Slot(name, f"token-{name}", node, block, heard=0.0)


def add(registry: SlotRegistry, new: Slot) -> bool:
    registry.slots[new.name] = new
    return registry.completes(new)


def test_a_node_is_complete_with_its_last_slot_and_incomplete_with_the_first_lost() -> None:
    registry = SlotRegistry(slots_per_node=2)
    first, second = slot("1", "n"), slot("2", "n")
    assert not add(registry, first)
    assert registry.complete_slots(["n"]) is None
    assert add(registry, second)
    assert registry.complete_slots(["n"]) == [first, second]
    del registry.slots["1"]
    assert registry.incomplete(first)
    assert not registry.incomplete(second), "a node leaves the pool once"


def test_the_slots_of_a_node_are_those_that_are_connected() -> None:
    registry = SlotRegistry(slots_per_node=2)
    slots = [slot("2", "n"), slot("1", "n"), slot("3", "m")]
    for new in slots:
        registry.slots[new.name] = new
    slots[2].leaving = True
    assert [registry.slots.on(node) for node in "nm"] == [[slots[1], slots[0]], [slots[2]]]
    assert registry.closing(["n", "m", "other"]) == {"m"}
    registry.slots["3"] = moved = slot("3", "n")
    assert registry.slots.on("n")[-1] is moved
    assert registry.slots.pop("3", None) is moved
    assert registry.slots.pop("3", None) is None
    assert [registry.slots.on(node) for node in "nm"] == [[slots[1], slots[0]], []]


def test_every_awaited_slot_needs_a_task() -> None:
    registry = SlotRegistry(slots_per_node=2)
    registry.blocks["b"] = Block("b", ("n", "m"), 60.0, None)
    assert registry.missing_tasks() == 4
    registry.tasks_queued = 3
    assert registry.missing_tasks() == 1


def test_tasks_that_went_down_with_a_block_are_not_counted_on() -> None:
    """HTEX reports their failure only after its heartbeat timeout, too late for the next block."""
    registry = SlotRegistry(slots_per_node=1)
    registry.blocks["b"] = Block("b", ("n", "m"), 60.0, None)
    registry.tasks_queued = 2
    registry.blocks["b"].start(0.0, ("n", "m"), 60.0)
    assert registry.drop_block("b") is not None
    registry.blocks["c"] = Block("c", ("x",), 60.0, None)
    assert registry.missing_tasks() == 1


def test_tasks_for_a_block_that_never_started_still_wait_for_the_next() -> None:
    registry = SlotRegistry(slots_per_node=1)
    registry.blocks["b"] = Block("b", ("n",), 60.0, None)
    registry.tasks_queued = 1
    registry.drop_block("b")
    registry.blocks["c"] = Block("c", ("x",), 60.0, None)
    assert registry.missing_tasks() == 0


def test_slots_long_missing_are_counted_once_a_patience() -> None:
    registry = SlotRegistry(slots_per_node=1)
    registry.blocks["b"] = Block("b", ("n", "m"), 600.0, None)
    assert registry.overdue(100.0, 60.0) == 0, "it has not started"
    registry.blocks["b"].start(0.0, ("n", "m"), None)
    add(registry, slot("1", "n"))
    assert [registry.overdue(now, 60.0) for now in (60.0, 61.0, 62.0, 122.0)] == [0, 1, 0, 1]


def test_a_block_loses_its_nodes_at_its_walltime_or_its_windows_close_whichever_is_first() -> None:
    block = Block("b", ("n",), seconds=100.0, closes=150.0)
    assert block.loses_nodes_at(20.0) == 120.0, "start unknown: the latest possible end counts from now"
    assert block.loses_nodes_at(90.0) == 150.0
    block.start(10.0, ("n",), 110.0)
    assert block.loses_nodes_at(90.0) == 110.0


def test_a_node_set_aside_is_not_complete_until_its_time_is_over_each_time_twice_as_long() -> None:
    registry = SlotRegistry(slots_per_node=1)
    first = slot("1", "n")
    assert add(registry, first)
    assert registry.set_aside("n", now=0.0, pause=10.0) == 10.0
    assert registry.incomplete(first)
    assert not add(registry, slot("2", "n")), "nor with a new slot"
    del registry.slots["2"]
    assert registry.returning(9.0) == []
    assert registry.returning(10.0) == [first]
    assert registry.completes(first)
    assert registry.set_aside("n", now=20.0, pause=10.0) == 20.0
    assert registry.set_aside("m", now=20.0, pause=10.0) == 10.0
    for _ in range(20):
        longest = registry.set_aside("n", now=20.0, pause=10.0)
    assert longest == 1800.0
    assert registry.returning(20.0 + 1800.0) == [first]
