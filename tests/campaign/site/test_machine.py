"""What a batch system offers to a user, with the output of real Slurm and PBS."""

from __future__ import annotations

import pytest

from freetrain_parsl.errors import BatchSystemError
from freetrain_parsl.executor.batch.slurm import SlurmSystem
from freetrain_parsl.extensions.pbs.system import PbsSystem
from freetrain_parsl.windows.machine import NodeType
from tests.extensions.pbs.pbs_answers import Answers, content
from tests.windows.slurm_replies import Replies

CONFIG = "scontrol show config"
ASSOCIATIONS = "sacctmgr -n -P show associations"


def with_database(replies: Replies, *, preempt: str = "preempt/none") -> str:
    """Change the recorded configuration to one with accounting and, on request, preemption by QOS."""
    lines = [
        line
        for line in replies.answers[CONFIG].splitlines()
        if not line.startswith(("AccountingStorageType", "PreemptType", "AccountingStorageEnforce"))
    ]
    settings = ("AccountingStorageType = accounting_storage/slurmdbd", "AccountingStorageEnforce = associations")
    return "\n".join((*lines, *settings, f"PreemptType = {preempt}"))


@pytest.mark.parametrize("version", ["22.05.8", "24.11.5"])
def test_partitions_that_allow_preemption_come_first(version):
    machine = SlurmSystem().describe(user="ada", run=Replies(version))
    assert [queue.name for queue in machine.queues][:2] == ["backfill", "main"]
    assert [queue.partition.preemptible for queue in machine.queues][:2] == [True, False]
    assert all(queue.refusal == "" for queue in machine.queues)
    assert machine.queues[0].node_types[0][0] == NodeType(4, 4 if version == "22.05.8" else 0, 16000)


def test_each_command_runs_once():
    replies = Replies()
    SlurmSystem().describe(user="ada", run=replies)
    assert len(replies.commands) == len(set(replies.commands))
    answers = Answers()
    PbsSystem().describe(user="alice", run=answers)
    assert len(answers.asked) == len(set(answers.asked))


def test_a_partition_for_others_is_refused_with_the_reason_and_comes_last():
    replies = Replies()
    replies.change = {
        "scontrol --all show partition": replies.answers["scontrol --all show partition"].replace(
            "State=UP", "State=DOWN", 2
        )
    }
    partitions = SlurmSystem().describe(user="ada", run=replies).queues
    assert all("down" in queue.refusal for queue in partitions)


def test_accounts_and_a_preemptible_qos_come_from_the_database():
    replies = Replies()
    replies.change = {
        CONFIG: with_database(replies, preempt="preempt/qos"),
        ASSOCIATIONS: "m1234|normal,spare\nm99|normal\n",
        "sacctmgr -n -P show qos": "normal|spare|00:00:00\nspare||00:01:00\n",
    }
    machine = SlurmSystem().describe(user="ada", run=replies)
    assert machine.accounts == ("m1234", "m99")
    best = machine.queues[0]
    assert (best.qos, best.partition.preemptible, best.partition.grace) == ("spare", True, 60.0)


@pytest.mark.parametrize("version", ["22.05.8", "24.11.5"])
def test_without_a_database_there_are_no_accounts(version):
    machine = SlurmSystem().describe(user="ada", run=Replies(version))
    assert (machine.accounts, machine.has_accounts) == ((), False)


def test_a_database_that_does_not_answer_leaves_accounts_unknown():
    replies = Replies()
    replies.change = {CONFIG: with_database(replies), ASSOCIATIONS: BatchSystemError("sacctmgr failed: no answer")}
    machine = SlurmSystem().describe(user="ada", run=replies)
    assert (machine.accounts, machine.has_accounts) == ((), True)


def test_a_slurm_that_does_not_answer_is_an_error():
    replies = Replies(change={CONFIG: BatchSystemError("scontrol failed: unable to contact slurm controller")})
    with pytest.raises(BatchSystemError, match="unable to contact"):
        SlurmSystem().describe(user="ada", run=replies)


@pytest.mark.usefixtures("utc")
def test_queues_of_pbs_with_their_nodes_and_limits():
    machine = PbsSystem().describe(user="alice", run=Answers())
    names = [queue.name for queue in machine.queues]
    assert set(names) == set(content("queues.json")["Queue"])
    backfill = next(queue for queue in machine.queues if queue.name == "backfill")
    main = next(queue for queue in machine.queues if queue.name == "main")
    assert backfill.partition.preemptible
    assert not main.partition.preemptible
    assert names.index("backfill") < names.index("main")
    assert isinstance(main.node_types[0][0], NodeType)


@pytest.mark.usefixtures("utc")
def test_a_queue_of_pbs_for_others_is_refused():
    queues = content("queues.json")
    queues["Queue"]["main"] |= {"acl_user_enable": "True", "acl_users": "bob@*"}
    machine = PbsSystem().describe(user="alice", run=Answers({"queues.json": queues}))
    assert machine.queues[-1].name == "main"
    assert "may not use queue main" in machine.queues[-1].refusal
