"""Clusters with real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from datetime import timedelta

import pytest

from freetrain_parsl.cluster import daemon, processes, registry
from freetrain_parsl.cluster.client import ClusterClient, EmbeddedCluster
from freetrain_parsl.cluster.workload import MainJob
from freetrain_parsl.errors import BatchSystemError, ClusterGone, InvalidSettings

pytestmark = [pytest.mark.cluster, pytest.mark.smoke]

LONG = timedelta(minutes=5)


def seconds(value: float) -> timedelta:
    return timedelta(seconds=value)


def job(client: ClusterClient, job_id: str) -> dict:
    return client.jobs([job_id])[job_id]


def ended(client: ClusterClient, job_id: str):
    return lambda: (found := job(client, job_id))["end"] is not None and found


def test_a_command_runs_once_on_every_node_and_knows_where_it_is(start_cluster, eventually, tmp_path):
    client = start_cluster().client
    script = 'echo "$FREETRAIN_CLUSTER_NODE $FREETRAIN_CLUSTER_NODE_RANK $FREETRAIN_CLUSTER_NODELIST $X $PWD"'
    out = tmp_path / "out"
    job_id = client.submit(
        ["bash", "-c", script],
        nodes=3,
        walltime=LONG,
        env={"PATH": os.environ["PATH"], "X": "y"},
        cwd=tmp_path,
        stdout=out,
    )
    found = eventually(ended(client, job_id))
    assert found["state"] == "COMPLETED"
    assert found["exit_codes"] == {"n00": 0, "n01": 0, "n02": 0}
    assert sorted(out.read_text().splitlines()) == [f"n{rank:02d} {rank} n00,n01,n02 y {tmp_path}" for rank in range(3)]


def test_a_job_with_a_nonzero_exit_code_has_failed_and_says_where(start_cluster, eventually):
    client = start_cluster().client
    script = '[ "$FREETRAIN_CLUSTER_NODE_RANK" = 0 ] || exit 3'
    job_id = client.submit(["bash", "-c", script], nodes=2, walltime=LONG)
    found = eventually(ended(client, job_id))
    assert (found["state"], found["reason"]) == ("FAILED", "exit code 3 on n01")


def test_a_command_that_does_not_exist_fails_and_leaves_its_nodes_free(start_cluster, eventually):
    client = start_cluster().client
    job_id = client.submit(["/no/such/program"], nodes=2, walltime=LONG)
    found = eventually(ended(client, job_id))
    assert found["state"] == "FAILED"
    assert "/no/such/program" in found["reason"]
    assert {node["kind"] for node in client.nodes().values()} == {"idle"}


def test_at_the_end_of_its_walltime_a_job_can_still_act_on_sigterm(start_cluster, eventually, tmp_path):
    client = start_cluster().client
    out = tmp_path / "out"
    script = "trap 'echo saved; exit 0' TERM; sleep 60 & wait"
    job_id = client.submit(["bash", "-c", script], walltime=seconds(1), stdout=out)
    found = eventually(ended(client, job_id))
    assert found["state"] == "TIMED_OUT"
    assert out.read_text() == "saved\n"
    assert found["exit_codes"] == {"n00": 0}
    assert found["end"] - found["start"] >= 1


def test_a_job_that_ignores_sigterm_is_killed_after_the_grace(start_cluster, eventually):
    client = start_cluster().client
    job_id = client.submit(["bash", "-c", "trap '' TERM; while :; do sleep 60; done"], walltime=seconds(0.3))
    found = eventually(ended(client, job_id))
    assert found["exit_codes"] == {"n00": -signal.SIGKILL}
    assert found["end"] - found["start"] >= 0.8


def test_descendants_that_left_the_session_go_with_the_job(start_cluster, eventually):
    cluster = start_cluster()
    script = "(setsid bash -c 'trap \"\" TERM; sleep 61' &) ; (sleep 62 &) ; sleep 63"
    job_id = cluster.client.submit(["bash", "-c", script], walltime=LONG)
    mark = registry.mark_prefix(cluster.name) + f"{job_id}/"
    eventually(lambda: len(processes.marked(mark)) == 3)
    cluster.client.cancel([job_id])
    eventually(ended(cluster.client, job_id))
    assert processes.marked(mark) == []


def test_what_a_job_leaves_behind_is_swept_up_when_its_own_process_ends(start_cluster, eventually):
    cluster = start_cluster()
    job_id = cluster.client.submit(["bash", "-c", "sleep 60 & exit 0"], walltime=LONG)
    found = eventually(ended(cluster.client, job_id))
    assert found["state"] == "COMPLETED"
    assert processes.marked(registry.mark_prefix(cluster.name) + f"{job_id}/") == []


def test_a_main_job_drives_a_preemptible_one_out_and_starts_when_it_is_gone(start_cluster, eventually, tmp_path):
    client = start_cluster().client
    out = tmp_path / "out"
    trapped = "trap 'sleep 0.2; exit 0' TERM; echo ready; sleep 60 & wait"
    victim = client.submit(["bash", "-c", trapped], nodes=3, walltime=LONG, stdout=out)
    eventually(lambda: out.exists() and out.read_text() == 3 * "ready\n")
    main = client.submit(["true"], nodes=4, walltime=LONG, preemptible=False)
    assert job(client, victim)["ending"]
    found = eventually(ended(client, main))
    gone = job(client, victim)
    assert gone["state"] == "PREEMPTED"
    assert gone["reason"] == f"main job {main} needs its nodes"
    assert gone["end"] == found["start"]
    (delay,) = client.delays()
    assert delay["delay"] == pytest.approx(found["start"] - found["submit"], abs=1e-5)


def test_a_waiting_job_is_cancelled_without_ever_running(start_cluster):
    client = start_cluster().client
    first = client.submit(["sleep", "60"], nodes=4, walltime=LONG, preemptible=False)
    waits = client.submit(["sleep", "60"], nodes=4, walltime=LONG, preemptible=False)
    assert set(client.expected_starts()) == {waits}
    assert set(client.queue()) == {first, waits}
    assert client.cancel([waits, "77"]) == {waits: True, "77": False}
    assert job(client, waits)["state"] == "CANCELLED"
    assert job(client, waits)["start"] is None
    assert client.cancel([waits]) == {waits: False}


def test_a_job_stays_on_the_nodes_that_it_names(start_cluster, eventually):
    client = start_cluster().client
    job_id = client.submit(["sleep", "60"], walltime=LONG, nodelist=["n02"])
    assert job(client, job_id)["nodes"] == ["n02"]


def test_the_workload_runs_as_simulated_and_nobody_is_late_without_preemptible_jobs(start_cluster, eventually):
    workload = [
        MainJob(0.0, 3, 0.4, 1.0),
        MainJob(0.1, 4, 0.2, 0.5),
        MainJob(0.15, 1, 0.1, 0.2),
        MainJob(0.2, 2, 0.3, 0.4),
    ]
    client = start_cluster(workload=workload).client
    delays = eventually(lambda: len(found := client.delays()) == 4 and not client.queue() and found)
    assert [item["delay"] for item in delays] == [0, 0, 0, 0]
    stays = client.history()
    assert {stay["kind"] for stay in stays} == {"main"}
    assert len(stays) == 10


def test_usage_counts_what_main_jobs_leave_and_what_of_it_was_used(start_cluster, eventually):
    client = start_cluster(workload=[MainJob(0, 1, 60, 60)]).client
    before = client.usage()
    job_id = client.submit(["sleep", "0.4"], nodes=2, walltime=LONG)
    found = eventually(ended(client, job_id))
    after = client.usage()
    idle = after["idle_node_seconds"] - before["idle_node_seconds"]
    assert idle == pytest.approx(3 * (after["elapsed"] - before["elapsed"]), rel=1e-3)
    used = after["preemptible_node_seconds"] - before["preemptible_node_seconds"]
    assert used == pytest.approx(2 * (found["end"] - found["start"]), rel=1e-3)


def test_a_stopped_cluster_leaves_no_process_and_no_entry(start_cluster, eventually):
    cluster = start_cluster(workload=[MainJob(0, 2, 60, 60)])
    cluster.client.submit(["bash", "-c", "trap '' TERM; sleep 61 & wait; sleep 62"], walltime=LONG)
    eventually(lambda: len(processes.marked(registry.mark_prefix(cluster.name))) >= 4)
    cluster.stop()
    assert processes.marked(registry.mark_prefix(cluster.name)) == []
    assert registry.running_clusters() == []
    with pytest.raises(ClusterGone):
        cluster.client.ping()
    cluster.stop()


def test_a_process_that_shed_session_and_environment_goes_with_the_cluster(start_cluster, eventually, tmp_path):
    cluster = start_cluster()
    out = tmp_path / "pid"
    hidden = f"env -i setsid bash -c 'echo $$ > {out}; exec sleep 64'"
    cluster.client.submit(["bash", "-c", f"({hidden} &); sleep 65"], walltime=LONG)
    pid = int(eventually(lambda: out.exists() and out.read_text()))
    cluster.stop()
    assert pid not in {info.pid for info in processes.living()}, "a zombie that has not been reaped yet is gone too"


def test_a_cluster_whose_process_is_killed_leaves_nothing_after_stop(start_cluster, eventually):
    cluster = start_cluster()
    cluster.client.submit(["sleep", "60"], nodes=2, walltime=LONG)
    info = registry.find(cluster.name)
    os.kill(info.pid, signal.SIGKILL)
    eventually(lambda: cluster.name not in {running.name for running in registry.running_clusters()})
    with pytest.raises(ClusterGone):
        cluster.client.ping()
    cluster.stop()
    assert processes.marked(registry.mark_prefix(cluster.name)) == []
    assert not registry.socket_path(cluster.name).parent.exists()


def test_a_cluster_ends_with_the_process_that_it_was_started_for(eventually, tmp_path):
    program = (
        "import sys, time; from freetrain_parsl.cluster.client import EmbeddedCluster\n"
        f"cluster = EmbeddedCluster({str(tmp_path)!r}, nodes=2, name='orphan'); cluster.start()\n"
        "from datetime import timedelta\n"
        "cluster.client.submit(['sleep', '60'], walltime=timedelta(minutes=1))\n"
        "print('ready', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as parent:
        assert parent.stdout.readline() == b"ready\n"
        assert [info.name for info in registry.running_clusters()] == ["orphan"]
        parent.kill()
    eventually(lambda: not registry.running_clusters())
    eventually(lambda: not processes.marked(registry.mark_prefix("orphan")))


def test_shutdown_on_request_ends_the_process(start_cluster, eventually):
    cluster = start_cluster()
    cluster.client.shutdown()
    eventually(lambda: not registry.running_clusters())


def test_a_cluster_is_found_by_name_by_directory_and_alone(start_cluster):
    first = start_cluster(name="first")
    for cluster in (None, "first", first.directory):
        assert ClusterClient(cluster).name == "first"
    start_cluster(name="second")
    with pytest.raises(ClusterGone, match=r"choose one by --cluster, .*: first \(.*\), second \("):
        ClusterClient()
    with pytest.raises(ClusterGone, match="no embedded cluster 'third'"):
        ClusterClient("third")


def test_a_second_cluster_of_the_same_name_is_refused_and_does_the_first_no_harm(start_cluster, tmp_path):
    first = start_cluster(name="first")
    job_id = first.client.submit(["sleep", "60"], walltime=LONG)
    with pytest.raises(BatchSystemError, match=r"'first' of .* is already running"):
        EmbeddedCluster(tmp_path / "other", name="first").start()
    found = job(first.client, job_id)
    assert found["state"] == "RUNNING", found


def test_a_cluster_that_stops_leaves_one_of_the_same_name_in_another_runtime_directory_alone(
    start_cluster, tmp_path, monkeypatch
):
    first = start_cluster(name="first")
    job_id = first.client.submit(["sleep", "60"], walltime=LONG)
    with monkeypatch.context() as elsewhere, tempfile.TemporaryDirectory(prefix="ft-") as directory:
        elsewhere.setenv("XDG_RUNTIME_DIR", directory)
        with EmbeddedCluster(tmp_path / "other", name="first"):
            pass
    found = job(first.client, job_id)
    assert found["state"] == "RUNNING", found


def test_requests_that_make_no_sense_are_answered_in_one_line(start_cluster):
    client = start_cluster().client
    with pytest.raises(InvalidSettings, match="requests 9 nodes, the cluster has 4"):
        client.submit(["true"], nodes=9, walltime=LONG)
    with pytest.raises(InvalidSettings, match="needs a command"):
        client.submit([], walltime=LONG)
    with pytest.raises(InvalidSettings, match="not a request"):
        client._request("dance")
    with pytest.raises(InvalidSettings, match="bad jobs request"):
        client._request("jobs")
    assert client.queue() == {}


def test_an_answer_that_does_not_come_is_an_error_that_a_retry_may_help(start_cluster):
    cluster = start_cluster()
    client = ClusterClient(cluster.name, timeout=seconds(0.2))
    pid = registry.find(cluster.name).pid
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(BatchSystemError, match=r"did not answer 'ping' within 0\.2 s") as caught:
            client.ping()
        assert caught.value.transient
    finally:
        os.kill(pid, signal.SIGCONT)


def test_many_jobs_start_and_end_quickly(start_cluster, eventually):
    client = start_cluster().client
    begin = time.monotonic()
    jobs = [client.submit(["true"], walltime=LONG) for _ in range(60)]
    eventually(lambda: all(found["state"] == "COMPLETED" for found in client.jobs(jobs).values()))
    assert time.monotonic() - begin < 10


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--nodes", "0"], "needs one or more nodes"),
        (["--grace", "-1"], "grace must be zero or more seconds"),
        (["--margin", "nan"], "margin must be zero or more seconds"),
        (["--workload", "/no/such/file"], "/no/such/file is not a saved workload"),
        (["--name", "a/b"], "must be a plain word"),
        (["--name", "x" * 90], "exceeds 107 bytes"),
    ],
)
def test_a_cluster_with_a_bad_setting_is_refused_in_one_line(arguments, text, tmp_path, capsys):
    assert daemon.main(["--dir", str(tmp_path), *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert text in line
