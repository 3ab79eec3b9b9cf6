"""Nodes that jobs share: each slot has a lane on its node, joins the pool by itself, and leaves it by itself."""

from __future__ import annotations

import pytest

from freetrain_parsl.executor.driver.slot_cycle import SlotTaskEnded
from freetrain_parsl.executor.driver.slot_registry import Block, Slot, SlotRegistry
from freetrain_parsl.executor.node_kinds import KindOfSlots, units_per_node
from freetrain_parsl.planning import events as ev
from freetrain_parsl.planning.model import PoolNode
from freetrain_parsl.protocol import journal as record
from freetrain_parsl.protocol.messages import Closing, Hello
from tests.executor.slot.slot_bench import SlotBench

KILLED = RuntimeError("worker lost")


def slot(name: str, node: str, lane: int | None) -> Slot:
    return Slot(name, f"token-{name}", node, "b", heard=0.0, lane=lane)


def shared(*slots: tuple[str, int]) -> SlotRegistry:
    """Return a registry of nodes of four slots with these slots."""
    registry = SlotRegistry(4, share_nodes=True)
    for node, lane in slots:
        new = slot(f"{node}-{lane}", node, lane)
        registry.slots[new.name] = new
        assert registry.completes(new)
    return registry


def names(slots: list[Slot] | None) -> list[str] | None:
    return None if slots is None else [one.name for one in slots]


class Bench(SlotBench):
    """Nodes of several slots, whose workers are numbered as HTEX numbers them."""

    def joins(self, token: str, node: str, worker: int | str) -> str:
        name = f"{node}/{worker}/{token}"
        self.cycle.on_hello(name, Hello(token, node, "0", 0))
        return name

    def of(self, kind: type[record.Record]) -> list[str]:
        return [one.subject for one in self.records if isinstance(one, kind)]


@pytest.fixture
def bench() -> Bench:
    """Return a pool of two shared nodes, n0 and n1, of two slots; all have joined."""
    bench = Bench(("n0", "n1"), slots_per_node=2, share_nodes=True)
    for token, (node, worker) in zip(bench.open_tasks(), [("n0", 0), ("n0", 1), ("n1", 0), ("n1", 1)], strict=True):
        bench.joins(token, node, worker)
    return bench


def test_jobs_share_nodes_if_those_of_all_kinds_have_equally_many_slots() -> None:
    def units(*counts: int, share_nodes: bool = True) -> int:
        return units_per_node([KindOfSlots(count) for count in counts], share_nodes=share_nodes)

    assert [units(4), units(4, 4), units(4, 2), units(1), units(4, share_nodes=False)] == [4, 4, 1, 1, 1]


def test_a_lane_is_that_of_the_worker_or_the_lowest_that_is_free() -> None:
    registry = shared(("n", 0), ("n", 2))
    assert [registry.free_lane("n", wanted) for wanted in (3, 2, None, 9)] == [3, 1, 1, 1]
    assert registry.free_lane("m", None) == 0
    assert SlotRegistry(4).free_lane("n", 2) is None, "whole nodes"


def test_a_surplus_slot_of_a_node_joins_no_pool() -> None:
    registry = shared(("n", 0), ("n", 1), ("n", 2), ("n", 3))
    surplus = slot("fifth", "n", registry.free_lane("n", 0))
    registry.slots["fifth"] = surplus
    assert not registry.completes(surplus)


def test_the_slots_of_a_unit_are_those_of_its_lane() -> None:
    registry = shared(("n", 0), ("n", 1), ("m", 0))
    assert names(registry.complete_slots(["n/1", "m/0"])) == ["m-0", "n-1"]
    assert registry.complete_slots(["n/0", "n/3"]) is None
    registry.slots["n-0"].busy = "t"
    assert names(registry.free_slots(["n/0", "n/1"])) == ["n-1"]
    registry.slots["n-1"].leaving = True
    assert registry.closing(["n/0", "n/1", "m/0"]) == {"n/0", "n/1"}, "the batch system takes the node"
    assert registry.kinds_on(["n/0", "n/3"]) == {""}
    assert registry.kinds_on(["n/3"]) == set()


def test_a_slot_that_is_set_aside_returns_without_its_neighbours() -> None:
    registry = shared(("n", 0), ("n", 1))
    registry.set_aside("n/0", 0.0, 10.0)
    assert registry.incomplete(registry.slots["n-0"])
    assert not registry.completes(registry.slots["n-0"])
    assert registry.aside == set(), "its node can be used"
    assert registry.complete_slots(["n/1"]) is not None
    assert names(registry.returning(10.0)) == ["n-0"]
    for lane in range(4):
        registry.set_aside(f"n/{lane}", 20.0, 10.0)
    assert registry.aside == {"n"}, "none of its slots can be used"


def test_all_slots_return_to_a_node_that_was_held_back() -> None:
    registry = SlotRegistry(4, share_nodes=True)
    registry.hold_back("n", 10.0, "no space")
    for lane in (0, 1):
        new = registry.slots[str(lane)] = slot(str(lane), "n", lane)
        assert not registry.completes(new)
    assert names(registry.returning(10.0)) == ["0", "1"]


def test_every_slot_of_a_shared_node_needs_a_task() -> None:
    registry = shared(("n", 0))
    registry.blocks["b"] = Block("b", ("n", "m"), 60.0, None)
    assert registry.missing_tasks() == 7


def test_each_slot_joins_by_itself_with_its_machine(bench: Bench) -> None:
    joined = [event.nodes for event in bench.events if isinstance(event, ev.NodesJoined)]
    assert joined == [(PoolNode(place, 3600.0, host=place[:2]),) for place in ("n0/0", "n0/1", "n1/0", "n1/1")]
    assert bench.of(record.NodeJoined) == ["n0", "n1"]


def test_a_slot_whose_process_dies_leaves_alone_unless_it_is_replaced_in_its_lane(bench: Bench) -> None:
    bench.events.clear()
    bench.cycle.on_task_ended(SlotTaskEnded("slot-2", KILLED))
    assert bench.lost == [("n0/1/slot-2", True)]
    bench.let_pass(0.2)
    (token,) = bench.open_tasks()
    name = bench.joins(token, "n0", "?")
    assert bench.registry.slots[name].place == "n0/1", "the lane that is free"
    bench.let_pass(5.0)
    assert bench.events == []
    bench.cycle.on_task_ended(SlotTaskEnded(token, KILLED))
    bench.let_pass(2.5)
    assert bench.events == [ev.NodesLeft(bench.now, ("n0/1",))]
    assert bench.registry.complete_slots(["n0/0", "n1/0", "n1/1"]) is not None
    assert bench.of(record.NodeLeft) == []


def test_two_slots_that_die_together_are_replaced_in_their_own_lanes(bench: Bench) -> None:
    bench.events.clear()
    for token in ("slot-1", "slot-2"):
        bench.cycle.on_task_ended(SlotTaskEnded(token, KILLED))
    bench.let_pass(0.2)
    first, second = bench.open_tasks()
    places = {
        bench.registry.slots[bench.joins(token, "n0", worker)].place: worker
        for token, worker in ((first, 1), (second, 0))
    }
    assert places == {"n0/0": 0, "n0/1": 1}
    bench.let_pass(5.0)
    assert bench.events == []


def test_a_node_that_is_lost_is_recorded_once(bench: Bench) -> None:
    bench.events.clear()
    for name in ("n0/0/slot-1", "n0/1/slot-2"):
        bench.cycle.lose(bench.registry.slots[name], "gone", crash=True)
    assert [event.nodes for event in bench.events if isinstance(event, ev.NodesLeft)] == [("n0/0",), ("n0/1",)]
    assert bench.of(record.NodeLeft) == ["n0"]


def test_a_node_closes_once_for_all_its_slots(bench: Bench) -> None:
    bench.events.clear()
    for name in ("n0/0/slot-1", "n0/1/slot-2"):
        bench.cycle.on_closing(bench.registry.slots[name], Closing(5.0, gone=False))
    assert bench.events == [ev.NodesClosing(0.0, ("n0",), 5.0)]
    assert bench.of(record.NodeClosing) == ["n0"]
    assert bench.registry.closing(["n0/0", "n0/1", "n1/0"]) == {"n0/0", "n0/1"}
    bench.cycle.lose(bench.registry.slots["n0/1/slot-2"], "killed", crash=True)
    assert bench.lost == [("n0/1/slot-2", False)], "not a crash: its node was about to go"


def test_a_slot_that_is_set_aside_leaves_its_neighbour_in_the_pool(bench: Bench) -> None:
    bench.events.clear()
    bench.cycle.set_aside(bench.registry.slots["n0/0/slot-1"], "its function fails there")
    assert bench.events == [ev.NodesLeft(0.0, ("n0/0",))]
    bench.let_pass(10.0)
    (joined,) = bench.events[1:]
    assert isinstance(joined, ev.NodesJoined)
    assert joined.nodes[0].name == "n0/0"
