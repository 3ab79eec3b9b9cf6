"""Output of a real OpenPBS 23.06, as nodes, queues, jobs and reservations."""

from __future__ import annotations

import json
import math

import pytest

from freetrain_parsl.errors import BatchSystemError
from freetrain_parsl.extensions.pbs.jobs import Capacity, block_status, constraints, pending_job
from freetrain_parsl.extensions.pbs.parsers import (
    express_priority,
    parse_nodes,
    parse_queues,
    parse_reservations,
    parse_server,
    parse_state,
    partitions_of,
    preempting_queue,
)
from freetrain_parsl.extensions.pbs.values import read_answer
from freetrain_parsl.windows.base import BlockState
from freetrain_parsl.windows.state import Reservation, RunningJob
from tests.extensions.pbs.pbs_answers import HEAD_START, NOW, content, text

VNODES = tuple(f"pbs1[{number}]" for number in range(8))
CAPACITY = Capacity(4, 4, 16384)

pytestmark = pytest.mark.usefixtures("utc")


def read(changed):
    return read_answer(json.dumps(changed), "pbs")


def queues():
    return parse_queues(read_answer(text("queues.json"), "qstat -Qf"))


def server():
    return parse_server(read_answer(text("server.json"), "qstat -Bf"))


def state(jobs=None, nodes=None):
    jobs_text = text("jobs.json") if jobs is None else json.dumps(jobs)
    nodes_text = text("nodes.json") if nodes is None else json.dumps(nodes)
    return parse_state(jobs_text, nodes_text, queues(), server())


def job(**attributes):
    resources = {"select": "2:ncpus=4", "place": "scatter", "walltime": "01:00:00", "nodect": 2}
    return {"job_state": "Q", "queue": "main", "Resource_List": resources, **attributes}


def pending(stopped=(), **attributes):
    return pending_job("9.pbs1", job(**attributes), NOW, CAPACITY, stopped)


# -- nodes ---------------------------------------------------------------------------------------------------


def test_vnodes_that_run_nothing_are_left_out():
    """The host's own vnode has no CPUs; the eight below it have four and four GPUs each."""
    found = parse_nodes(read_answer(text("nodes.json"), "pbsnodes"))
    assert tuple(found) == VNODES
    node = found["pbs1[3]"].node
    assert (node.cpus, node.gpus, node.memory) == (4, 4, 16384)
    assert node.features == {"arch=linux", "ngpus"}
    assert found["pbs1[3]"].jobs == ("2002.pbs1",)


def test_a_node_given_as_a_whole_has_nothing_free():
    """pbs1[6] is exclusive to a job that requested only CPUs: its GPUs are not free."""
    node = parse_nodes(read_answer(text("nodes.json"), "pbsnodes"))["pbs1[6]"].node
    assert not node.idle
    assert (node.cpus_free, node.gpus_free, node.memory_free) == (0, 0, 0)


def test_a_node_without_jobs_is_idle_since_it_was_used_last():
    nodes = content("nodes.json")
    nodes["nodes"]["pbs1[2]"].update(state="free", jobs=[], resources_assigned={})
    node = parse_nodes(read(nodes))["pbs1[2]"].node
    assert node.idle
    assert node.idle_since == 1795227999.0
    assert (node.cpus_free, node.gpus_free, node.memory_free) == (4, 4, 16384)


@pytest.mark.parametrize(
    ("states", "reason"),
    [
        ("offline", "taken offline: gpu 3 xid 79"),
        ("down,offline", "down, taken offline: gpu 3 xid 79"),
        ("Stale", "stale: PBS receives no updates from it: gpu 3 xid 79"),
        ("state-unknown,down", "in an unknown state, down: gpu 3 xid 79"),
        ("job-exclusive", ""),
        ("free", ""),
    ],
)
def test_unusable_nodes_say_why(states, reason):
    nodes = content("nodes.json")
    nodes["nodes"]["pbs1[7]"]["state"] = states
    assert parse_nodes(read(nodes))["pbs1[7]"].node.unusable == reason


def test_resources_that_are_not_counted_are_words():
    has = {"arch": "linux", "Qlist": "main,Debug", "at_queue": "True", "ncpus": "64", "mem": "16gb", "host": "n1"}
    assert constraints(has) == {"arch=linux", "Qlist=main", "Qlist=debug", "at_queue=true"}
    assert constraints({"ngpus": "0", "max": "01:00:00"}) == frozenset()


# -- queues --------------------------------------------------------------------------------------------------


def test_queues_are_partitions_with_their_priority():
    found = state()[0].partitions
    assert found["main"].tier == 160.0
    assert found["backfill"].tier == 10.0
    assert set(found["backfill"].nodes) == set(VNODES)
    assert found["main"].up
    assert not found["R1008"].up  # a reservation's queue before its time
    assert found["workq"].default
    assert found["main"].max_walltime == math.inf


def test_a_queue_has_the_nodes_that_its_chunks_can_use():
    """Nodes bound to another queue, of another scheduler, or without the queue's constraint are not its nodes."""
    nodes, all_queues = content("nodes.json"), content("queues.json")
    nodes["nodes"]["pbs1[0]"]["queue"] = "main"
    nodes["nodes"]["pbs1[1]"]["partition"] = "other"
    for name in ("pbs1[2]", "pbs1[3]"):
        nodes["nodes"][name]["resources_available"]["Qlist"] = "workq,debug"
    all_queues["Queue"]["workq"]["default_chunk"] = {"Qlist": "workq", "ncpus": 1}
    found = partitions_of(parse_queues(read(all_queues)), parse_nodes(read(nodes)).values(), server())
    assert found["workq"].nodes == ("pbs1[2]", "pbs1[3]")
    assert "pbs1[0]" not in found["backfill"].nodes
    assert "pbs1[0]" in found["main"].nodes
    assert "pbs1[1]" not in found["main"].nodes


def test_limits_of_queue_and_server():
    all_queues, one_server = content("queues.json"), content("server.json")
    all_queues["Queue"]["main"].update(
        resources_max={"nodect": 6, "walltime": "02:00:00"}, resources_min={"nodect": 2}, kill_delay=30
    )
    one_server["Server"]["pbs1"]["resources_max"] = {"walltime": "24:00:00"}
    parsed = parse_server(read(one_server))
    found = partitions_of(parse_queues(read(all_queues)), (), parsed, {"main"})
    assert (found["main"].min_nodes, found["main"].max_nodes, found["main"].max_walltime) == (2, 6, 7200.0)
    assert (found["main"].preemptible, found["main"].grace) == (True, 30.0)
    assert (found["workq"].max_nodes, found["workq"].max_walltime) == (None, 86400.0)


def test_a_routing_queue_has_what_is_behind_it():
    all_queues = content("queues.json")
    all_queues["Queue"]["main"]["resources_max"] = {"nodect": 2, "walltime": "01:00:00"}
    all_queues["Queue"]["backfill"]["resources_max"] = {"nodect": 6, "walltime": "03:00:00"}
    all_queues["Queue"]["prod"] = {
        "queue_type": "Route",
        "route_destinations": "main,backfill@pbs1,gone",
        "enabled": "True",
        "started": "True",
    }
    vnodes = parse_nodes(read_answer(text("nodes.json"), "pbsnodes")).values()
    prod = partitions_of(parse_queues(read(all_queues)), vnodes, server())["prod"]
    assert prod.nodes == VNODES
    assert (prod.up, prod.max_nodes, prod.max_walltime, prod.tier) == (True, 6, 10800.0, 160.0)


def test_queues_below_an_express_queue_are_preempted():
    express = express_priority(text("scheduler.txt"))
    assert express == 150.0
    assert preempting_queue("backfill", queues(), express) == "main"
    assert preempting_queue("main", queues(), express) is None
    assert preempting_queue("backfill", queues(), 200.0) is None


def test_the_server_tells_its_version_and_what_it_shows():
    found = server()
    assert (found.version, found.default_queue, found.shows_others) == ("23.06.06", "workq", True)
    assert found.cycle == 60.0


# -- reservations --------------------------------------------------------------------------------------------


def test_reservations_have_nodes_and_times():
    assert parse_reservations(text("reservations.txt")) == (
        Reservation("R1008", ("pbs1[0]", "pbs1[1]"), 1795238760.0, 1795242360.0),
        Reservation("R2008", ("pbs1[2]", "pbs1[3]"), 1795238820.0, 1795242420.0),
    )


def test_unconfirmed_reservations_hold_nothing():
    unconfirmed = text("reservations.txt").replace("RESV_CONFIRMED", "RESV_UNCONFIRMED")
    assert parse_reservations(unconfirmed) == ()
    assert parse_reservations("") == ()


def test_long_values_go_on_in_the_next_line():
    wrapped = text("reservations.txt").replace("+(pbs1[1]:ncpus=4)", "+(pbs1\n\t[1]:ncpus=4)")
    assert parse_reservations(wrapped)[0].nodes == ("pbs1[0]", "pbs1[1]")


@pytest.mark.parametrize("answer", ["No such file\n", "Resv ID: R1.x\nresv_nodes = (a:ncpus=1)\n"])
def test_nonsense_reservations_are_refused(answer):
    with pytest.raises(BatchSystemError, match="pbs_rstat returned invalid output"):
        parse_reservations(answer)


# -- jobs ----------------------------------------------------------------------------------------------------


def test_running_jobs_end_with_their_walltime():
    running = {found.job: found for found in state()[0].running}
    assert running["2002.pbs1"] == RunningJob("2002.pbs1", "run6", "alice", "main", VNODES[:6], HEAD_START)
    assert running["2006.pbs1"].ends == 1795228049 + 596.0  # shrunk to 9 min 56 s: until the top job starts
    assert set(running) == {"2002.pbs1", "2004.pbs1", "2006.pbs1"}


def test_the_top_job_has_a_planned_start_and_nodes():
    head = next(found for found in state()[0].pending if found.name == "head8")
    assert (head.start, head.planned_nodes, head.node_count, head.walltime) == (HEAD_START, VNODES, 8, 600.0)
    assert head.eligible
    assert head.reason == "not enough free nodes"


def test_the_other_pending_jobs_have_no_plan():
    pending_jobs = {found.name: found for found in state()[0].pending}
    assert pending_jobs["bflong"].start is None
    assert pending_jobs["bflong"].eligible
    assert pending_jobs["bflong"].priority < pending_jobs["head8"].priority
    assert not pending_jobs["held"].eligible
    assert pending_jobs["held"].reason == "is held by its user (release it with qrls)"


@pytest.mark.parametrize(
    ("comment", "eligible"),
    [
        ("Not Running: Not enough free nodes available", True),
        ("Not Running: Insufficient amount of resource: ngpus (R: 4 A: 0 T: 32)", True),
        ("Not Running: Job would conflict with reservation or top job", True),
        ("Not Running: something new", True),
        ("Not Running: User has reached queue main running job limit.", False),
        ("Not Running: would exceed user alice's limit on resource ncpus in queue main", False),
        ("Not Running: Dedicated time conflict", False),
        ("Can Never Run: Insufficient amount of server resource: ncpus", False),
        ("Not Running: Queue not started.", False),
    ],
)
def test_comments_tell_whether_nodes_are_what_a_job_waits_for(comment, eligible):
    """Unknown comments count as waiting for nodes."""
    assert pending(comment=comment).eligible is eligible


def test_jobs_of_a_stopped_queue_are_not_eligible():
    assert not pending(stopped={"main"}).eligible


def test_a_passed_estimate_of_a_job_that_is_no_top_job_says_nothing():
    estimated = {"start_time": "Sat Nov 21 02:20:00 2026", "exec_vnode": "(pbs1[6]:ncpus=4)"}
    assert pending(estimated=estimated).start is None
    assert pending(estimated=estimated, topjob="True").start == 1795227600.0
    future = {**estimated, "start_time": "Sat Nov 21 02:50:00 2026"}
    assert pending(estimated=future).planned_nodes == ("pbs1[6]",)
    assert pending(estimated=future, job_state="H").start is None


@pytest.mark.parametrize(
    ("select", "place", "nodes"),
    [
        ("8:ncpus=4", "vscatter", 8),
        ("8:ncpus=1", "scatter", 8),
        ("8:ncpus=1", "free", 2),
        ("8:ncpus=4", "pack", 1),
        ("2:ncpus=4:ngpus=2+3:ncpus=1:ngpus=4", "free", 5),
        ("4:ncpus=1:mem=10gb", "free:excl", 4),
        ("ncpus=4", "free", 1),
    ],
)
def test_chunks_share_nodes_unless_scattered(select, place, nodes):
    found = pending(Resource_List={"select": select, "place": place, "walltime": "1:00:00"})
    assert found.node_count == nodes


def test_what_all_chunks_ask_are_the_features():
    found = pending(schedselect="2:ncpus=4:Qlist=main:ngpus=4+1:ncpus=1:Qlist=main:bigmem=True")
    assert found.features == {"Qlist=main"}
    assert pending(schedselect="1:ncpus=4:vnode=pbs1[3]").named_nodes == ("pbs1[3]",)


def test_a_job_that_shrinks_to_fit_needs_its_least_walltime():
    limits = {"select": "1:ncpus=4", "min_walltime": "00:01:00", "max_walltime": "02:00:00"}
    assert pending(Resource_List=limits).walltime == 60.0
    assert pending(Resource_List={"select": "1:ncpus=4"}).walltime == math.inf


def test_a_suspended_job_comes_back_to_its_own_nodes():
    found = pending(job_state="S", exec_vnode="(a:ncpus=4)+(b:ncpus=4)", resources_used={"walltime": "00:20:00"})
    assert (found.eligible, found.named_nodes, found.walltime) == (True, ("a", "b"), 2400.0)


def test_subjobs_are_known_from_their_nodes():
    """An array is one pending job; its running subjobs are known from the nodes, since when their state changed."""
    jobs, nodes = content("jobs.json"), content("nodes.json")
    array = jobs["Jobs"].pop("2004.pbs1")
    array.update(job_state="B", array_state_count="Queued:3 Running:1 Exiting:0 Expired:6 ")
    jobs["Jobs"]["2004[].pbs1"] = array
    nodes["nodes"]["pbs1[6]"]["jobs"] = ["2004[7].pbs1"]
    found = state(jobs, nodes)[0]
    assert RunningJob("2004[7].pbs1", "bf1", "alice", "backfill", ("pbs1[6]",), 1795228047 + 300.0) in found.running
    assert [waiting.job for waiting in found.pending if waiting.name == "bf1"] == ["2004[].pbs1"]


def test_dedicated_time_is_told():
    jobs = content("jobs.json")
    jobs["Jobs"]["2005.pbs1"]["comment"] = "Not Running: Job would cross dedicated time boundary"
    assert "dedicated time" in state(jobs)[2][0]


def test_an_empty_queue_is_no_error():
    found, jobs, notes = state({"timestamp": NOW, "pbs_version": "23.06.06"})
    assert jobs == {}
    assert notes == ()
    assert found.pending == ()
    assert {running.job for running in found.running} == {"2002.pbs1", "2004.pbs1", "2006.pbs1"}  # from the nodes


# -- our own -------------------------------------------------------------------------------------------------


def history(number, **changed):
    return block_status({**content("history.json")["Jobs"][f"{number}.pbs1"], **changed})


def test_ends_of_real_jobs():
    """As reported by OpenPBS 23.06: finished, deleted while running, killed with its server, deleted while pending."""
    assert history(1).state is BlockState.COMPLETED
    assert (history(4).state, history(4).reason) == (BlockState.CANCELLED, "was deleted by root@pbs1")
    assert history(5).state is BlockState.PREEMPTED
    assert (history(9).state, history(9).reason) == (BlockState.CANCELLED, "was deleted before it started")


@pytest.mark.parametrize(
    ("changed", "ended"),
    [
        ({"Exit_status": -29}, BlockState.TIMED_OUT),
        ({"Exit_status": 271, "obittime": "Sat Nov 21 03:24:28 2026"}, BlockState.TIMED_OUT),
        ({"Exit_status": -14}, BlockState.NODE_FAILED),
        ({"Exit_status": -27}, BlockState.FAILED),
        ({"Exit_status": 3}, BlockState.FAILED),
        ({"Exit_status": 139}, BlockState.FAILED),
        ({"Exit_status": 137, "comment": "Job preempted"}, BlockState.PREEMPTED),
        ({"Exit_status": 265, "substate": 91, "comment": ""}, BlockState.CANCELLED),
    ],
)
def test_exit_codes_are_told_apart(changed, ended):
    assert history(5, **changed).state is ended


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [
        ({}, BlockState.PENDING),
        ({"job_state": "W"}, BlockState.PENDING),
        ({"job_state": "H", "Hold_Types": "so", "comment": "too many failed attempts"}, BlockState.HELD),
        ({"run_count": 1}, BlockState.PREEMPTED),
        ({"job_state": "R", "run_count": 2}, BlockState.PREEMPTED),
        ({"job_state": "R", "run_count": 1}, BlockState.RUNNING),
        ({"job_state": "S", "exec_vnode": "(a:ncpus=1)"}, BlockState.PREEMPTED),
        ({"job_state": "E", "exec_vnode": "(a:ncpus=1)"}, BlockState.RUNNING),
        ({"job_state": "M"}, BlockState.CANCELLED),
        ({"job_state": "?"}, BlockState.UNKNOWN),
    ],
)
def test_states_of_living_jobs(attributes, expected):
    assert block_status(job(**attributes)).state is expected


def test_a_running_block_knows_its_nodes_and_its_end():
    status = block_status(content("jobs.json")["Jobs"]["2006.pbs1"])
    assert (status.nodes, status.ends) == (("pbs1[7]",), 1795228645.0)
