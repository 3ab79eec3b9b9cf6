"""Parsl's provider for the embedded cluster."""

from __future__ import annotations

import copy
from datetime import timedelta
from pathlib import Path

import pytest
from parsl.jobs.states import JobState
from parsl.launchers import SingleNodeLauncher

from freetrain_parsl.cluster.client import ClusterClient
from freetrain_parsl.cluster.processes import NODE_STARTER
from freetrain_parsl.cluster.provider import EmbeddedClusterProvider, EveryNodeLauncher, parse_walltime
from freetrain_parsl.cluster.workload import MainJob
from freetrain_parsl.errors import ClusterGone, InvalidSettings


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("00:00:45", 45), ("00:07:59", 479), ("1:00:00", 3600), ("00:00:01.5", 1.5), ("1-00:00:00", 86400)],
)
def test_a_walltime_is_read_to_the_second(text, seconds):
    assert parse_walltime(text) == timedelta(seconds=seconds)


@pytest.mark.parametrize(
    "text", ["", "10", "10:00", "00:00:00", "00:60:00", "-1:00:00", "x", "9" * 12 + ":00:00", "9" * 5000 + ":00:00"]
)
def test_another_way_of_writing_a_walltime_is_refused(text):
    with pytest.raises(InvalidSettings, match="HH:MM:SS"):
        EmbeddedClusterProvider(walltime=text)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nodes": 0}, "nodes must be a whole number of at least 1, got 0"),
        ({"nodes_per_block": 0}, "nodes_per_block must be a whole number of at least 1, got 0"),
        ({"max_blocks": -1}, "max_blocks must be a whole number of at least 1, got -1"),
        ({"min_blocks": -1}, "min_blocks must be a whole number of at least 0, got -1"),
        ({"nodelist": ()}, "nodelist must name a node, or be None for any"),
    ],
)
def test_impossible_sizes_are_refused(options, message) -> None:
    with pytest.raises(InvalidSettings, match=f"EmbeddedClusterProvider: {message}"):
        EmbeddedClusterProvider(**options)


def test_it_is_shown_as_it_was_made():
    provider = EmbeddedClusterProvider("name", nodes_per_block=2, launcher=SingleNodeLauncher())
    shown = repr(provider)
    assert "nodes_per_block=2" in shown
    assert "SingleNodeLauncher" in shown
    assert "workload=()" in shown


def test_the_launcher_starts_the_command_as_often_as_asked():
    launcher = EveryNodeLauncher()
    assert launcher("work", 1, 4) == "work"
    assert launcher("work", 2, 4) == "(work) &\n(work) &\nwait"


@pytest.mark.cluster
class TestBlocks:
    @pytest.fixture
    def provider(self, tmp_path):
        provider = EmbeddedClusterProvider(
            nodes=4, grace=timedelta(seconds=0.5), walltime="00:01:00", worker_init="export A=b"
        )
        provider.script_dir = str(tmp_path / "scripts")
        yield provider
        provider.close()

    def state(self, provider, job_id):
        return provider.status([job_id])[0].state

    @pytest.mark.smoke
    def test_its_own_cluster_starts_at_the_first_block_and_ends_with_close(self, provider, eventually):
        with pytest.raises(ClusterGone):
            ClusterClient()
        job_id = provider.submit("echo $A $JOBNAME", 1, "block-0")
        eventually(lambda: self.state(provider, job_id) == JobState.COMPLETED)
        (status,) = provider.status([job_id])
        assert status.exit_code == 0
        assert status.stdout.startswith("b block-0.")
        script = Path(provider.resources[job_id]["script_path"])
        assert script.stat().st_mode & 0o777 == 0o700
        provider.close()
        with pytest.raises(ClusterGone, match="no embedded cluster"):
            ClusterClient()
        with pytest.raises(ClusterGone, match="has been closed"):
            provider.status([job_id])

    def test_a_shallow_copy_submits_a_block_of_another_shape(self, provider, eventually):
        block = copy.copy(provider)
        block.nodes_per_block, block.walltime, block.nodelist = 2, "00:00:30", ("n01", "n03")
        job_id = block.submit("sleep 60", 1, "block")
        found = provider.ensure_started().jobs([job_id])[job_id]
        assert (found["nodes"], found["walltime"], found["kind"]) == (["n01", "n03"], 30.0, "preemptible")
        assert self.state(provider, job_id) == JobState.RUNNING
        assert provider.cancel([job_id]) == [True]
        eventually(lambda: self.state(provider, job_id) == JobState.CANCELLED)

    def test_each_end_of_a_block_has_a_state_that_parsl_takes_right(self, provider, eventually):
        client = provider.ensure_started()
        provider.walltime = "00:00:00.3"
        times_out = provider.submit("sleep 60", 1)
        provider.walltime = "00:01:00"
        fails = provider.submit("exit 3", 1)
        eventually(lambda: self.state(provider, times_out) == JobState.TIMEOUT)
        eventually(lambda: self.state(provider, fails) == JobState.FAILED)
        assert provider.status([fails])[0].exit_code == 3
        preempted = provider.submit("sleep 60", 1)
        client.submit(["sleep", "60"], nodes=4, walltime=timedelta(minutes=1), preemptible=False)
        waits = provider.submit("sleep 60", 1)
        eventually(lambda: self.state(provider, preempted) == JobState.CANCELLED)
        states = [status.state for status in provider.status([preempted, waits, "none"])]
        assert states == [JobState.CANCELLED, JobState.PENDING, JobState.UNKNOWN]

    def test_a_named_cluster_is_used_and_outlives_the_provider(self, start_cluster, tmp_path):
        cluster = start_cluster(workload=[MainJob(0, 1, 60, 60)], name="site")
        provider = EmbeddedClusterProvider("site")
        provider.script_dir = str(tmp_path)
        provider.submit("sleep 60", 1)
        provider.close()
        assert len(cluster.client.queue()) == 2

    def test_no_jobs_are_no_request(self):
        provider = EmbeddedClusterProvider("missing")
        assert provider.status([]) == []
        assert provider.cancel([]) == []


def test_the_environment_names_the_module_through_which_nodes_are_started(monkeypatch):
    provider = EmbeddedClusterProvider()
    monkeypatch.delenv(NODE_STARTER, raising=False)
    assert provider.node_starter == ""
    monkeypatch.setenv(NODE_STARTER, "a.module")
    assert provider.node_starter == "a.module"
