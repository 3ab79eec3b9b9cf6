"""The baselines that decide by a rule: FCFS, Tiresias and Optimus, against results computed by hand."""

from __future__ import annotations

from freetrain_parsl.extensions.goodput.baselines import OptimusPolicy, TiresiasPolicy, place_emptiest_first
from freetrain_parsl.planning.curves.scaling import ScalingCurve
from freetrain_parsl.planning.model import PlannedJob, Pool, PoolNode
from freetrain_parsl.planning.policies import FirstComeFirstServedPolicy

LINEAR = ScalingCurve({1: 1.0, 64: 64.0})


def pool_of(*gpus):
    """Return a pool of hosts with so many nodes each."""
    return Pool(PoolNode(f"h{i}/{j}", host=f"h{i}") for i, count in enumerate(gpus) for j in range(count))


def rigid(*sizes, service=()):
    given = dict(enumerate(service))
    return [
        PlannedJob(f"t{i}", size, size, LINEAR, submitted=float(i), service=given.get(i, 0.0))
        for i, size in enumerate(sizes)
    ]


def counts(policy, trainers, nodes):
    return policy.allocate(Pool(PoolNode(f"n{i:02}") for i in range(nodes)), trainers, {}, 0.0).counts


def test_fcfs_lets_nobody_overtake():
    assert counts(FirstComeFirstServedPolicy(), rigid(4, 6, 2), 8) == {"t0": 4}


def test_tiresias_fills_gaps():
    assert counts(TiresiasPolicy(), rigid(4, 6, 2), 8) == {"t0": 4, "t2": 2}


def test_tiresias_demotes_after_16_hours():
    hours = 3600.0
    trainers = rigid(4, 4, 4, service=(16 * hours, 15.9 * hours, 0.0))
    assert counts(TiresiasPolicy(), trainers, 8) == {"t1": 4, "t2": 4}


def test_optimus_gives_the_next_node_to_the_largest_saving():
    """With 100 and 40 samples left at linear speed, savings are 50, 16.7, 8.3, … and 20, 6.7, … seconds."""
    trainers = [PlannedJob(f"t{i}", 1, 8, LINEAR, work_left=work) for i, work in enumerate((100.0, 40.0))]
    assert counts(OptimusPolicy(), trainers, 2) == {"t0": 1, "t1": 1}
    assert counts(OptimusPolicy(), trainers, 3) == {"t0": 2, "t1": 1}
    assert counts(OptimusPolicy(), trainers, 4) == {"t0": 2, "t1": 2}
    assert counts(OptimusPolicy(), trainers, 5) == {"t0": 3, "t1": 2}


def test_optimus_stops_where_nodes_save_nothing():
    flat = ScalingCurve({1: 1.0, 2: 1.0})
    assert counts(OptimusPolicy(), [PlannedJob("t", 1, 8, flat, work_left=5.0)], 8) == {"t": 1}


def hosts(nodes):
    return sorted(name.split("/")[0] for name in nodes)


def test_emptiest_host_first_in_the_given_order():
    allocation = place_emptiest_first({"a": 1, "b": 2}, pool_of(4, 4), {})
    assert hosts(allocation["a"]) == ["h0"]
    assert hosts(allocation["b"]) == ["h1", "h1"]


def test_unchanged_trainers_stay_and_changed_ones_are_placed_anew():
    current = {"stays": frozenset({"h0/0", "h1/0"}), "grows": frozenset({"h0/1"})}
    allocation = place_emptiest_first({"stays": 2, "grows": 4}, pool_of(2, 2, 4), current)
    assert allocation["stays"] == current["stays"]
    assert hosts(allocation["grows"]) == ["h2"] * 4


def test_trainers_that_lost_a_node_are_placed_anew():
    allocation = place_emptiest_first({"t": 2}, pool_of(2, 2), {"t": frozenset({"h0/0", "gone"})})
    assert len(allocation["t"]) == 2
    assert "gone" not in allocation["t"]


def test_without_shared_hosts_nobody_is_moved():
    pool = Pool(PoolNode(f"n{i}") for i in range(4))
    assert place_emptiest_first({"t": 2}, pool, {"t": frozenset({"n3"})})["t"] >= {"n3"}
