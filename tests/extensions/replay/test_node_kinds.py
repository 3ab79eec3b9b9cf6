"""Replays of logs whose nodes are of several kinds, which the user states by the nodes' names."""

from __future__ import annotations

import itertools
from io import StringIO
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from freetrain_parsl.errors import InvalidInput, InvalidSettings
from freetrain_parsl.extensions.replay.comparison import Contestant, compare
from freetrain_parsl.extensions.replay.ideal import BestRates, ideal_value
from freetrain_parsl.extensions.replay.logs.logs import open_log
from freetrain_parsl.extensions.replay.logs.node_kinds import read_kinds, state_kinds, with_kinds
from freetrain_parsl.extensions.replay.page.frame import write_page
from freetrain_parsl.extensions.replay.simulation import replay
from freetrain_parsl.extensions.replay.terminal import kinds_table
from freetrain_parsl.extensions.replay.trainers import TrainerSet, trainer_set
from freetrain_parsl.planning.curves.scaling import ScalingCurve
from freetrain_parsl.planning.model import PlannedJob
from freetrain_parsl.planning.objectives.base import OBJECTIVES
from freetrain_parsl.planning.policies import MilpPolicy

if TYPE_CHECKING:
    from pathlib import Path

    from freetrain_parsl.extensions.replay.holes import HoleLog

THROUGHPUT = OBJECTIVES["throughput"]
KINDS = ("gpu=g*:10", "cpu=c[1-3]")
LOG = "node,start,end\ng1,0,100\ng2,20,60\nc1,0,100\nc2,0,100\nc3,50,100\n"
SACCT = """JobID|Submit|Start|End|NNodes|Timelimit|State|NodeList
1|2026-01-01T00:00:00|2026-01-01T00:00:00|2026-01-01T01:00:00|1|01:00:00|COMPLETED|g1
2|2026-01-01T00:00:00|2026-01-01T00:00:00|2026-01-01T02:00:00|2|01:00:00|COMPLETED|c[1-2]
3|2026-01-01T00:00:00|2026-01-01T04:00:00|2026-01-01T05:00:00|3|01:00:00|COMPLETED|c[1-2],g1
"""


def opened(directory: Path, *kinds: str, text: str = LOG, name: str = "log.csv", nodes: int | None = None) -> HoleLog:
    path = directory / name
    path.write_text(text)
    log = open_log(path, nodes=nodes)
    state_kinds(log, path, read_kinds(kinds))
    return log


def either(name: str, gpu: float, cpu: float, most: int = 2) -> PlannedJob:
    curves = {kind: ScalingCurve({1: rate, 4: 4 * rate}) for kind, rate in (("gpu", gpu), ("cpu", cpu))}
    return PlannedJob(name, 1, most, curves["gpu"], node_kinds=("gpu", "cpu"), curves=curves)


def test_nodes_have_the_kinds_that_their_names_say(tmp_path: Path) -> None:
    log = opened(tmp_path, *KINDS)
    assert log.kinds == {"g1": "gpu", "g2": "gpu", "c1": "cpu", "c2": "cpu", "c3": "cpu"}
    assert log.mean_idle_by_kind() == {"cpu": 2.5, "gpu": 1.4}
    assert opened(tmp_path).kinds == {}
    assert opened(tmp_path, *KINDS, text=SACCT, name="jobs", nodes=3).mean_idle_by_kind().keys() == {"cpu", "gpu"}


@pytest.mark.parametrize(
    ("kinds", "problem"),
    [
        (("gpu=g*",), "log.csv:4: node 'c1' is of no kind"),
        (("gpu=g*", "cpu=*"), "log.csv:2: node 'g1' is of several kinds"),
        (("gpu=g*", "cpu=c*", "x=y*"), "--kind x: no node of this kind is ever idle in .*log.csv"),
        (("gpu",), "--kind gpu: give NAME=NODES"),
        (("gpu=",), "--kind gpu=: give NAME=NODES"),
        (("g p=g*",), "named by 1 to 32 letters"),
        (("gpu=g*", "gpu=c*"), "kind 'gpu' is given twice"),
        (("gpu=g*:0",), "the speed must be a number from 1e-6 to 1e6, got 0"),
        (("gpu=g*:nan",), "the speed must be a number from"),
        (("gpu=g*:1e308",), "the speed must be a number from"),
        (("gpu=g*:fast",), "the speed must be a number, got 'fast'"),
        (("gpu=g[1-2]*", "cpu=c*"), "give a list with .* or a pattern with .*, not both"),
        (("gpu=g[",), "--kind gpu=g\\[: "),
    ],
)
def test_what_does_not_state_the_kinds_is_refused(tmp_path: Path, kinds: tuple[str, ...], problem: str) -> None:
    with pytest.raises((InvalidInput, InvalidSettings), match=problem):
        opened(tmp_path, *kinds)


def test_the_line_of_a_job_log_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"jobs:2: node 'g1' is of no kind"):
        opened(tmp_path, "cpu=c*", text=SACCT, name="jobs", nodes=3)
    with pytest.raises(InvalidInput, match=r"jobs: no job names the node that is called 'node0' here.*--nodes"):
        opened(tmp_path, *KINDS, text=SACCT, name="jobs", nodes=4)


def test_each_training_runs_where_it_gains_most_at_the_speed_of_that_kind(tmp_path: Path) -> None:
    """Of two training jobs, the one that gains more by a GPU has it; the other has the two nodes without, 20/s."""
    log = opened(tmp_path, "gpu=g*", "cpu=c*", text="node,start,end\ng1,0,100\nc1,0,100\nc2,0,100\n")
    trainers = (either("a", 100.0, 10.0), either("b", 50.0, 10.0))
    rates = BestRates(trainers, THROUGHPUT, ["cpu", "gpu"])
    assert ideal_value(rates, log) == pytest.approx(100 * (100 + 20))
    outcome = replay(log, rates, MilpPolicy("throughput"))
    assert [account.samples for account in outcome.accounts] == pytest.approx([10_000, 2_000])
    assert outcome.used_seconds == outcome.idle_seconds == 300


def test_efficiency_and_losses_add_up_to_one(tmp_path: Path) -> None:
    log = opened(tmp_path, *KINDS)
    trainers = TrainerSet("two", (either("a", 100.0, 10.0), either("b", 50.0, 10.0, most=4)), "speedup")
    result = compare(log, trainers, [Contestant("equal-share", objective="speedup")])
    losses = sum(value for key, value in result.items() if key.startswith("loss_"))
    assert result["efficiency"] + losses == pytest.approx(1.0)
    assert result["efficiency"] <= result["oracle"]
    assert result["idle_by_kind"] == {"cpu": 2.5, "gpu": 1.4}
    assert sum(result["used_by_kind"].values()) == pytest.approx(result["node_hours"]["used"])


def test_the_node_hours_used_of_each_kind_are_shown(tmp_path: Path) -> None:
    """One training job can use GPU nodes only, the other CPU nodes only, one at a time."""
    log = opened(tmp_path, "gpu=g*", "cpu=c*", text="node,start,end\ng1,0,7200\nc1,0,36000\nc2,0,36000\n")
    curve = ScalingCurve({1: 1.0})
    both = tuple(PlannedJob(kind, 1, 1, curve, node_kinds=(kind,)) for kind in ("gpu", "cpu"))
    trainers = TrainerSet("two", both, "throughput")
    result = compare(log, trainers, [Contestant("milp")])
    assert result["used_by_kind"] == pytest.approx({"cpu": 10.0, "gpu": 2.0})
    assert [trainer["used_by_kind"] for trainer in result["policies"][0]["trainers"]] == [{"gpu": 2.0}, {"cpu": 10.0}]
    console = Console(file=StringIO(), width=80, highlight=False)
    console.print(kinds_table(result))
    assert [line.split() for line in console.file.getvalue().splitlines()] == [
        ["node-hours", "cpu,", "of", "gpu,", "of"],
        ["used", "closings", "20", "idle", "2", "idle"],
        ["milp", "none", "10", "(50", "%)", "2", "(100", "%)"],
    ]
    write_page({**result, "command": "freetrain replay"}, tmp_path / "page.html")
    assert "of cpu nodes" in (tmp_path / "page.html").read_text()


def test_a_curve_without_kinds_is_that_of_the_fastest() -> None:
    (trainer,) = with_kinds(
        TrainerSet("one", (PlannedJob("t", 1, 2, ScalingCurve({1: 50.0})),), "throughput"), read_kinds(KINDS)
    ).trainers
    assert {kind: curve(1) for kind, curve in trainer.curves.items()} == {"gpu": 50.0, "cpu": 5.0}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("t.yaml", '- name: a\n  max: 2\n  curve: {gpu: "1:100;2:180", cpu: alexnet}\n'),
        ("t.csv", "name,max,curve\na,2,gpu:fast.csv;cpu:alexnet\n"),
    ],
)
def test_a_list_has_curves_for_each_kind(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / "fast.csv").write_text("nodes,rate\n1,100\n2,180\n")
    path = tmp_path / name
    path.write_text(text)
    (trainer,) = trainer_set(str(path), ["gpu", "cpu", "other"]).trainers
    assert trainer.node_kinds == ("gpu", "cpu")
    assert trainer.curves["gpu"](2) == 180.0
    with pytest.raises(InvalidInput, match=rf"{name}:\d: trainer 'a': no nodes are of kind 'cpu'; there are gpu"):
        trainer_set(str(path), ["gpu"])
    with pytest.raises(InvalidInput, match=rf"{name}:\d: trainer 'a': its curve is for kinds of nodes \(gpu, cpu\)"):
        trainer_set(str(path))


@settings(max_examples=40, deadline=None)
@given(
    speeds=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 3)), min_size=1, max_size=3),
    idle=st.tuples(st.integers(0, 3), st.integers(0, 3)),
)
def test_the_best_rate_is_that_of_the_best_of_all_kinds_and_counts(
    speeds: list[tuple[int, int, int]], idle: tuple[int, int]
) -> None:
    trainers = [either(str(number), gpu, cpu, most) for number, (gpu, cpu, most) in enumerate(speeds)]
    choices = itertools.product(
        *([(0, 0), *((k, n) for k in (0, 1) for n in range(1, t.max_nodes + 1))] for t in trainers)
    )
    best = 0.0
    for choice in choices:
        if all(sum(n for kind, n in choice if kind == each) <= idle[each] for each in (0, 1)):
            best = max(best, sum(speeds[i][kind] * n for i, (kind, n) in enumerate(choice)))
    rates = BestRates(trainers, THROUGHPUT, ["gpu", "cpu"])
    assert rates(frozenset(range(len(trainers))), idle) == pytest.approx(best)
