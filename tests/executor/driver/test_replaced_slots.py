"""A crash of a process on a node that stays: the planner is not asked to stop what it would start again at once."""

from __future__ import annotations

import pytest

from freetrain_parsl.executor.driver.slot_cycle import SlotTaskEnded
from freetrain_parsl.planning import events as ev
from freetrain_parsl.protocol import journal as record
from freetrain_parsl.protocol.messages import Hello
from tests.executor.slot.slot_bench import SlotBench

KILLED = RuntimeError("worker lost")


@pytest.fixture
def driver() -> SlotBench:
    """Return the bench with a pool of two nodes."""
    driver = SlotBench(("n0", "n1"))
    for token, node in zip(driver.open_tasks(), ("n0", "n1"), strict=True):
        driver.join(token, node)
    assert [type(event) for event in driver.events] == [ev.NodesJoined, ev.NodesJoined]
    driver.events.clear()
    return driver


def test_a_slot_that_is_replaced_soon_leaves_its_node_in_the_pool(driver: SlotBench) -> None:
    """The node left and joined within 0.2 s, and a training job that needs both was stopped after it had recovered."""
    driver.cycle.on_task_ended(SlotTaskEnded("slot-1", KILLED))
    assert driver.lost == [("n0/slot-1", True)]
    assert driver.registry.complete_slots(["n0"]) is None
    driver.let_pass(0.2)
    (token,) = driver.open_tasks()
    driver.join(token, "n0")
    driver.let_pass(10.0)
    assert driver.events == []
    assert driver.registry.complete_slots(["n0", "n1"]) is not None


def test_a_slot_that_is_not_replaced_takes_its_node_out_of_the_pool(driver: SlotBench) -> None:
    driver.cycle.on_task_ended(SlotTaskEnded("slot-1", KILLED))
    driver.let_pass(1.9)
    assert driver.events == []
    driver.let_pass(0.2)
    assert driver.events == [ev.NodesLeft(driver.now, ("n0",))]
    (token,) = driver.open_tasks()
    driver.join(token, "n0")
    assert [type(event) for event in driver.events[1:]] == [ev.NodesJoined]


def test_a_node_whose_block_ends_meanwhile_leaves_at_once(driver: SlotBench) -> None:
    driver.cycle.on_task_ended(SlotTaskEnded("slot-1", KILLED))
    driver.registry.drop_block("0")
    driver.let_pass(0.1)
    assert driver.events == [ev.NodesLeft(driver.now, ("n0",))]


def test_a_silent_slot_is_not_awaited(driver: SlotBench) -> None:
    """Its node may be gone with it."""
    driver.now += 11.0
    driver.registry.slots["n1/slot-2"].heard = driver.now
    driver.cycle.kill_silent(driver.now)
    assert driver.events == [ev.NodesLeft(driver.now, ("n0",))]


def test_a_second_loss_on_a_node_that_is_awaited_takes_it_out_once() -> None:
    driver = SlotBench(("n0",), slots_per_node=2)
    for token in driver.open_tasks():
        driver.join(token, "n0")
    driver.events.clear()
    driver.cycle.on_task_ended(SlotTaskEnded("slot-1", KILLED))
    driver.cycle.set_aside(driver.registry.slots["n0/slot-2"], "unreachable")
    driver.let_pass(5.0)
    assert driver.events == [ev.NodesLeft(0.0, ("n0",))]


@pytest.mark.parametrize("tell", ["silence", "pool"])
@pytest.mark.parametrize("share_nodes", [False, True])
def test_a_slot_that_joins_before_the_one_that_it_replaces_is_dropped_takes_its_place(
    share_nodes: bool, tell: str
) -> None:
    """The driver may hear of a death late: until then the new slot is surplus."""
    driver = SlotBench(("n0",), slots_per_node=2, share_nodes=share_nodes)
    for number, token in enumerate([*driver.open_tasks(), "slot-9"]):
        driver.cycle.on_hello(f"n0/{number % 2}/{token}", Hello(token, "n0", "0", 0))
    assert {type(event) for event in driver.events} == {ev.NodesJoined}
    driver.events.clear()
    dead = driver.registry.slots["n0/0/slot-1"]
    if tell == "silence":
        driver.cycle.kill(dead, "silent")
        assert [type(event) for event in driver.events] == [ev.NodesLeft, ev.NodesJoined]
    else:
        driver.cycle.on_task_ended(SlotTaskEnded(dead.token, KILLED))
        driver.let_pass(10.0)
        assert driver.events == []
    slots = driver.registry.complete_slots([dead.place])
    assert slots is not None
    assert "slot-9" in {slot.token for slot in slots}


@pytest.mark.parametrize("ended", [False, True])
def test_a_node_with_a_surplus_slot_leaves_the_pool_once_as_its_block_ends(ended: bool) -> None:
    """Otherwise the planner would get a node of a block that is gone, and the next one there would not be recorded."""
    driver = SlotBench(("n0",), ("n0",), slots_per_node=2)
    for number, token in enumerate([*driver.open_tasks()[:2], "slot-9"]):
        driver.cycle.on_hello(f"n0/{number % 2}/{token}", Hello(token, "n0", "0", 0))
    driver.events.clear()
    if ended:
        driver.registry.drop_block("0")
    else:
        driver.registry.blocks["0"].releasing = "was released"
    for slot in driver.registry.of_block("0"):
        driver.cycle.lose(slot, "its block ended", crash=False)
    assert driver.events == [ev.NodesLeft(0.0, ("n0",))]
    driver.records.clear()
    for token in ("slot-3", "slot-4"):
        driver.join(token, "n0", "1")
    assert sum(isinstance(one, record.NodeJoined) for one in driver.records) == 1
