"""The real Slurm that the tests start: it is real, fails on demand, and leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from freetrain_parsl.errors import BatchSystemError, InvalidSettings
from tests.support.slurm import loopback as loopback_slurm
from tests.support.slurm import sweeper
from tests.support.slurm.loopback import LoopbackPartition, LoopbackSlurm
from tests.support.slurm.slurm_config import node_names

pytestmark = pytest.mark.slurm

_SCRIPT = """
import sys
from tests.support.slurm.loopback import LoopbackSlurm
with LoopbackSlurm(nodes=1) as cluster:
    cluster.wait_for_state(cluster.submit("--time=5"), "RUNNING")
    print(cluster.environment["FREETRAIN_LOOPBACK_SLURM"], cluster.directory, flush=True)
    if sys.argv[1] == "fail":
        raise KeyboardInterrupt
    sys.stdin.read()
"""


def until(condition, seconds=120.0) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.02)


@pytest.mark.smoke
def test_jobs_are_real_processes_on_named_nodes(cluster):
    """A job on two nodes writes the names of both."""
    file = cluster.work / "names"
    file.unlink(missing_ok=True)
    job = cluster.submit(
        "--nodes=2", "--nodelist=node03,node05", command=f"srun hostname -s; echo $SLURM_JOB_NODELIST > {file}"
    )
    cluster.wait_for_state(job, "COMPLETED")
    assert file.read_text() == "node[03,05]\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may submit as another user")
def test_root_submits_as_anyone(cluster):
    """Main jobs can belong to other users."""
    job = cluster.submit("--time=5", user="nobody")
    assert cluster.describe(job)["UserId"].startswith("nobody(")


def test_jobs_outlive_the_controller(cluster):
    """A stopped slurmctld does not respond, and knows the running job after its restart."""
    job = cluster.submit("--time=5")
    cluster.wait_for_state(job, "RUNNING")
    cluster.stop_controller()
    with pytest.raises(BatchSystemError, match="Unable to contact slurm controller"):
        cluster.run("squeue")
    cluster.start_controller()
    assert cluster.state_of(job) == "RUNNING"


def test_killed_node_takes_its_jobs_along(cluster):
    """A power failure ends all processes of a node; its jobs end once Slurm notices, and the node can return."""
    file = cluster.work / "pid"
    file.unlink(missing_ok=True)
    job = cluster.submit("--time=5", "--nodelist=node04", "--no-requeue", command=f"echo $$ > {file}; exec sleep 1000")
    until(lambda: file.exists() and file.read_text().endswith("\n"))
    pid = int(file.read_text())
    assert sweeper.is_alive(pid)
    cluster.kill_node("node04")
    assert not sweeper.is_alive(pid)
    cluster.wait_for_state(job, "NODE_FAIL", timeout=120)
    cluster.start_node("node04")
    cluster.wait_for_state(cluster.submit("--nodelist=node04"), "RUNNING", timeout=120)


def test_clear_ends_jobs_reservations_and_drains(cluster):
    """Leftovers of one test do not affect the next."""
    job = cluster.submit("--time=5", "--nodelist=node03")
    cluster.submit("--hold")
    cluster.run("scontrol", "create", "reservation", "StartTime=now+60", "Duration=5", "Users=root", "Nodes=node01")
    cluster.run("scontrol", "update", "NodeName=node02", "State=DRAIN", "Reason=test")
    cluster.clear()
    assert cluster.state_of(job) in ("CANCELLED", "COMPLETING")
    assert cluster.run("squeue", "--noheader") == ""
    assert "No reservations" in cluster.run("scontrol", "show", "reservation")
    assert set(cluster.run("sinfo", "--noheader", "--format=%T").split()) == {"idle"}


@pytest.mark.parametrize("how", ["killed", "fail"])
def test_nothing_outlives_its_maker(how):
    """Killed or with an exception: all processes end, including those of jobs, and the directory is removed."""
    with subprocess.Popen(
        [sys.executable, "-c", _SCRIPT, how],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as maker:
        name, directory = maker.stdout.readline().split()
        if how == "killed":
            until(lambda: len(sweeper.marked(name)) > 4)  # the job's own processes too
            maker.kill()
        maker.wait(120)
    until(lambda: not sweeper.marked(name) and not os.path.exists(directory))  # noqa: PTH110


def test_a_cluster_that_cannot_start_tells_why(tmp_path):
    """The error contains the daemon's own message, and nothing is left behind."""
    directory = tmp_path / "c"
    if len(str(directory)) > 80:
        pytest.skip("the path of this test's directory is too long for sockets")
    with (
        pytest.raises(BatchSystemError, match=r"slurmctld .*NoSuchSetting"),
        LoopbackSlurm(directory, nodes=1, extra=["NoSuchSetting=1"]),
    ):
        pass
    assert not directory.exists()


def test_a_directory_in_use_is_left_alone(tmp_path):
    """A cluster never writes to, or removes, a directory that is not its own."""
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(InvalidSettings, match="not empty"), LoopbackSlurm(tmp_path, nodes=1):
        pass
    assert (tmp_path / "thesis.tex").exists()


def test_missing_programs_are_named(monkeypatch):
    """Without Slurm the tests are skipped with the names of the missing packages."""
    monkeypatch.setattr(loopback_slurm, "PATH", "/nonexistent")
    assert LoopbackSlurm.missing() == (
        "no munged, slurmctld, slurmd, sbatch here (Debian: apt-get install munge slurmctld slurmd slurm-client)"
    )
    assert "mariadb-server" in LoopbackSlurm.missing(accounting=True)


def test_settings_are_checked():
    """A partition's preemption mode and the nodes of features must be valid."""
    with pytest.raises(InvalidSettings, match="preempt must be off, cancel or requeue"):
        LoopbackPartition("x", preempt="suspend")
    with pytest.raises(InvalidSettings, match="node77"), LoopbackSlurm(nodes=1, features={"node77": "fast"}):
        pass
    assert node_names(2) == ["node01", "node02"]
    assert node_names(100)[-1] == "node100"
