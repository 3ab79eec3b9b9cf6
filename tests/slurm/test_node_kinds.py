"""Two partitions of a Slurm as two kinds of nodes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import parsl
import pytest
from parsl.config import Config

from freetrain_parsl.campaign.files.yaml_file import Variables
from freetrain_parsl.campaign.site.providers import make_executor, make_window_source
from freetrain_parsl.campaign.site.site import Site as SiteFile
from tests.executor.scenario import Site, make_app

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.slurm

SITE = f"""
site: two partitions
system: slurm
block:
  worker_init: export PYTHONPATH={Path(__file__).parents[2]}
kinds:
  west: {{partition: west, speed: 3}}
  east: {{partition: east}}
node: {{exclusive: true}}
network: {{driver_address: 127.0.0.1}}
planner: {{startup: 8 s, min_useful: 10 s, closing_margin: 3 s, max_walltime: 10 min, idle_timeout: 3 s, settle: 1 s}}
rate_limits: {{poll_interval: 1 s, submissions_per_minute: 60}}
trainings: {{heartbeat_timeout: 8 s, threads_per_slot: 1}}
checkpoints: {{interval: 2 s}}
"""


@pytest.fixture
def file() -> SiteFile:
    return SiteFile.parse(SITE, "site.yaml", Variables({}))


@pytest.fixture
def site(cluster, file, tmp_path) -> Iterator[Site]:
    """Load Parsl with the executor of the site file."""
    executor = make_executor(file, run_dir=tmp_path)
    parsl.load(Config([executor], run_dir=str(tmp_path / "runinfo"), strategy="none", initialize_logging=False))
    yield Site(executor)
    parsl.dfk().cleanup()
    parsl.clear()


@pytest.mark.smoke
def test_windows_are_those_of_both_partitions(cluster, file) -> None:
    survey = make_window_source(file).survey()
    kinds = {node: window.node_kind for window in survey.windows for node in window.nodes}
    assert kinds == {f"node{n:02}": "west" if n <= 3 else "east" for n in range(1, 9)}
    assert survey.nodes_by_kind == {"west": 3, "east": 5}
    assert survey.nodes == 8
    assert survey.effort > make_window_source(file.of_kind(file.kinds[0])).survey().effort


def test_blocks_run_in_the_partition_of_their_kind(site) -> None:
    """Two training jobs need one kind each; the third takes nodes of the other partition than the one that is full."""
    train = make_app(fuse=False)
    futures = {
        "w": train.options(name="w", node_kinds=["west"], min_nodes=3, max_nodes=3)(epochs=40),
        "e": train.options(name="e", node_kinds=["east"], max_nodes=1)(epochs=10),
    }
    site.until(lambda run: run.trainings.get("w") and run.trainings["w"].state == "running")
    futures["any"] = train.options(name="any", min_nodes=2, max_nodes=2)(epochs=10)
    for future in futures.values():
        assert future.result(timeout=240)["metrics"]["samples"] % 200 == 0
    run = site.run
    nodes = {name: {node for f in run.fragments if f.training == name for node in f.nodes} for name in futures}
    assert nodes["w"] == {"node01", "node02", "node03"}
    assert nodes["e"] < {f"node{n:02}" for n in range(4, 9)}
    assert all(len({run.node_kinds[node] for node in f.nodes}) == 1 for f in run.fragments)
