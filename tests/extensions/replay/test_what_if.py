"""The table of other costs: each cell equals the replay with these costs, in any process."""

from __future__ import annotations

import multiprocessing
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from freetrain_parsl.extensions.replay import comparison as module
from freetrain_parsl.extensions.replay.comparison import RESCALE_FACTORS, START_SECONDS, Case, what_if
from freetrain_parsl.extensions.replay.ideal import BestRates
from freetrain_parsl.extensions.replay.simulation import ReplaySettings
from freetrain_parsl.planning.curves.scaling import ScalingCurve
from freetrain_parsl.planning.model import CostsInSeconds, PlannedJob
from freetrain_parsl.planning.objectives.base import OBJECTIVES
from freetrain_parsl.planning.policies import MilpPolicy
from tests.extensions.replay.small_logs import SmallLog


def make_policy():
    return MilpPolicy("throughput")


@pytest.fixture
def case():
    return make_case()


def make_case():
    log = SmallLog([("a", 0.0, 400.0), ("b", 100.0, 300.0), ("a", 450.0, 900.0)])
    trainer = PlannedJob("t", 1, 2, ScalingCurve({1: 10, 2: 16}), CostsInSeconds(up=4, down=2))
    return Case(log, BestRates((trainer,), OBJECTIVES["throughput"]), make_policy, ReplaySettings())


def test_each_cell_is_what_a_hand_computes(case):
    """850 s on one node and 200 s on two; it grows at 10/s, loses a node at 16/s, the last at 10/s; two starts."""
    table = what_if(case, 1000.0, processes=1)
    assert (table["rescale_factors"], table["start_seconds"]) == (list(RESCALE_FACTORS), list(START_SECONDS))
    for factor, row in zip(RESCALE_FACTORS, table["efficiency"], strict=True):
        charged = factor * (4 * 10 + 2 * 16 + 2 * 10)
        worth = [8500 + 1200 - charged - 2 * 10 * start for start in START_SECONDS]
        assert row == [pytest.approx(value / 1000) for value in worth]


def test_parallel_processes_compute_the_same(case):
    shares = []
    assert what_if(case, 1.0, processes=2, on_progress=shares.append) == what_if(case, 1.0, processes=1)
    assert shares == [number / 16 for number in range(17)]
    assert multiprocessing.active_children() == []


def test_an_interruption_leaves_no_process(case, monkeypatch):
    def interrupted(_futures):
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "as_completed", interrupted)
    with pytest.raises(KeyboardInterrupt):
        what_if(case, 1.0, processes=2)
    assert multiprocessing.active_children() == []


_INTERRUPTED = """
import os, signal, sys, time
sys.path.insert(0, sys.argv[1])
from freetrain_parsl.extensions.replay import comparison as module
from tests.extensions.replay.test_what_if import make_case

def interrupted(_futures):
    time.sleep(0.3)  # the processes import meanwhile
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # this process reacts last
    os.killpg(0, signal.SIGINT)  # as a terminal does
    time.sleep(0.5)
    raise KeyboardInterrupt

module.as_completed = interrupted
if __name__ == "__main__":
    try:
        module.what_if(make_case(), 1.0, processes=2)
    except KeyboardInterrupt:
        print("interrupted")
"""


def test_processes_that_are_interrupted_while_they_start_print_nothing(tmp_path):
    (tmp_path / "script.py").write_text(_INTERRUPTED)
    root = str(Path(__file__).parents[3])
    done = subprocess.run(
        [sys.executable, "script.py", root],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("interrupted\n", "")


def test_where_dedicated_nodes_do_nothing_there_are_no_figures(case):
    assert {cell for row in what_if(case, 0.0, processes=1)["efficiency"] for cell in row} == {None}
