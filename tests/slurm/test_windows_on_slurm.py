"""Computed windows match Slurm's behaviour.

In each situation every window is tested on the real Slurm: a job on all its nodes for the whole minutes that it is open
starts at once; one that is a minute longer does not. Minutes are Slurm's resolution.
"""

from __future__ import annotations

import json
import math
import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from freetrain_parsl.campaign.site.site import Site
from freetrain_parsl.cli.commands import app
from freetrain_parsl.planning.model import WindowKind
from freetrain_parsl.windows.slurm.source import SlurmWindowSource
from tests.slurm.main_queue import until_planned

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.slurm.loopback import LoopbackSlurm

pytestmark = pytest.mark.slurm

MINUTE = 60.0
UNBOUNDED = math.inf


@dataclass(frozen=True)
class Situation:
    """A state of the cluster.

    Parameters
    ----------
    name
        Name of the test.
    prepare
        Creates the state.
    steps
        The windows expected: (nodes, minutes until the closing, rounded up), largest first.
    partition
        Partition of the windows.
    kind
        Kind of the windows.
    enforced
        Whether Slurm itself rejects longer jobs; if not, a longer block would delay the planned job.
    """

    name: str
    prepare: Callable[[LoopbackSlurm], object]
    steps: list[tuple[int, float]]
    partition: str = "backfill"
    kind: WindowKind = WindowKind.BACKFILL
    enforced: bool = True


def run(cluster, *options):
    """Start a whole-node job and wait until it runs."""
    job = cluster.submit("--exclusive", *options)
    cluster.wait_for_state(job, "RUNNING")
    return job


def plan(cluster, *options):
    """Queue a whole-node job and wait until Slurm has planned it."""
    job = cluster.submit("--exclusive", *options)
    until_planned(cluster, job)
    return job


def passes(cluster, count):
    """Wait for `count` full passes of the backfill scheduler."""

    def made():
        return int(re.search(r"Total cycles:\s*(\d+)", cluster.run("sdiag").partition("Backfilling")[2])[1])

    wanted, deadline = made() + count, time.monotonic() + 120
    while made() < wanted:
        assert time.monotonic() < deadline, f"the scheduler makes no passes:\n{cluster.run('squeue')}"
        time.sleep(0.1)


def nothing(cluster):
    """Leave the cluster empty: one window without end."""


def head_job(cluster):
    run(cluster, "--nodes=5", "--time=4")
    plan(cluster, "--nodes=8", "--time=10")


def two_steps(cluster):
    run(cluster, "--nodelist=node01,node02", "--time=3")
    run(cluster, "--nodelist=node03,node04,node05", "--time=6")
    plan(cluster, "--nodelist=node01,node02,node06", "--time=2")
    plan(cluster, "--nodelist=node03,node04,node05,node07,node08", "--time=2")


def beside_a_reservation(cluster):
    # Half a minute away from whole minutes: Slurm's clock is in whole seconds, so it may be a second behind this one.
    start = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + 3.5 * MINUTE))
    cluster.run(
        "scontrol",
        "create",
        "reservation",
        "ReservationName=maint",
        f"StartTime={start}",
        "Duration=30",
        "Users=root",
        "Nodes=node[01-03]",
    )


def with_a_drained_node(cluster):
    run(cluster, "--nodelist=node[01-04]", "--time=3")
    cluster.run("scontrol", "update", "NodeName=node08", "State=DRAIN", "Reason=fan")
    plan(cluster, "--nodes=7", "--time=5")
    cluster.submit("--exclusive", "--nodes=8", "--time=5")  # cannot be planned: a node is missing
    passes(cluster, 2)


def plan_in_another_partition(cluster):
    run(cluster, "--partition=small", "--nodes=2", "--time=5")
    plan(cluster, "--partition=small", "--nodes=4", "--time=5")


def held_job(cluster):
    cluster.submit("--exclusive", "--nodes=8", "--time=5", "--hold")


def array_behind_a_job(cluster):
    run(cluster, "--nodelist=node[01-06]", "--time=3")
    plan(cluster, "--array=1-2", "--nodes=4", "--time=2")


def dependent_job(cluster):
    first = run(cluster, "--nodelist=node[01-02]", "--time=3")
    job = cluster.submit("--exclusive", "--nodes=8", "--time=5", f"--dependency=afterany:{first}")
    deadline = time.monotonic() + 120
    while cluster.describe(job)["Reason"] != "Dependency":  # before Slurm has evaluated it, it may start any time
        assert time.monotonic() < deadline
        time.sleep(0.1)


def job_of_the_future(cluster):
    cluster.submit("--exclusive", "--nodes=8", "--time=5", "--begin=now+3600")


def head_job_with_features(cluster):
    run(cluster, "--nodelist=node01", "--time=3")
    plan(cluster, "--nodes=2", "--time=5", "--constraint=fast")


def over_a_preemptible_job(cluster):
    run(cluster, "--partition=preemptible", "--nodelist=node[01-02]", "--time=60")
    run(cluster, "--nodelist=node[03-06]", "--time=3")
    plan(cluster, "--nodes=8", "--time=10")


SITUATIONS = [
    Situation("empty", nothing, [(8, UNBOUNDED)]),
    Situation("head_job", head_job, [(3, 4)]),
    Situation("head_job_in_the_same_partition", head_job, [(3, 4)], partition="main"),
    Situation("head_job_over_preemptible_blocks", head_job, [(3, 4)], "preemptible", WindowKind.PREEMPTIBLE),
    Situation("two_steps", two_steps, [(2, 6), (1, 3)]),
    Situation("reservation", beside_a_reservation, [(5, UNBOUNDED), (3, 4)]),
    Situation("drained_node", with_a_drained_node, [(3, 3)]),
    Situation("other_partition", plan_in_another_partition, [(4, UNBOUNDED), (2, 5)]),
    Situation("held_job", held_job, [(8, UNBOUNDED)]),
    Situation("array", array_behind_a_job, [(2, 3)]),
    Situation("dependency", dependent_job, [(6, UNBOUNDED)]),
    Situation("begin_time", job_of_the_future, [(8, 60)], enforced=False),
    Situation("features", head_job_with_features, [(6, UNBOUNDED), (1, 3)]),
    Situation("preemptible_job_in_the_way", over_a_preemptible_job, [(2, 3)]),
]


@pytest.mark.parametrize("situation", SITUATIONS, ids=lambda situation: situation.name)
def test_slurm_keeps_to_the_windows(cluster, situation):
    """A block that fits starts at once, and one that is a minute too long does not."""
    situation.prepare(cluster)
    source = SlurmWindowSource(partition=situation.partition)
    survey = source.survey()

    def steps():
        for window in survey.windows:
            remaining = window.remaining(survey.time)
            yield len(window.nodes), remaining if math.isinf(remaining) else math.ceil(remaining / MINUTE)

    assert list(steps()) == situation.steps
    assert {window.kind for window in survey.windows} == {situation.kind}

    def submit(window, minutes):
        nodes = f"--nodelist={','.join(window.nodes)}"
        return cluster.submit("--exclusive", f"--partition={situation.partition}", nodes, f"--time={minutes}")

    bounded = [window for window in survey.windows if window.closes is not None]
    longer = [submit(window, int(window.remaining(time.time()) // MINUTE) + 1) for window in bounded]
    if longer and situation.enforced:
        passes(cluster, 2)
        assert [cluster.state_of(job) for job in longer] == ["PENDING"] * len(longer)
    for job in longer:
        cluster.run("scancel", job)
        cluster.wait_for_state(job, "CANCELLED")
    fitting = [
        submit(w, 10000 if w.closes is None else int(w.remaining(time.time()) // MINUTE)) for w in survey.windows
    ]
    for job in fitting:
        cluster.wait_for_state(job, "RUNNING", timeout=10)


def test_a_site_file_by_init_is_accepted_as_it_is(cluster, tmp_path, monkeypatch):
    """`freetrain init` finds the preemptible partition, and `freetrain windows` shows its nodes."""
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    file = tmp_path / "site.yaml"
    wrote = CliRunner().invoke(app, ["init", str(file)])
    assert wrote.exit_code == 0, wrote.stderr
    site = Site.load(file)
    assert site.block["partition"] == "preemptible"
    shown = CliRunner().invoke(app, ["windows", "--config", str(file), "--json"])
    assert shown.exit_code == 0, shown.stderr
    assert {window["kind"] for window in json.loads(shown.stdout)} <= {"preemptible"}
