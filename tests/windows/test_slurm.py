"""Windows, blocks and rejections of Slurm, with recorded output of a real one."""

from __future__ import annotations

import pytest

from freetrain_parsl import RateLimits
from freetrain_parsl.errors import BatchSystemError, CommandNotFound, InvalidSettings
from freetrain_parsl.planning.model import WindowKind
from freetrain_parsl.testing.window_suite import WindowSourceConformance
from freetrain_parsl.windows.base import BlockState
from freetrain_parsl.windows.slurm.source import SlurmWindowSource
from tests.windows.slurm_replies import FIXTURES, NOW, Replies

HEAD_START = 1795263904.0
CONFIG = (FIXTURES / "slurm-22.05.8" / "scontrol_show_config.txt").read_text()
POLL_INTERVAL = RateLimits().poll_interval.total_seconds()


def hiding(waiting: int = 0) -> Replies:
    """Reply like a site that hides other users' jobs, `waiting` of which are pending."""
    statistics = f"Main schedule statistics (microseconds):\n\tLast queue length: {waiting}\n"
    return Replies(change={"scontrol show config": CONFIG + "PrivateData = jobs\n", "sdiag": statistics})


def requests_of(command: str) -> int:
    """Count the requests of a command to slurmctld."""
    words = command.split()
    if "--version" in words:
        return 0
    return 2 if words[0] == "squeue" or words[-1] in ("nodes", "config") else 1


def source(replies: Replies, **settings) -> SlurmWindowSource:
    return SlurmWindowSource(**{"user": "ada", "run": replies, "clock": lambda: NOW, **settings})


class TestConformance(WindowSourceConformance):
    """The contract of every window source."""

    def make_source(self):
        """Reply like a real 22.05.8."""
        return source(Replies())

    def own_job(self):
        """Return the dependent job, whose name was inserted."""
        return "24", "freetrain-ab12-1"


class TestWindows:
    """A hole before a planned job."""

    def test_planned_node_is_a_window_until_the_head_job_starts(self):
        """Of the idle nodes one is drained."""
        (window,) = source(Replies()).survey().windows
        assert (window.nodes, window.closes) == (("node06",), HEAD_START)
        assert (window.kind, window.partition) == (WindowKind.BACKFILL, "main")

    def test_low_partition_is_preemptible(self):
        """With the same planned end."""
        (window,) = source(Replies(), partition="backfill").survey().windows
        assert (window.nodes, window.closes, window.kind) == (("node06",), HEAD_START, WindowKind.PREEMPTIBLE)

    def test_every_other_node_has_a_reason(self):
        """As shown to users."""
        unused = source(Replies(), gpus_per_node=4).staircase().unused
        assert unused["node07"] == "drained: bad disk, see ticket"
        assert unused["node08"].startswith("runs job 17 of ada until ")
        assert set(unused) == {f"node0{n}" for n in (1, 2, 3, 4, 5, 7, 8)}

    def test_terms_are_those_of_the_site(self):
        """The start takes up to bf_interval; walltimes are minutes; nodes include those in use."""
        assert source(Replies()).survey().nodes == 8
        terms = source(Replies()).survey().terms
        assert (terms.start_delay, terms.walltime_step, terms.min_nodes, terms.max_nodes) == (2.0, 60.0, 1, None)

    def test_defaults_of_slurm_where_the_site_says_nothing(self):
        """30 s between passes, 500 jobs."""
        replies = Replies(change={"scontrol show config": "SchedulerType = sched/backfill\n"})
        scheduling = source(replies).state().scheduling
        assert (scheduling.cycle, scheduling.plan_jobs) == (30, 500)

    @pytest.mark.parametrize("version", ["24.11.5", "26.05.5"])
    def test_newer_versions_are_asked_for_json(self, version):
        """The windows are of the same kind."""
        replies = Replies(version)
        survey = source(replies, clock=lambda: 1795227430.0).survey()
        assert any("--json" in command for command in replies.commands)
        (window,) = [window for window in survey.windows if "node06" in window.nodes]
        assert window.closes == pytest.approx(1795227722, abs=7)

    def test_slurm_without_json_is_asked_for_text_from_then_on(self):
        """It may be built without."""
        none = BatchSystemError("squeue failed: serializer plugin json not found")
        old = (FIXTURES / "slurm-22.05.8").joinpath
        replies = Replies(
            "24.11.5",
            {
                "squeue --json": none,
                "squeue --noheader --all": old("squeue.txt").read_text(),
                "scontrol --all --details show nodes": old("scontrol_show_nodes.txt").read_text(),
            },
        )
        asked = source(replies)
        asked.survey()
        asked.survey()
        assert sum("--json" in command for command in replies.commands) == 1

    def test_other_failures_of_json_are_failures(self):
        """A controller that is down does not return text either."""
        replies = Replies("24.11.5", {"squeue --json": BatchSystemError("squeue failed: Unable to contact")})
        with pytest.raises(BatchSystemError, match="Unable to contact"):
            source(replies).survey()
        assert not any("--Format" in command for command in replies.commands)

    def test_a_round_is_one_command(self):
        """Data that rarely changes is rarely queried, but again after an error."""
        replies = Replies()
        now = [NOW]
        asked = source(replies, clock=lambda: now[0])
        asked.survey(["15"])
        first = len(replies.commands)
        replies.commands.clear()
        asked.survey(["15"])
        assert [command.split()[0] for command in replies.commands] == ["squeue"]
        replies.change["squeue --noheader"] = BatchSystemError("squeue failed")
        with pytest.raises(BatchSystemError):
            asked.survey()
        replies.change.clear()
        replies.commands.clear()
        asked.survey(["15"])
        assert len(replies.commands) == first
        replies.commands.clear()
        now[0] += 3600
        asked.survey(["15"])
        assert len(replies.commands) == first

    @pytest.mark.parametrize("hidden", [False, True])
    def test_an_hour_at_the_default_interval_takes_at_most_twelve_requests_a_minute(self, hidden):
        """Counted as in slurmctld 22.05, with two monitored blocks, of which one starts and ends."""
        replies = hiding() if hidden else Replies()
        now = [NOW]
        asked = source(replies, clock=lambda: now[0])
        while now[0] < NOW + 3600:
            survey = asked.survey(["15", "24"])
            now[0] += survey.effort * POLL_INTERVAL
        requests = sum(map(requests_of, replies.commands))
        assert 4 < requests / 60 <= 12

    def test_jobs_of_others_wait_where_more_wait_than_are_shown(self):
        """The visible jobs are ours: the scheduler's statistics include them."""
        ours = sum(job.eligible for job in source(Replies()).state().pending)
        assert ours > 0
        for partition, waiting, windows in (("main", ours, 1), ("main", ours + 1, 0), ("backfill", ours + 1, 1)):
            replies = hiding(waiting)
            nodes = replies.answers["scontrol --all --details show nodes"]
            replies.change["scontrol --all --details show nodes"] = nodes.replace("IDLE+PLANNED", "IDLE")
            assert len(source(replies, partition=partition).survey().windows) == windows

    def test_a_site_that_hides_jobs_and_tells_no_statistics_is_refused_unless_preemptible(self):
        """It cannot be determined whether other jobs are pending."""
        replies = hiding()
        replies.change["sdiag"] = BatchSystemError("sdiag failed: Access/permission denied")
        with pytest.raises(InvalidSettings, match=r"does not report how many are pending .*may be preempted"):
            source(replies).check(60.0)
        source(replies, partition="backfill").check(60.0)

    def test_nodes_are_asked_again_when_a_job_has_left_its_nodes_in_no_ordinary_way(self):
        """Its node may be down, which the queue does not show."""
        replies = Replies()
        asked = source(replies)
        asked.survey()
        replies.commands.clear()
        running = replies.answers["squeue --noheader --all"]
        assert "RUNNING" in running
        replies.change["squeue --noheader --all"] = running.replace("RUNNING", "COMPLETED")
        asked.survey()
        assert [command.split()[0] for command in replies.commands] == ["squeue"]
        replies.change["squeue --noheader --all"] = running.replace("RUNNING", "NODE_FAIL")
        asked.survey()
        assert [command.split()[0] for command in replies.commands[1:]] == ["squeue", "scontrol"]

    def test_a_node_whose_job_has_ended_is_a_window_at_the_next_look(self):
        """Although nodes are not queried."""
        replies = Replies()
        asked = source(replies)
        before = {name for window in asked.survey().windows for name in window.nodes}
        assert "node08" not in before
        lines = replies.answers["squeue --noheader --all"].splitlines(keepends=True)
        replies.change["squeue --noheader --all"] = "".join(
            line.replace("RUNNING", "COMPLETED") if line.startswith("17\t") else line for line in lines
        )
        assert "node08" in {name for window in asked.survey().windows for name in window.nodes}

    def test_constraint_that_is_no_plain_and_is_refused(self):
        """Instead of finding windows on the wrong nodes."""
        with pytest.raises(InvalidSettings, match="features joined by '&'"):
            source(Replies(), constraint="a100|v100")

    def test_qos_tells_of_preemption_where_it_goes_by_qos(self):
        """From the database, with its grace."""
        config = "SchedulerType = sched/backfill\nPreemptType = preempt/qos\n"
        change = {
            "scontrol show config": f"{config}AccountingStorageType = accounting_storage/slurmdbd\n",
            "sacctmgr -n -P show qos": "normal|scavenger,idle|00:00:00\nscavenger||00:02:00\n",
        }
        asked = source(Replies(change=change), qos="scavenger")
        assert {window.kind for window in asked.survey().windows} == {WindowKind.PREEMPTIBLE}
        assert asked.state().partitions["main"].grace == 120
        normal = source(Replies(change=change), qos="normal").survey()
        assert {window.kind for window in normal.windows} == {WindowKind.BACKFILL}
        untold = source(Replies(change={"scontrol show config": config}), qos="scavenger").survey()
        assert {window.kind for window in untold.windows} == {WindowKind.BACKFILL}
        assert "no database shows whether QOS scavenger is preemptible" in untold.notes[0]


class TestBlocks:
    """States of our jobs."""

    def test_states_of_one_squeue(self):
        """Including those that ended minutes ago, without another command."""
        replies = Replies()
        blocks = source(replies).survey(["17", "24", "18", "23", "22"]).blocks
        assert {job: status.state for job, status in blocks.items()} == {
            "17": BlockState.RUNNING,
            "24": BlockState.PENDING,
            "18": BlockState.HELD,
            "23": BlockState.COMPLETED,
            "22": BlockState.HELD,
        }
        assert blocks["17"].nodes == ("node08",)
        assert blocks["17"].ends == 1795262404
        assert not any(command.startswith("sacct") for command in replies.commands)

    def database(self, **answers: str | Exception) -> Replies:
        """Reply like a Slurm with a database."""
        config = "SchedulerType = sched/backfill\nAccountingStorageType = accounting_storage/slurmdbd\n"
        return Replies(change={"scontrol show config": config, **answers})

    def test_vanished_job_is_asked_of_the_database(self):
        """The reason contains the user who cancelled it."""
        replies = self.database(sacct="7|CANCELLED by 0\n8|TIMEOUT\n9|CANCELLED by 4294967\n")
        blocks = source(replies).survey(["7", "8", "9", "10"]).blocks
        assert (blocks["7"].state, blocks["7"].reason) == (BlockState.CANCELLED, "was cancelled by root")
        assert blocks["8"].state is BlockState.TIMED_OUT
        assert blocks["9"].reason == "was cancelled by 4294967"
        assert blocks["10"].state is BlockState.UNKNOWN

    def test_job_that_we_cancelled_is_not_asked_of_the_database(self):
        """The reason is known; for other jobs it is queried."""
        replies = self.database(sacct="14|CANCELLED by 0\n")
        asked = source(replies)
        asked.cancel(["13"])
        blocks = asked.survey(["13", "14"]).blocks
        assert [command.split("-j ")[1].split()[0] for command in replies.commands if command.startswith("sacct")] == [
            "14"
        ]
        assert blocks["13"].state is BlockState.CANCELLED
        assert blocks["14"].reason == "was cancelled by root"

    @pytest.mark.parametrize(
        "failure", [BatchSystemError("sacct did not answer within 30 s"), CommandNotFound("sacct is not on PATH")]
    )
    def test_database_that_does_not_answer_is_left_alone(self, failure):
        """For ten minutes; the survey continues without it."""
        replies = self.database(sacct=failure)
        now = [NOW]
        asked = source(replies, clock=lambda: now[0])
        for _ in range(3):
            assert asked.survey(["7"]).blocks["7"].state is BlockState.UNKNOWN
        assert sum(command.startswith("sacct") for command in replies.commands) == 1
        now[0] += 601
        asked.survey(["7"])
        assert sum(command.startswith("sacct") for command in replies.commands) == 2

    def test_all_are_cancelled_with_one_command(self):
        """Without jobs, no command is run."""
        replies = Replies()
        asked = source(replies)
        asked.cancel(["1", "2"])
        asked.cancel([])
        assert replies.commands == ["scancel 1 2"]

    def test_cancelling_what_is_gone_is_no_error(self):
        """Any other failure is an error."""
        gone = {"scancel": BatchSystemError("scancel failed: error: Kill job error on job id 1: Invalid job id")}
        source(Replies(change=gone)).cancel(["1"])
        with pytest.raises(BatchSystemError):
            source(Replies(change={"scancel": BatchSystemError("Access/permission denied")})).cancel(["1"])

    def test_jobs_are_found_by_prefix_for_our_user_only(self):
        """One squeue."""
        replies = Replies()
        assert source(replies).find_jobs("freetrain-") == {"24": "freetrain-ab12-1"}
        assert replies.commands == ["squeue --noheader --user=ada --Format JobID:\t,Name:\t"]


class TestBadInput:
    """One line each, nothing submitted."""

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"partition": "mian"}, "partition 'mian' does not exist on this cluster .did you mean 'main'"),
            ({"constraint": "v100"}, "constraint 'v100': no node of partition 'main' has that feature"),
            ({"gpus_per_node": 8}, "no node of partition 'main' has 8 GPUs: the largest has 4"),
            ({"cpus_per_node": 128}, "has 128 CPUs: the largest has 4"),
            ({"memory_per_node": 10**6}, "1000000 MiB of memory: the largest has 16000"),
        ],
    )
    def test_check_refuses_what_never_runs(self, settings, message):
        """Before anything is submitted."""
        with pytest.raises(InvalidSettings, match=message):
            source(Replies(), **settings).check(60)

    @pytest.mark.parametrize(
        ("old", "new", "settings", "message"),
        [
            ("MaxTime=UNLIMITED", "MaxTime=00:05:00", {}, "allows jobs of at most 300 s.*needs 900 s"),
            ("State=UP", "State=DOWN", {}, "partition 'main' is down"),
            (
                "AllowAccounts=ALL",
                "AllowAccounts=phys,chem",
                {"account": "bio"},
                "account 'bio' may not use.*chem, phys",
            ),
            ("AllowQos=ALL", "AllowQos=long", {"qos": "short"}, "QOS 'short' may not use partition 'main'; .*long"),
            ("Default=YES", "Default=NO", {}, "no default partition"),
        ],
    )
    def test_check_reads_the_partition(self, old, new, settings, message):
        """Limits and rights."""
        text = (FIXTURES / "slurm-22.05.8" / "scontrol_show_partition.txt").read_text().replace(old, new)
        with pytest.raises(InvalidSettings, match=message):
            source(Replies(change={"scontrol --all show partition": text}), **settings).check(900)

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            (
                {"account": "pyhs"},
                "account 'pyhs' may not be charged by user ada .did you mean 'phys'..; yours: bio, phys",
            ),
            ({"account": "bio", "qos": "long"}, "QOS 'long' may not be used by user ada"),
            ({"account": "phys", "qos": "long"}, None),
        ],
    )
    def test_check_asks_the_database_for_rights(self, settings, message):
        """If it enforces them; an authorised user is not rejected."""
        config = (
            "SchedulerType = sched/backfill\nAccountingStorageType = accounting_storage/slurmdbd\n"
            "AccountingStorageEnforce = associations,limits,qos\n"
        )
        change = {
            "scontrol show config": config,
            "sacctmgr -n -P show associations": "phys|normal,long\nbio|normal\n",
        }
        asked = source(Replies(change=change), **settings)
        if message is None:
            asked.check(60)
        else:
            with pytest.raises(InvalidSettings, match=message):
                asked.check(60)

    def test_missing_commands_are_told(self):
        """By the runner."""
        with pytest.raises(CommandNotFound):
            source(Replies(change={"sbatch": CommandNotFound("sbatch is not on PATH")})).check(60)

    @pytest.mark.parametrize(
        ("command", "named"),
        [
            ("squeue --noheader --all", "squeue"),
            ("scontrol --all --details show nodes", "scontrol show nodes"),
            ("scontrol --all show partition", "scontrol show partition"),
            ("scontrol --all show reservation", "scontrol show reservation"),
            ("scontrol show config", "scontrol show config"),
            ("scontrol --version", "scontrol"),
        ],
    )
    def test_garbage_is_refused_by_name(self, command, named):
        """The command and the problem are reported in one line."""
        with pytest.raises(BatchSystemError, match=f"^{named} returned output that cannot be parsed: ") as caught:
            source(Replies(change={command: "<html>\nlogin"})).survey()
        assert "\n" not in str(caught.value)

    def test_garbled_host_list_is_refused(self):
        """Wherever it occurs."""
        text = (FIXTURES / "slurm-22.05.8" / "squeue.txt").read_text().replace("node[01-05]", "node[01-")
        with pytest.raises(BatchSystemError, match=r"squeue returned .*not a list of nodes"):
            source(Replies(change={"squeue --noheader --all": text})).survey()


@pytest.mark.parametrize(
    ("complaint", "words", "passing"),
    [
        ("sbatch: error: invalid partition specified: x", "unknown partition", False),
        (
            "sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified",
            "may not be charged here",
            False,
        ),
        (
            "Batch job submission failed: Requested time limit is invalid (missing or exceeds some limit)",
            "lower",
            False,
        ),
        (
            "error: QOSMaxSubmitJobPerUserLimit\nJob violates accounting/QOS policy (job submit limit, ...)",
            "queued",
            True,
        ),
        ("error: AssocMaxNodesPerJob\nJob violates accounting/QOS policy (job submit limit, ...)", "a limit", False),
        ("Unable to contact slurm controller (connect failure)", "controller is down", True),
        ("Batch job submission failed: Socket timed out on send/recv operation", "slow", True),
        ("Slurm temporarily unable to accept job, sleeping and retrying", "queue is full", True),
        ("Batch job submission failed: Invalid feature specification", "constraint", False),
        ("something new", "something new", False),
    ],
)
def test_complaints_of_sbatch(complaint, words, passing):
    """In plain English, with Slurm's message and whether to retry."""
    refusal = source(Replies()).explain_refusal(complaint)
    assert words in refusal.reason
    assert refusal.passing is passing


def test_the_gpus_of_a_node_are_those_of_its_gres():
    """Of the nodes on which blocks can start; the largest of this partition has 4."""
    found = source(Replies(), gpus_per_node=1).gpus_on_nodes()
    assert max(found) == 4
    assert 0 not in found
