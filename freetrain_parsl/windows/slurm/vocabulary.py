"""Slurm's own words and what they mean: job states, pending reasons, node flags, complaints of sbatch. Tables only.

The reasons and states are those of Slurm's documentation (squeue, "JOB REASON CODES" and "JOB STATE CODES").
"""

from __future__ import annotations

from enum import Enum

from freetrain_parsl.windows.base import BlockState, Refusal

__all__ = ["HOLDS_NODES", "UNUSABLE", "Waiting", "block_state", "explain_complaint", "explain_reason"]


class Waiting(Enum):
    """What a pending job waits for."""

    NODES = "nodes: it could start if there were some"
    OTHERS = "something else than nodes that may come by itself"
    CHANGE = "a change of its settings or of the site's: it would never start by itself"


HOLDS_NODES = frozenset(
    ("RUNNING", "COMPLETING", "CONFIGURING", "RESIZING", "SIGNALING", "STAGE_OUT", "STOPPED", "SUSPENDED")
)
"""Job states in which a job holds nodes."""

_STATES = {
    "BOOT_FAIL": (BlockState.NODE_FAILED, "its nodes did not boot"),
    "CANCELLED": (BlockState.CANCELLED, "was cancelled by its user or an administrator"),
    "COMPLETED": (BlockState.COMPLETED, ""),
    "COMPLETING": (BlockState.RUNNING, "is ending: its processes are being cleared away"),
    "CONFIGURING": (BlockState.RUNNING, "its nodes are being made ready"),
    "DEADLINE": (BlockState.TIMED_OUT, "was ended at the deadline that it was submitted with"),
    "FAILED": (BlockState.FAILED, "its batch script ended with an error"),
    "LAUNCH_FAILED": (BlockState.FAILED, "could not be launched on its nodes"),
    "NODE_FAIL": (BlockState.NODE_FAILED, "one of its nodes failed"),
    "OUT_OF_MEMORY": (BlockState.FAILED, "ran out of memory: ask for more memory per node"),
    "PENDING": (BlockState.PENDING, ""),
    "PREEMPTED": (BlockState.PREEMPTED, ""),
    "RECONFIG_FAIL": (BlockState.NODE_FAILED, "its nodes could not be reconfigured"),
    "REQUEUED": (BlockState.PENDING, "was put back into the queue"),
    "REQUEUE_FED": (BlockState.PENDING, "was put back into the queue of its federation"),
    "REQUEUE_HOLD": (BlockState.HELD, "was put back into the queue and is held there"),
    "RESIZING": (BlockState.RUNNING, "is changing its size"),
    "RESV_DEL_HOLD": (BlockState.HELD, "is held because its reservation was deleted"),
    "REVOKED": (BlockState.CANCELLED, "runs on another cluster of the federation"),
    "RUNNING": (BlockState.RUNNING, ""),
    "SIGNALING": (BlockState.RUNNING, "is being signalled"),
    "SPECIAL_EXIT": (BlockState.HELD, "was put back into the queue by its exit code and is held there"),
    "STAGE_OUT": (BlockState.RUNNING, "is staging its files out"),
    "STOPPED": (BlockState.RUNNING, "is stopped: it holds its nodes, its processes do not run"),
    "SUSPENDED": (BlockState.RUNNING, "is suspended: its processes do not run"),
    "TIMEOUT": (BlockState.TIMED_OUT, ""),
}


def block_state(word: str) -> tuple[BlockState, str]:
    """Tell what Slurm's word for a job's state means, and a sentence where the state alone does not say it."""
    return _STATES.get(word, (BlockState.UNKNOWN, f"Slurm calls its state {word}"))


_REASONS = {
    "": (Waiting.NODES, ""),
    "None": (Waiting.NODES, ""),
    "AccountNotAllowed": (Waiting.CHANGE, "its account may not use this partition"),
    "AssociationJobLimit": (Waiting.OTHERS, "its account runs as many jobs as it may"),
    "AssociationResourceLimit": (Waiting.OTHERS, "its account uses as much as it may"),
    "AssociationTimeLimit": (Waiting.CHANGE, "its account has used up its time"),
    "BadConstraints": (Waiting.CHANGE, "no node satisfies its constraints"),
    "BeginTime": (Waiting.OTHERS, "its earliest begin time has not come"),
    "Cleaning": (Waiting.OTHERS, "it was requeued and its last run is still being cleared away"),
    "Dependency": (Waiting.OTHERS, "it waits for another job"),
    "DependencyNeverSatisfied": (Waiting.CHANGE, "the job that it waits for has failed"),
    "FrontEndDown": (Waiting.NODES, "no front end node is up"),
    "InactiveLimit": (Waiting.CHANGE, "it reached the limit of inactivity"),
    "InvalidAccount": (Waiting.CHANGE, "its account is not valid"),
    "InvalidQOS": (Waiting.CHANGE, "its QOS is not valid"),
    "JobArrayTaskLimit": (Waiting.OTHERS, "its array runs as many tasks as it may"),
    "JobHeldAdmin": (Waiting.CHANGE, "is held by an administrator"),
    "JobHeldUser": (Waiting.CHANGE, "is held by its user: scontrol release JOB lets it go"),
    "JobHoldMaxRequeue": (Waiting.CHANGE, "is held since it was put back into the queue too often"),
    "JobLaunchFailure": (Waiting.CHANGE, "could not be launched: a bad file system, or a name of a program"),
    "Licenses": (Waiting.OTHERS, "it waits for a licence"),
    "MaxMemPerLimit": (Waiting.CHANGE, "it asks for more memory than the partition allows"),
    "NodeDown": (Waiting.NODES, "a node that it needs is down"),
    "Nodes required for job are DOWN": (Waiting.NODES, "its nodes are down, or planned for jobs that go first"),
    "NonZeroExitCode": (Waiting.CHANGE, "it ended with an error and was requeued"),
    "PartitionConfig": (Waiting.CHANGE, "it asks for what the partition does not have"),
    "PartitionDown": (Waiting.OTHERS, "its partition is down"),
    "PartitionInactive": (Waiting.OTHERS, "its partition is inactive"),
    "PartitionNodeLimit": (Waiting.CHANGE, "it asks for more, or fewer, nodes than the partition gives to a job"),
    "PartitionTimeLimit": (Waiting.CHANGE, "it asks for more time than the partition gives to a job"),
    "Priority": (Waiting.NODES, "jobs of a higher priority wait too"),
    "Prolog": (Waiting.NODES, "its prolog is still running"),
    "QOSJobLimit": (Waiting.OTHERS, "its QOS runs as many jobs as it may"),
    "QOSNotAllowed": (Waiting.CHANGE, "its QOS may not be used in this partition"),
    "QOSResourceLimit": (Waiting.OTHERS, "its QOS uses as much as it may"),
    "QOSTimeLimit": (Waiting.CHANGE, "its QOS has used up its time"),
    "QOSUsageThreshold": (Waiting.OTHERS, "the usage threshold of its QOS is breached"),
    "ReqNodeNotAvail": (Waiting.NODES, "a node that it needs is down, drained or reserved"),
    "Reservation": (Waiting.OTHERS, "its reservation has not begun"),
    "ReservationDeleted": (Waiting.CHANGE, "its reservation was deleted"),
    "Resources": (Waiting.NODES, "it is next, as soon as enough nodes are free"),
    "SchedDefer": (Waiting.NODES, "it waits for the next pass of the scheduler"),
    "SystemFailure": (Waiting.CHANGE, "Slurm, the file system or the network failed"),
}

# Limits are many and named by rule; the first that fits counts.
_REASON_PARTS = (
    ("requeued held", Waiting.CHANGE, "could not be launched and is held"),
    ("held state", Waiting.CHANGE, "was put back into the queue and is held"),
    ("WallDurationPerJob", Waiting.CHANGE, "it asks for more time than a limit of its QOS or account allows to a job"),
    ("MinutesPerJob", Waiting.CHANGE, "it asks for more than a limit of its QOS or account allows to a job"),
    ("PerJobLimit", Waiting.CHANGE, "it asks for more than a limit of its QOS or account allows to a job"),
    ("PerJob", Waiting.CHANGE, "it asks for more than a limit of its QOS or account allows to a job"),
    ("PerNode", Waiting.CHANGE, "it asks for more of a node than a limit of its QOS or account allows"),
    ("QOSMin", Waiting.CHANGE, "it asks for less than its QOS demands"),
    ("JobsPerUser", Waiting.OTHERS, "its user runs as many jobs as the QOS allows"),
    ("SubmitJob", Waiting.OTHERS, "its user or account has as many jobs queued as it may"),
    ("QOSMax", Waiting.OTHERS, "its user uses as much as the QOS allows"),
    ("QOSGrp", Waiting.OTHERS, "its QOS uses as much as it may"),
    ("AssocGrp", Waiting.OTHERS, "its account uses as much as it may"),
    ("AssocMax", Waiting.OTHERS, "its account uses as much as it may"),
    ("BurstBuffer", Waiting.OTHERS, "it waits for its burst buffer"),
)


def explain_reason(reason: str) -> tuple[Waiting, str]:
    """Tell what Slurm's reason of a pending job means.

    A reason that is not known counts as waiting for nodes: that is the careful assumption about jobs of others.
    """
    known = _REASONS.get(reason) or _REASONS.get(reason.partition(",")[0])
    if known is not None:
        return known
    for part, waiting, sentence in _REASON_PARTS:
        if part in reason:
            return waiting, f"{sentence} ({reason})"
    return Waiting.NODES, reason


UNUSABLE = {
    "BLOCKED": "blocked by a job that takes whole racks",
    "DOWN": "down",
    "DRAIN": "drained",
    "DRAINED": "drained",
    "DRAINING": "drained",
    "ERROR": "in error",
    "FAIL": "failing",
    "FAILING": "failing",
    "FUTURE": "not built yet",
    "INVALID_REG": "not as it is configured",
    "MAINT": "in a maintenance reservation",
    "NOT_RESPONDING": "not responding",
    "NO_RESPOND": "not responding",
    "PERFCTRS": "in use for performance counters",
    "POWERED_DOWN": "powered down",
    "POWERING_DOWN": "powering down",
    "POWERING_UP": "powering up",
    "POWER_DOWN": "about to be powered down",
    "REBOOT_ISSUED": "rebooting",
    "REBOOT_REQUESTED": "about to reboot",
    "RESERVED": "in a reservation",
    "UNKNOWN": "in an unknown state",
}
"""Words of a node's state that keep jobs from starting on it, in plain English."""

# In order: the first part that the complaint has, case aside, counts.
_COMPLAINTS = (
    ("invalid account or account/partition", False, "this account may not be charged here: set another `account`"),
    ("invalid account", False, "there is no such account: set another `account`"),
    ("invalid partition", False, "there is no such partition: set another `partition`"),
    ("invalid qos", False, "there is no such QOS, or your account may not use it: set another `qos`"),
    ("invalid feature", False, "no node has the features of `constraint`"),
    ("invalid generic resource", False, "the nodes have no such GPUs: change `gpus_per_node`"),
    ("requested time limit is invalid", False, "the block is longer than the partition allows: lower `max_walltime`"),
    ("time limit exceeds", False, "the block is longer than the partition allows: lower `max_walltime`"),
    ("node count specification invalid", False, "the partition does not give that many nodes to a job"),
    ("more processors requested than permitted", False, "no node has so many CPUs: lower `cpus_per_node`"),
    ("memory specification can not be satisfied", False, "no node has so much memory: lower `memory_per_node`"),
    ("requested node configuration is not available", False, "no node of the partition has what a block asks for"),
    ("required node not available", True, "a node of the block has just gone down or been drained"),
    ("requested partition configuration not available", True, "the partition is down or has too few nodes now"),
    ("required partition not available", True, "the partition is down or inactive"),
    ("user's group not permitted", False, "you are not in the group that may use this partition"),
    ("access/permission denied", False, "you have no rights to do this here: ask the site"),
    ("submitjob", True, "you have as many jobs queued as your QOS or account allows"),
    ("accounting/qos policy", False, "a limit of your QOS or account: jobs queued, nodes or walltime"),
    ("unable to contact slurm controller", True, "Slurm's controller is down"),
    ("unable to contact controller", True, "Slurm's controller is down"),
    ("connection refused", True, "Slurm's controller is down"),
    ("socket timed out", True, "Slurm's controller is slow; the job may have been taken nevertheless"),
    ("zero bytes were transmitted", True, "the connection to Slurm's controller broke"),
    ("temporarily unable to accept job", True, "Slurm's queue is full"),
    ("resource temporarily unavailable", True, "Slurm's queue is full"),
    ("protocol authentication error", True, "Slurm does not accept this machine's credentials (munge)"),
    ("slurm_persist_conn", True, "Slurm's database is down"),
    ("slurmdbd", True, "Slurm's database is down"),
    ("unable to open file", False, "the batch script cannot be read"),
    ("command not found", False, "sbatch is not on PATH: run this on a login node"),
)


def explain_complaint(complaint: str) -> Refusal:
    """Say in plain English why sbatch did not take a job; an unknown complaint is not passing."""
    words = " ".join(complaint.split())
    for part, passing, sentence in _COMPLAINTS:
        if part in words.lower():
            return Refusal(f"{sentence} (Slurm: {words})", passing)
    return Refusal(f"sbatch refused the job{': ' + words if words else ' without a word'}", passing=False)
