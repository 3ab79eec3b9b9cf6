"""Parsing of the output of Slurm's commands."""

from __future__ import annotations

import math
import time

import pytest

from freetrain_parsl.windows.base import BlockState
from freetrain_parsl.windows.slurm.jobs import SlurmJob, block_status, plain_features, sort_jobs
from freetrain_parsl.windows.slurm.json_parser import parse_json_jobs, parse_json_nodes
from freetrain_parsl.windows.slurm.text_parser import (
    count_gpus,
    count_tasks,
    parse_config,
    parse_jobs,
    parse_nodes,
    parse_partitions,
    parse_reservations,
    parse_seconds,
    parse_time,
)
from tests.windows.slurm_replies import FIXTURES, NOW


def read(name: str) -> str:
    return (FIXTURES / name).read_text(encoding="utf-8")


@pytest.fixture
def utc(monkeypatch):
    """Set local time to UTC, as on the machine where the output was captured."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 1800),
        ("5:00", 300),
        ("00:07:59", 479),
        ("1:00:00", 3600),
        ("1-00:00:00", 86400),
        ("2-12", 216000),
        ("2-12:30", 217800),
        ("UNLIMITED", math.inf),
        ("Partition_Limit", None),
        ("N/A", None),
    ],
)
def test_walltimes(text, seconds):
    """Every format in Slurm's manual, without loss of seconds."""
    assert parse_seconds(text) == seconds


def test_times_of_both_forms(utc):
    """Epoch seconds, Slurm's local time, and nothing."""
    assert parse_time("1795234621") == parse_time("2026-11-21T04:17:01") == 1795234621
    assert parse_time("N/A") is None


@pytest.mark.parametrize(
    ("gres", "count"),
    [
        ("", 0),
        ("gpu:4", 4),
        ("gpu:a100:4(S:0-1)", 4),
        ("gpu:a100:3(S:0,1),gpu:mig-1g.5gb:7,shard:8", 10),
        ("gpu:4(IDX:0-3)", 4),
        ("gpu:a100:2(IDX:0,3),nic:1", 2),
        ("mps:400,nvme:1", 0),
    ],
)
def test_gpus_are_counted_of_every_type(gres, count):
    """No other resources are counted."""
    assert count_gpus(gres) == count


def test_jobs_of_squeue():
    """Running, planned, held, dependent and ended jobs of a real 22.05."""
    jobs = {job.job: job for job in parse_jobs(read("slurm-22.05.8/squeue.txt"))}
    assert jobs["15"].nodes == "node[01-05]"
    assert jobs["15"].ends == 1795263904
    assert jobs["16"].planned_nodes == "node[01-06,08]"
    assert jobs["16"].walltime == 600
    assert jobs["18"].start is None
    assert jobs["21"].partition == "main,backfill"
    running, pending = sort_jobs(jobs.values(), {})
    assert {job.job for job in running} == {"15", "17"}
    assert {job.job: job.eligible for job in pending} == {
        "16": True,
        "18": False,  # held
        "20": False,  # begin time
        "21": True,
        "22": False,  # requests more nodes than there are
        "24": False,  # dependency
    }


@pytest.mark.parametrize("line", ["not of squeue", "1\tmain\n", "x" + "\t" * 15, "1" + "\t" * 14])
def test_line_that_is_none_is_refused(line):
    """The message contains its beginning."""
    with pytest.raises(ValueError, match="line"):
        parse_jobs(line)


def test_nodes_of_scontrol():
    """Busy, planned and drained nodes of a real 22.05, with GPUs."""
    nodes = parse_nodes(read("slurm-22.05.8/scontrol_show_nodes.txt"))
    assert (nodes["node01"].idle, nodes["node01"].cpus_free, nodes["node01"].gpus_free) == (False, 0, 0)
    planned = nodes["node06"]
    assert (planned.idle, planned.unusable, planned.gpus, planned.gpus_free) == (True, "", 4, 4)
    assert planned.partitions == ("main", "backfill")
    assert planned.idle_since is not None
    assert planned.idle_since <= NOW
    assert planned.memory == planned.memory_free == 16000
    assert nodes["node07"].unusable == "drained: bad disk, see ticket"


@pytest.mark.parametrize(
    ("state", "idle", "unusable"),
    [
        ("IDLE", True, ""),
        ("IDLE+PLANNED", True, ""),
        ("IDLE+CLOUD", True, ""),
        ("IDLE*", True, "not responding"),
        ("DOWN*+DRAIN", False, "down"),
        ("IDLE+COMPLETING", False, ""),
        ("MIXED+DRAIN", False, "drained"),
        ("IDLE+RESERVED", True, "in a reservation"),
        ("IDLE+POWERED_DOWN", True, "powered down"),
        ("ALLOCATED", False, ""),
    ],
)
def test_states_of_nodes(state, idle, unusable):
    """Planned is idle, drained is not usable."""
    text = f"NodeName=n1 \n   CPUAlloc=0 CPUTot=4\n   Gres=(null)\n   RealMemory=1 AllocMem=0\n   State={state} X=1\n"
    node = parse_nodes(text)["n1"]
    assert (node.idle, node.unusable) == (idle, unusable)


@pytest.mark.parametrize("text", ["slurm_load_node error", "NodeName=n1\n   CPUTot=4", "NodeName=n1 State=IDLE"])
def test_record_that_is_no_node_is_refused(text):
    """Instead of accepting part of a cluster as all of it."""
    with pytest.raises(ValueError, match=r"node|invalid literal"):
        parse_nodes(text)


@pytest.mark.parametrize("version", ["22.05.8", "24.11.5", "26.05.5"])
def test_partitions_of_every_version(version):
    """The one that yields to a higher tier on the same nodes is preemptible, if preemption is by partition."""
    text = read(f"slurm-{version}/scontrol_show_partition.txt")
    partitions = parse_partitions(text, "preempt/partition_prio")
    main, low = partitions["main"], partitions["backfill"]
    assert (main.default, main.preemptible, main.tier, main.up, main.max_walltime) == (True, False, 100, True, math.inf)
    assert (low.default, low.preemptible, low.min_nodes, low.max_nodes) == (False, True, 1, None)
    assert low.nodes == tuple(f"node0{n}" for n in range(1, 9))
    assert not parse_partitions(text, "preempt/none")["backfill"].preemptible


def test_limits_of_a_partition():
    """Time, nodes, rights and sharing."""
    text = (
        "PartitionName=big\n   AllowAccounts=a,b AllowQos=long GraceTime=30\n   MaxNodes=64 MaxTime=1-00:00:00 "
        "MinNodes=4\n   Nodes=n[1-4]\n   PriorityTier=5 OverSubscribe=EXCLUSIVE\n   State=INACTIVE\n"
    )
    big = parse_partitions(text)["big"]
    assert (big.max_walltime, big.min_nodes, big.max_nodes, big.grace) == (86400, 4, 64, 30)
    assert (big.up, big.shared) == (False, False)
    assert big.allow_accounts == {"a", "b"}
    assert big.allow_qos == {"long"}


@pytest.mark.parametrize(
    ("version", "start"), [("22.05.8", 1795269303), ("24.11.5", 1795234621), ("26.05.5", 1795234628)]
)
def test_reservations_of_every_version(utc, version, start):
    """With epoch seconds or local time."""
    (reservation,) = parse_reservations(read(f"slurm-{version}/scontrol_show_reservation.txt"))
    assert (reservation.name, reservation.nodes) == ("maint", ("node08",))
    assert (reservation.start, reservation.end) == (start, start + 3600)


def test_no_reservations():
    """Slurm prints a sentence."""
    assert parse_reservations("No reservations in the system\n") == ()


@pytest.mark.parametrize("version", ["22.05.8", "24.11.5", "26.05.5"])
def test_configuration(version):
    """Settings as strings."""
    assert parse_config(read(f"slurm-{version}/scontrol_show_config.txt"))["SchedulerType"] == "sched/backfill"


@pytest.mark.parametrize("version", ["24.11.5", "26.05.5"])
def test_json_of_newer_versions(version):
    """Jobs with their planned nodes, and nodes."""
    running, pending = sort_jobs(parse_json_jobs(read(f"slurm-{version}/squeue.json")), {})
    assert {len(job.nodes) for job in running} == {5, 1}
    planned = next(job for job in pending if job.planned_nodes)
    assert planned.planned_nodes == ("node06", "node08")
    assert planned.walltime == 3600
    assert planned.start is not None
    assert [job.eligible for job in pending if job.reason == "JobHeldUser"] == [False]
    nodes = parse_json_nodes(read(f"slurm-{version}/scontrol_show_nodes.json"))
    assert nodes["node06"].idle
    assert not nodes["node01"].idle
    assert nodes["node01"].cpus_free == 0


def test_json_nodes_of_22_05():
    """Flags are separate from the state, strings are in lower case."""
    nodes = parse_json_nodes(read("slurm-22.05.8/sinfo.json"))
    assert sum(node.idle for node in nodes.values()) > 0
    assert [node.unusable.partition(":")[0] for node in nodes.values() if node.unusable] == ["drained"]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"jobs": 3}', '{"jobs": [{"job_id": 3}]}', '{"jobs": [3]}'])
def test_json_that_is_none_of_squeue_is_refused(text):
    """Also that of 22.05, which does not report where jobs are planned."""
    with pytest.raises(ValueError, match=r"jobs|job"):
        parse_json_jobs(text)


@pytest.mark.parametrize("name", ["a\tb", "two\nlines", "freetrain.", ""])
def test_a_job_may_have_any_name(name):
    """Names come last and truncated, so that no name can break the parsing of other fields."""
    line = "7\tmain\tPENDING\tada\t5:00\tN/A\tN/A\t1\t\t(null)\t\t1\tNone\t(null)\tN/A\t"
    jobs = parse_jobs(f"{line}{name:10}\t\n{line}next      \t\n")
    assert len(jobs) == 2
    assert jobs[0].name == name.partition("\n")[0]
    assert jobs[1].name == "next"


@pytest.mark.parametrize(
    ("tasks", "count"),
    [
        ("N/A", 1),
        ("", 1),
        ("7", 1),
        ("1-200", 200),
        ("1-200%5", 5),
        ("1,5-9:2", 4),
        ("0-9:4%20", 3),
        ("1-3,8,12,...", 5),
    ],
)
def test_tasks_of_an_array_are_counted(tasks, count):
    assert count_tasks(tasks) == count


def test_a_pending_array_is_as_many_jobs_as_could_run():
    """Else blocks would make way for one of its tasks with each query."""
    line = "7\tmain\tPENDING\tada\t5:00\tN/A\tN/A\t1\t\t(null)\t\t1\tResources\t(null)\t{}\tmine      \t\n"
    partitions = parse_partitions(read("slurm-22.05.8/scontrol_show_partition.txt"))
    for tasks, count in (("1-2", 2), ("1-200", 8), ("1-200%3", 3)):
        assert len(sort_jobs(parse_jobs(line.format(tasks)), partitions)[1]) == count


@pytest.mark.parametrize(
    ("constraint", "features"),
    [("", set()), ("a100", {"a100"}), ("a100&nvme", {"a100", "nvme"}), ("a|b", None), ("[a|b]*2", None), ("!x", None)],
)
def test_plain_constraints(constraint, features):
    """Only an "and" of features is supported."""
    assert plain_features(constraint) == features


def record(state: str, reason: str = "None") -> SlurmJob:
    return SlurmJob("1", "main", state, "ada", 60.0, 1.0, 2.0, 1, "n[1-2]", "", "", 1.0, reason, "", "train")


@pytest.mark.parametrize(
    ("state", "reason", "expected"),
    [
        ("RUNNING", "None", BlockState.RUNNING),
        ("COMPLETING", "None", BlockState.RUNNING),
        ("PENDING", "Resources", BlockState.PENDING),
        ("PENDING", "QOSMaxJobsPerUserLimit", BlockState.PENDING),
        ("PENDING", "AssocGrpCPUMinutesLimit", BlockState.PENDING),
        ("PENDING", "ReqNodeNotAvail, UnavailableNodes:node07", BlockState.PENDING),
        ("PENDING", "JobHeldAdmin", BlockState.HELD),
        ("PENDING", "launch failed requeued held", BlockState.HELD),
        ("PENDING", "PartitionTimeLimit", BlockState.HELD),
        ("PENDING", "QOSMaxWallDurationPerJobLimit", BlockState.HELD),
        ("REQUEUE_HOLD", "None", BlockState.HELD),
        ("TIMEOUT", "TimeLimit", BlockState.TIMED_OUT),
        ("DEADLINE", "None", BlockState.TIMED_OUT),
        ("PREEMPTED", "None", BlockState.PREEMPTED),
        ("CANCELLED", "None", BlockState.CANCELLED),
        ("NODE_FAIL", "NodeDown", BlockState.NODE_FAILED),
        ("BOOT_FAIL", "None", BlockState.NODE_FAILED),
        ("OUT_OF_MEMORY", "None", BlockState.FAILED),
        ("FAILED", "NonZeroExitCode", BlockState.FAILED),
        ("COMPLETED", "None", BlockState.COMPLETED),
        ("NEW_WORD", "None", BlockState.UNKNOWN),
    ],
)
def test_states_of_jobs(state, reason, expected):
    """Only a running block has nodes and an end, not one that has ended; every unusual state has a reason."""
    status = block_status(record(state, reason))
    assert status.state is expected
    assert bool(status.nodes) is (status.ends is not None) is (state == "RUNNING")
    assert status.reason or (state, expected) in {
        (state, BlockState.RUNNING),
        (state, BlockState.TIMED_OUT),
        (state, BlockState.PREEMPTED),
        (state, BlockState.COMPLETED),
    }
