"""Windows on PBS, with the output of a real OpenPBS 23.06."""

from __future__ import annotations

import pytest

from freetrain_parsl.errors import BatchSystemError, CommandNotFound, InvalidSettings
from freetrain_parsl.extensions.pbs.source import PbsWindowSource, pbs_walltime_request
from freetrain_parsl.planning.model import BlockTerms, Window, WindowKind
from freetrain_parsl.windows.base import BlockState
from freetrain_parsl.windows.node_kinds import WindowsByKind
from tests.extensions.pbs.pbs_answers import HEAD_START, NOW, Answers, content, text, with_hole

HOLE = Window(("pbs1[6]",), 1795227999.0, HEAD_START, WindowKind.BACKFILL, "main")

_WORDS = {"gpu": "ngpus", "cpu": "ncpus"}

pytestmark = pytest.mark.usefixtures("utc")


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def source(changed=None, **settings):
    answers = Answers(changed)
    settings.setdefault("queue", "main")
    settings.setdefault("user", "alice")
    return PbsWindowSource(run=answers, clock=settings.pop("clock", Clock()), **settings), answers


# -- windows -------------------------------------------------------------------------------------------------


def test_an_idle_node_is_a_window_until_the_top_job_starts_on_it():
    found, _ = source(with_hole())
    survey = found.survey()
    assert survey.windows == (HOLE,)
    assert survey.time == NOW
    assert survey.terms == BlockTerms(start_delay=60.0, walltime_step=1.0)
    assert survey.nodes == len(found.state().partitions["main"].nodes) > 1


def test_without_an_idle_node_there_is_no_window():
    found, _ = source()
    assert found.survey().windows == ()
    assert found.staircase().unused["pbs1[6]"].startswith("runs job 2004.pbs1 of alice")


def test_our_waiting_job_takes_no_window_from_us():
    """With our own top job, no other job needs the idle node before bflong, which does not fit before it."""
    found, _ = source(with_hole())
    ours = found.survey(["2003.pbs1"])
    assert ours.blocks["2003.pbs1"].state is BlockState.PENDING
    assert ours.windows != (HOLE,)


def test_a_queue_below_an_express_queue_has_preemptible_windows_and_says_why():
    found, answers = source(with_hole(), queue="backfill")
    survey = found.survey()
    assert [window.kind for window in survey.windows] == [WindowKind.PREEMPTIBLE]
    assert "those of main" in survey.notes[0]
    assert ("qmgr", "-c", "list sched") in answers.asked


def test_the_user_may_say_that_a_queue_is_not_preemptible():
    found, answers = source(with_hole(), queue="backfill", preemptible=False)
    survey = found.survey()
    assert [window.kind for window in survey.windows] == [WindowKind.BACKFILL]
    assert survey.notes == ()
    assert "qmgr -c" not in answers.names()


def test_without_qmgr_the_documented_default_is_taken_and_told():
    found, _ = source({**with_hole(), "scheduler.txt": CommandNotFound("qmgr is not on PATH")}, queue="backfill")
    survey = found.survey()
    assert survey.windows[0].kind is WindowKind.PREEMPTIBLE
    assert "qmgr does not show preempt_queue_prio" in survey.notes[0]


def test_the_servers_default_queue_is_taken():
    found, _ = source(with_hole(), queue=None, preemptible=False)
    assert [window.partition for window in found.survey().windows] == ["workq"]


@pytest.mark.parametrize(
    ("settings", "nodes"),
    [
        ({"cpus_per_node": 4, "gpus_per_node": 4}, 1),
        ({"cpus_per_node": 5}, 0),
        ({"select_options": ":ngpus=4:arch=linux"}, 1),
        ({"select_options": "ngpus=8"}, 0),
        ({"select_options": "arch=aix"}, 0),
        ({"select_options": "mem=17gb"}, 0),
    ],
)
def test_only_nodes_that_have_what_a_block_asks_are_windows(settings, nodes):
    found, _ = source(with_hole(), **settings)
    assert sum(len(window.nodes) for window in found.survey().windows) == nodes


def test_the_nodes_that_blocks_can_never_use_do_not_count():
    nodes = content("nodes.json")
    nodes["nodes"]["pbs1[5]"]["resources_available"]["ngpus"] = 0
    nodes["nodes"]["pbs1[4]"]["state"] = "down"  # it may have lost its resources with its state
    del nodes["nodes"]["pbs1[4]"]["resources_available"]["ngpus"]
    found, _ = source({"nodes.json": nodes}, select_options="ngpus=4")
    assert found.survey().nodes == 7


def test_a_site_that_hides_the_jobs_of_others_is_noted():
    server = content("server.json")
    server["Server"]["pbs1"]["query_other_jobs"] = "False"
    found, _ = source({**with_hole(), "server.json": server})
    assert "hides other users' jobs" in found.survey().notes[0]
    with pytest.raises(InvalidSettings, match="use a queue whose jobs may be preempted"):
        found.check(60.0)


# -- rate of queries -----------------------------------------------------------------------------------------


def test_a_round_is_two_commands():
    """Queues and server are queried every five minutes, reservations every minute."""
    clock = Clock()
    found, answers = source(with_hole(), clock=clock)
    found.survey()
    first = len(answers.asked)
    clock.now = 10.0
    found.survey()
    assert answers.names()[first:] == ["qstat -f", "pbsnodes -av"]
    clock.now = 61.0
    found.survey()
    assert answers.names()[first + 2 :] == ["qstat -f", "pbsnodes -av", "pbs_rstat -f"]
    clock.now = 301.0
    del answers.asked[:]
    found.survey()
    assert answers.names() == ["qstat -Qf", "qstat -Bf", "qmgr -c", "qstat -f", "pbsnodes -av", "pbs_rstat -f"]


def test_after_a_failure_everything_is_asked_again():
    found, answers = source(with_hole())
    found.survey()
    answers.changed["nodes.json"] = BatchSystemError("pbsnodes failed: cannot connect to server pbs1")
    with pytest.raises(BatchSystemError, match="cannot connect"):
        found.survey()
    answers.changed["nodes.json"] = with_hole()["nodes.json"]
    del answers.asked[:]
    found.survey()
    assert "qstat -Qf" in answers.names()


@pytest.mark.parametrize("name", ["jobs.json", "nodes.json", "queues.json", "server.json", "reservations.txt"])
def test_garbage_is_an_error_that_names_its_command(name):
    found, _ = source({name: "Segmentation fault"})
    with pytest.raises(BatchSystemError, match="returned invalid output"):
        found.survey()


# -- our jobs ------------------------------------------------------------------------------------------------


def test_jobs_are_known_by_the_long_id_that_qsub_gives():
    found, _ = source()
    survey = found.survey(["2006.pbs1.example.org"])
    assert survey.blocks["2006.pbs1.example.org"].state is BlockState.RUNNING


def test_a_vanished_job_is_looked_up_in_the_history_once():
    found, answers = source()
    for _ in range(2):
        survey = found.survey(["2006.pbs1", "4.pbs1"])
        assert survey.blocks["4.pbs1"].reason == "was deleted by root@pbs1"
    assert [asked for asked in answers.asked if asked[1] == "-x"] == [("qstat", "-x", "-f", "-F", "json", "4.pbs1")]


def test_a_job_that_pbs_has_never_heard_of_is_unknown():
    def history(*arguments):
        if "77.pbs1" in arguments:
            raise BatchSystemError("qstat failed: qstat: Unknown Job Id 77.pbs1")
        return text("history.json")

    found, _ = source({"history.json": history})
    blocks = found.survey(["77.pbs1", "1.pbs1"]).blocks
    assert blocks["77.pbs1"].state is BlockState.UNKNOWN
    assert blocks["1.pbs1"].state is BlockState.COMPLETED


def test_a_server_without_history_is_no_error():
    complaint = BatchSystemError("qstat failed: qstat: PBS is not configured to maintain job history")
    found, _ = source({"history.json": complaint})
    assert found.survey(["4.pbs1"]).blocks["4.pbs1"].reason == "PBS keeps no history here"


def test_a_block_that_was_requeued_is_told_to_linger():
    """Preemption by requeue: the block's second run is not needed and must not happen."""
    jobs = content("jobs.json")
    jobs["Jobs"]["2005.pbs1"]["run_count"] = 1
    found, answers = source({"jobs.json": jobs})
    blocks = found.survey(["2005.pbs1"]).blocks
    assert blocks["2005.pbs1"].state is BlockState.PREEMPTED
    assert blocks["2005.pbs1"].lingers
    assert not any(command[0] == "qdel" for command in answers.asked), "a survey changes nothing"
    assert "qstat -x" not in answers.names()


def test_jobs_are_deleted_in_one_command():
    found, answers = source()
    found.cancel(["1.pbs1", "2.pbs1"])
    found.cancel([])
    assert answers.asked == [("qdel", "1.pbs1", "2.pbs1")]


@pytest.mark.parametrize("complaint", ["Unknown Job Id 1.pbs1", "Job has finished 1.pbs1"])
def test_deleting_what_has_ended_is_no_error(complaint):
    found, _ = source({"qdel": BatchSystemError(f"qdel failed: qdel: {complaint}")})
    found.cancel(["1.pbs1"])


def test_a_deletion_that_fails_is_an_error():
    found, _ = source({"qdel": BatchSystemError("qdel failed: qdel: cannot connect to server pbs1 (errno=15010)")})
    with pytest.raises(BatchSystemError):
        found.cancel(["1.pbs1"])


def test_our_jobs_are_found_by_user_and_name():
    assert source()[0].find_jobs("bf") == {"2004.pbs1": "bf1", "2005.pbs1": "bflong"}
    assert source(user="bob")[0].find_jobs("bf") == {}


# -- rejections ----------------------------------------------------------------------------------------------


def test_an_unknown_queue_is_refused_with_the_nearest_name():
    with pytest.raises(InvalidSettings, match="no queue 'mian' \\(did you mean 'main'"):
        source(queue="mian")[0].check(60.0)


@pytest.mark.parametrize(
    ("attributes", "complaint"),
    [
        ({"enabled": "False"}, "accepts no jobs"),
        ({"resources_max": {"walltime": "00:05:00"}}, "allows jobs of at most 300 s, a useful block needs 600 s"),
        ({"acl_user_enable": "True", "acl_users": "bob@*,carol"}, "user alice may not use queue main"),
    ],
)
def test_a_queue_that_cannot_be_used_is_refused(attributes, complaint):
    queues = content("queues.json")
    queues["Queue"]["main"].update(attributes)
    with pytest.raises(InvalidSettings, match=complaint):
        source({"queues.json": queues})[0].check(600.0)


def test_a_queue_that_can_be_used_is_not_refused():
    queues = content("queues.json")
    queues["Queue"]["main"].update(acl_user_enable="True", acl_users="alice@pbs1", resources_max={"walltime": 600})
    source({"queues.json": queues})[0].check(600.0)


@pytest.mark.parametrize(
    ("complaint", "passing"),
    [
        ("qsub: Unknown queue", False),
        ("qsub: Unauthorized Request", False),
        ("qsub: Invalid Account", False),
        ("qsub: Job violates queue and/or server resource limits", False),
        ("qsub: Maximum number of jobs already in queue for user alice", True),
        ("qsub: would exceed complex's per-user limit of jobs in 'Q' state", True),
        ("qsub: cannot connect to server pbs1 (errno=15010)", True),
        ("qsub: Queue is not enabled", True),
        ("qsub: an unknown message", False),
    ],
)
def test_refusals_keep_the_words_of_qsub_and_tell_whether_they_pass(complaint, passing):
    refusal = source()[0].explain_refusal(complaint)
    assert complaint.removeprefix("qsub: ") in refusal.reason
    assert refusal.passing is passing
    assert "\n" not in refusal.reason


def test_walltimes_that_shrink_to_fit():
    assert pbs_walltime_request(60.0, 7200.9) == "min_walltime=00:01:00,max_walltime=02:00:00"
    with pytest.raises(InvalidSettings):
        pbs_walltime_request(600.0, 60.0)


def test_a_vnode_of_two_kinds_is_named_in_the_note():
    """The name of a vnode has brackets, which no host list can contain."""
    sources = {kind: source(with_hole(), select_options=f"{word}=4")[0] for kind, word in _WORDS.items()}
    survey = WindowsByKind(sources).survey()
    assert {window.nodes: window.node_kind for window in survey.windows} == {("pbs1[6]",): "gpu"}
    assert "pbs1[6]: of the kinds 'gpu' and 'cpu', counted as 'gpu'" in survey.notes


def test_the_gpus_of_a_node_are_its_ngpus():
    """Of the nodes on which blocks can start."""
    found, _ = source({}, select_options="ngpus=1")
    assert found.gpus_on_nodes() == {4}
