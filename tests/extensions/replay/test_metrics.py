"""The metrics of a replay: equal to results computed by hand, and consistent."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from freetrain_parsl.errors import InvalidInput, InvalidSettings
from freetrain_parsl.extensions.replay.comparison import Contestant, compare
from freetrain_parsl.extensions.replay.logs.logs import open_log
from freetrain_parsl.extensions.replay.page.wording import percent
from freetrain_parsl.extensions.replay.simulation import Cost, Knowledge, ReplaySettings
from freetrain_parsl.extensions.replay.terminal import heading, result_table, summary
from freetrain_parsl.extensions.replay.trainers import TrainerSet
from freetrain_parsl.planning.curves.scaling import ScalingCurve
from freetrain_parsl.planning.model import CostsInSeconds, Decision, PlannedJob
from freetrain_parsl.planning.policies import POLICIES, Policy

if TYPE_CHECKING:
    from datetime import timedelta

CAUSES = ("concavity", "unused", "split", "rescale", "preemption", "start")


class FirstNodeOnly(Policy):
    """Gives only the first node, to the first trainer."""

    name = "first-node"

    def __init__(self, objective: object, *, horizon: timedelta | None = None) -> None:
        pass

    def allocate(self, pool, trainers, current, now):
        allocation = {trainers[0].name: frozenset([next(iter(pool))])} if pool and trainers else {}
        return Decision(allocation, 0.0, proven_optimal=False, bound=0.0)


def read(tmp_path, *lines):
    file = tmp_path / "idle.csv"
    file.write_text("\n".join(lines) + "\n")
    return open_log(file)


def trainer(name="t", least=1, most=2, work=float("inf"), submitted=0.0, rates=((1, 10), (2, 16))):
    costs = CostsInSeconds(up=2, down=1)
    return PlannedJob(name, least, most, ScalingCurve(rates), costs, work, submitted=submitted)


def measure(log, *trainers, policy="milp", knowledge=Knowledge.NONE, objective="throughput", price=None, **options):
    result = compare(
        log,
        TrainerSet("test", trainers or (trainer(),), objective),
        [Contestant(policy, knowledge, objective, 120.0)],
        ReplaySettings(**options),
        price_per_node_hour=price,
    )
    json.dumps(result, allow_nan=False)
    return result


def losses(entry):
    return {cause: pytest.approx(entry[f"loss_{cause}"], abs=1e-12) for cause in CAUSES}


def test_a_node_that_leaves_costs_a_preemption(tmp_path):
    """Dedicated: 1.4 nodes for 100 s, 1240 between 1000 and 1600; the same in the holes, less 1 s at 16/s."""
    entry = measure(read(tmp_path, "a,0,100", "b,0,40"))["policies"][0]
    assert entry["efficiency"] == pytest.approx(1224 / 1240)
    assert entry["oracle"] == pytest.approx(1)
    assert entry["oracle_ratio"] == pytest.approx(1224 / 1240)
    assert losses(entry) == {**dict.fromkeys(CAUSES, 0), "preemption": 16 / 1240}
    assert entry["node_hours"] == {"idle": pytest.approx(140 / 3600), "used": pytest.approx(140 / 3600)}
    assert (entry["events"], entry["refused"]) == (2, 0)


def test_a_node_that_comes_costs_a_rescale(tmp_path):
    """2 s at 10/s to grow; `full` also charges the start, 30 s at 10/s; the log's clock may begin at any time."""
    log = read(tmp_path, "a,1000,1100", "b,1040,1080")
    paper, full = (measure(log, cost=cost)["policies"][0] for cost in (Cost.PAPER, Cost.FULL))
    parts = {**dict.fromkeys(CAUSES, 0), "rescale": 20 / 1240, "preemption": 16 / 1240}
    assert losses(paper) == parts
    assert losses(full) == {**parts, "start": 300 / 1240}
    assert (paper["efficiency"], full["efficiency"]) == (pytest.approx(1204 / 1240), pytest.approx(904 / 1240))
    (one,) = paper["trainers"]
    assert (one["started"], one["finished"], one["work"]) == (0, None, None)
    assert (one["rescales"], one["preemptions"]) == (1, 1)
    assert one["samples"] == pytest.approx(1204)


def test_a_node_that_nobody_gets_is_unused(tmp_path, monkeypatch):
    monkeypatch.setitem(POLICIES, "first-node", FirstNodeOnly)
    entry = measure(read(tmp_path, "a,0,100", "b,0,40"), policy="first-node")["policies"][0]
    assert losses(entry) == {**dict.fromkeys(CAUSES, 0), "unused": 240 / 1240}
    assert entry["node_hours"]["used"] == pytest.approx(100 / 3600)
    assert entry["proven_optimal_share"] == 0


def test_a_worse_split_is_a_loss_of_its_own(tmp_path, monkeypatch):
    """Both trainers could use the one node; the policy takes the first, which is slower."""
    monkeypatch.setitem(POLICIES, "first-node", FirstNodeOnly)
    slow, quick = trainer("a", rates=[(1, 5)]), trainer("b", rates=[(1, 10)])
    entry = measure(read(tmp_path, "a,0,100"), slow, quick, policy="first-node")["policies"][0]
    assert entry["efficiency"] == pytest.approx(0.5)
    assert losses(entry) == {**dict.fromkeys(CAUSES, 0), "split": 0.5}


def test_times_to_finish(tmp_path):
    """Three training jobs of 100 samples on one node at 10/s, one after the other, the last submitted at 15 s."""
    one = [
        trainer(name, most=1, work=100.0, rates=[(1, 10)], submitted=at) for name, at in (("x", 0), ("y", 0), ("z", 15))
    ]
    entry = measure(read(tmp_path, "a,0,100"), *one, concurrent=1)["policies"][0]
    assert [item["finished"] for item in entry["trainers"]] == [10, 20, 30]
    assert [item["submitted"] for item in entry["trainers"]] == [0, 0, 15]
    assert entry["jct"] == {"finished": 3, "mean": 15, "median": 15, "p95": pytest.approx(19.5)}
    assert entry["efficiency"] == pytest.approx(1)


def test_nobody_finishes(tmp_path):
    entry = measure(read(tmp_path, "a,0,100"))["policies"][0]
    assert entry["jct"] == {"finished": 0, "mean": None, "median": None, "p95": None}


def test_price(tmp_path):
    log = read(tmp_path, "a,0,7200", "b,0,3600")
    assert measure(log, trainer(most=1), price=0.5)["idle_cost"] == {
        "price_per_node_hour": 0.5,
        "idle": pytest.approx(1.5),
        "used": pytest.approx(1.0),
    }
    assert measure(log)["idle_cost"] is None


def test_the_log_is_described_by_time(tmp_path):
    """Two idle for 10 s, one for 20 s, three for 70 s: mean 2.5 and median 3, for any number of events."""
    log = read(tmp_path, "a,100,200", "b,100,110", "c,130,200", "d,130,200", "x,0,1")
    figures = measure(read(tmp_path, "a,100,200", "b,100,110", "c,130,200", "d,130,200"))["log"]
    assert (figures["mean_idle"], figures["median_idle"]) == (pytest.approx(2.5), 3)
    assert (figures["seconds"], figures["events"], figures["nodes"], figures["skipped"]) == (100, 3, 4, 0)
    assert log.mean_idle() == pytest.approx(251 / 200)


def test_one_policy_stands_at_the_top_too(tmp_path):
    """Its figures can be read with or without the list; but `trainers` describes the set."""
    result = measure(read(tmp_path, "a,0,100"))
    (entry,) = result["policies"]
    top = {key: value for key, value in result.items() if key in entry and key != "trainers"}
    assert top.keys() == entry.keys() - {"trainers", "series", "solve_histogram"}
    assert all(entry[key] == value for key, value in top.items())
    assert result["trainers"] == {"spec": "test", "count": 1, "objective": "throughput"}


def test_several_policies_are_measured_alike(tmp_path):
    told = [Contestant(name, item) for name in ("milp", "equal-share") for item in (Knowledge.NONE, Knowledge.PERFECT)]
    result = compare(read(tmp_path, "a,0,100", "b,0,40"), TrainerSet("test", (trainer(),), "throughput"), told)
    assert "efficiency" not in result
    assert [(entry["policy"], entry["knowledge"], entry["horizon"]) for entry in result["policies"]] == [
        ("milp", "none", "adaptive"),
        ("milp", "perfect", "adaptive"),
        ("equal-share", "none", "adaptive"),
        ("equal-share", "perfect", "adaptive"),
    ]
    assert len({entry["oracle"] for entry in result["policies"]}) == 1


def test_too_few_dedicated_nodes_leave_no_measure(tmp_path):
    """A trainer that needs two nodes runs while two are idle, but not on zero or one: 0.8 are idle on average."""
    result = measure(read(tmp_path, "a,0,40", "b,0,40", "c,99,100"), trainer(least=2))
    assert result["dedicated_nodes"] == pytest.approx(0.81)
    assert result["efficiency"] is None
    assert result["loss_rescale"] is None
    assert result["oracle_ratio"] == pytest.approx(624 / 640), "a preemption"
    assert "so U is undefined" in summary(result)
    assert result_table(result).row_count == 2


def test_a_busy_machine_is_refused(tmp_path):
    """A job log may have no holes."""
    file = tmp_path / "jobs.swf"
    jobs = ("1 0 0 100 2 -1 -1 2 100", "2 0 100 100 2 -1 -1 2 100", "3 0 200 100 2 -1 -1 2 100")
    file.write_text("".join(f"{job} -1 1 -1 -1 -1 -1 -1 -1 -1\n" for job in jobs))
    with pytest.raises(InvalidInput, match=r"jobs\.swf: no node is ever idle"):
        measure(open_log(file, nodes=2))


def test_estimates_need_a_log_that_has_them(tmp_path):
    with pytest.raises(InvalidSettings, match="closing times cannot be estimated"):
        measure(read(tmp_path, "a,0,100"), knowledge=Knowledge.ESTIMATED)


def test_the_terminal_is_told_what_matters(tmp_path):
    result = measure(read(tmp_path, "a,0,7200", "b,0,3600"), price=2.0)
    text = (heading(result) + "\n" + summary(result)).replace("\N{NO-BREAK SPACE}", " ")
    assert text == (
        "idle.csv: 2 nodes, 2 h\n"
        "idle: 1.5 nodes on average, 1 in the median, 2 changes\n"
        "training jobs: 1 (test), measured by throughput, costs paper\n"
        "In 2 h, training in the idle nodes with milp would have done 100.0 % of what 1.5 dedicated nodes do, in 3 of "
        "3 idle node-hours (100 %), worth 6 of 6."
    )
    assert heading(result | {"curves": "learned", "blocks_start_in": 20.0}).endswith(
        "costs paper, curves learned, in blocks that train after 20 s"
    )


@pytest.mark.parametrize("mean", [0.3, 1.0, 1.4, 1.5, 2.0, 2.9])
def test_dedicated_nodes_are_a_mean_and_their_value_is_interpolated(tmp_path, mean):
    """Between 10/s on one node, 16/s on two and 20/s on three; zero on zero nodes."""
    whole = int(mean)
    lines = [f"n{node},0,1000" for node in range(whole)]
    lines += [f"x,0,{1000 * (mean - whole):g}"] if mean > whole else []
    result = measure(read(tmp_path, *lines, "end,999.999,1000"), trainer(most=3, rates=((1, 10), (2, 16), (3, 20))))
    rates = [0, 10, 16, 20, 20]
    value = 1000 * (rates[whole] + (mean - whole) * (rates[whole + 1] - rates[whole]))
    assert result["dedicated_nodes"] == pytest.approx(mean, abs=1e-5)
    assert result["oracle"] == pytest.approx(1, abs=1e-4), "it has the same nodes, one of them for part of the time"
    samples = sum(item["samples"] for item in result["policies"][0]["trainers"])
    assert samples / result["efficiency"] == pytest.approx(value, rel=1e-4)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seconds=st.floats(1, 999), more=st.floats(0.01, 1.0))
def test_efficiency_has_no_jumps(tmp_path, seconds, more):
    """One more second of one idle node in 1000 changes U by thousandths, at a mean of 0.5 and elsewhere."""
    before, after = (
        measure(read(tmp_path, "a,0,500", f"b,0,{length!r}", "end,999.999,1000"))["efficiency"]
        for length in (seconds, min(1000.0, seconds + more))
    )
    assert before == pytest.approx(after, abs=0.005)


@pytest.mark.parametrize(
    ("trainers", "concurrent", "note"),
    [
        (2, None, "2 trainers of at most 2 nodes can use at most 4 of the 4.5 nodes that are idle on average"),
        (1, None, "one trainer can use at most 2 of the 4.5 nodes"),
        (5, 2, "2 trainers at a time of at most 2 nodes can use at most 4 of the 4.5 nodes"),
        (3, None, None),
        (5, 3, None),
    ],
)
def test_trainers_that_cannot_use_the_nodes_are_told_of(tmp_path, trainers, concurrent, note):
    log = read(tmp_path, *(f"n{node},0,100" for node in range(4)), "x,0,50")
    notes = measure(log, *(trainer(f"t{i}") for i in range(trainers)), concurrent=concurrent)["notes"]
    assert len(notes) == (note is not None)
    assert all(text.startswith(note) and text.endswith("add trainers, or let them use more nodes") for text in notes)


def test_the_headline_is_of_what_can_be_had(tmp_path):
    """Known closings are better here: a start costs more than the value of the first hole."""
    log = read(tmp_path, "a,0,40", "a,50,2000", "b,60,62")
    told = [Contestant("window", knowledge, "throughput") for knowledge in (Knowledge.PERFECT, Knowledge.NONE)]
    chosen = TrainerSet("test", (trainer(),), "throughput")
    result = compare(log, chosen, told, ReplaySettings(cost=Cost.FULL))
    perfect, none = result["policies"]
    assert perfect["efficiency"] > none["efficiency"]
    assert f"with window would have done {percent(none['efficiency'])} of" in summary(result)
    alone = compare(log, chosen, told[:1], ReplaySettings(cost=Cost.FULL))
    assert summary(alone).startswith("Upper bound, because no plan knows future closings: In ")
    assert percent(perfect["efficiency"]) in summary(alone)


intervals = st.lists(
    st.tuples(st.integers(0, 5), st.integers(0, 300), st.integers(1, 200)), min_size=1, max_size=12
).filter(lambda items: all(_apart(items, node) for node in range(6)))


def _apart(items, node):
    spans = sorted((start, start + length) for name, start, length in items if name == node)
    return all(first[1] <= second[0] for first, second in pairwise(spans))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    spans=intervals,
    bounds=st.lists(st.tuples(st.integers(1, 3), st.integers(0, 3)), min_size=1, max_size=3),
    policy=st.sampled_from(["milp", "equal-share"]),
    knowledge=st.sampled_from([Knowledge.NONE, Knowledge.PERFECT]),
    cost=st.sampled_from(Cost),
    work=st.sampled_from([float("inf"), 700.0]),
)
def test_efficiency_and_losses_add_up_to_one(tmp_path, spans, bounds, policy, knowledge, cost, work):
    """The charts add up to the figures too."""
    log = read(tmp_path, *(f"n{node},{start},{start + length}" for node, start, length in spans))
    trainers = [trainer(f"t{i}", least, least + more, work) for i, (least, more) in enumerate(bounds)]
    entry = measure(log, *trainers, policy=policy, knowledge=knowledge, cost=cost)["policies"][0]
    series, hours = entry["series"], entry["node_hours"]
    used = sum(sum(values) for values in series["used"].values())
    assert sum(series["idle"]) * series["bin_seconds"] / 3600 == pytest.approx(hours["idle"], rel=0.01)
    assert used * series["bin_seconds"] / 3600 == pytest.approx(hours["used"], rel=0.01)
    assert sum(item["node_hours"] for item in entry["trainers"]) == pytest.approx(hours["used"])
    assert sum(entry["solve_histogram"]["counts"]) == entry["solves"]
    assert len(series["idle"]) == len(series["time"]) == len(series["efficiency"])
    if entry["efficiency"] is None:
        return
    total = entry["efficiency"] + sum(entry[f"loss_{cause}"] for cause in CAUSES)
    assert total == pytest.approx(1)
    assert series["efficiency"][-1] == pytest.approx(entry["efficiency"], abs=1e-4)
    assert series["oracle"][-1] == pytest.approx(entry["oracle"], abs=1e-4)
    if work == float("inf"):
        assert entry["oracle_ratio"] is None or entry["oracle_ratio"] <= 1 + 1e-9
