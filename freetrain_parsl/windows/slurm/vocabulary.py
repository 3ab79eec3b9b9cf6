"""Tables of Slurm terms and their meanings: job states, pending reasons, node flags, error messages of sbatch.

Reasons and states are from Slurm's documentation (squeue, "JOB REASON CODES" and "JOB STATE CODES").
"""

from __future__ import annotations

from enum import Enum

from freetrain_parsl.windows.base import BlockState, Refusal

__all__ = ["HOLDS_NODES", "UNUSABLE", "PendingCause", "block_state", "explain_complaint", "explain_reason"]


class PendingCause(Enum):
    """What a pending job waits for."""

    NODES = "nodes: it could start if there were some"
    OTHERS = "something other than nodes that may resolve without intervention"
    CHANGE = "a change of its settings or of the site's: it will not start otherwise"


HOLDS_NODES = frozenset(
    ("RUNNING", "COMPLETING", "CONFIGURING", "RESIZING", "SIGNALING", "STAGE_OUT", "STOPPED", "SUSPENDED")
)
"""Job states in which a job holds nodes."""

_STATES = {
    "BOOT_FAIL": (BlockState.NODE_FAILED, "its nodes did not boot"),
    "CANCELLED": (BlockState.CANCELLED, "was cancelled by its user or an administrator"),
    "COMPLETED": (BlockState.COMPLETED, ""),
    "COMPLETING": (BlockState.RUNNING, "is completing: its processes are being cleaned up"),
    "CONFIGURING": (BlockState.RUNNING, "its nodes are being configured"),
    "DEADLINE": (BlockState.TIMED_OUT, "was terminated at its deadline"),
    "FAILED": (BlockState.FAILED, "its batch script ended with an error"),
    "LAUNCH_FAILED": (BlockState.FAILED, "could not be launched on its nodes"),
    "NODE_FAIL": (BlockState.NODE_FAILED, "one of its nodes failed"),
    "OUT_OF_MEMORY": (BlockState.FAILED, "ran out of memory: request more memory per node"),
    "PENDING": (BlockState.PENDING, ""),
    "PREEMPTED": (BlockState.PREEMPTED, ""),
    "RECONFIG_FAIL": (BlockState.NODE_FAILED, "its nodes could not be reconfigured"),
    "REQUEUED": (BlockState.PENDING, "was requeued"),
    "REQUEUE_FED": (BlockState.PENDING, "was requeued in its federation"),
    "REQUEUE_HOLD": (BlockState.HELD, "was requeued and is held"),
    "RESIZING": (BlockState.RUNNING, "is changing its size"),
    "RESV_DEL_HOLD": (BlockState.HELD, "is held because its reservation was deleted"),
    "REVOKED": (BlockState.CANCELLED, "runs on another cluster of the federation"),
    "RUNNING": (BlockState.RUNNING, ""),
    "SIGNALING": (BlockState.RUNNING, "is being signalled"),
    "SPECIAL_EXIT": (BlockState.HELD, "was requeued because of its exit code and is held"),
    "STAGE_OUT": (BlockState.RUNNING, "is staging its files out"),
    "STOPPED": (BlockState.RUNNING, "is stopped: it holds its nodes, but its processes do not run"),
    "SUSPENDED": (BlockState.RUNNING, "is suspended: its processes do not run"),
    "TIMEOUT": (BlockState.TIMED_OUT, ""),
}


def block_state(word: str) -> tuple[BlockState, str]:
    """Return the meaning of Slurm's term for a job's state, with a phrase if the state alone is not sufficient."""
    return _STATES.get(word, (BlockState.UNKNOWN, f"has Slurm state {word}"))


_REASONS = {
    "": (PendingCause.NODES, ""),
    "None": (PendingCause.NODES, ""),
    "AccountNotAllowed": (PendingCause.CHANGE, "its account may not use this partition"),
    "AssociationJobLimit": (PendingCause.OTHERS, "its account has reached its job limit"),
    "AssociationResourceLimit": (PendingCause.OTHERS, "its account has reached its resource limit"),
    "AssociationTimeLimit": (PendingCause.CHANGE, "its account has used up its time"),
    "BadConstraints": (PendingCause.CHANGE, "no node satisfies its constraints"),
    "BeginTime": (PendingCause.OTHERS, "its earliest begin time has not been reached"),
    "Cleaning": (PendingCause.OTHERS, "it was requeued and its previous run is still being cleaned up"),
    "Dependency": (PendingCause.OTHERS, "it waits for another job"),
    "DependencyNeverSatisfied": (PendingCause.CHANGE, "the job that it waits for has failed"),
    "FrontEndDown": (PendingCause.NODES, "no front end node is up"),
    "InactiveLimit": (PendingCause.CHANGE, "it reached the inactivity limit"),
    "InvalidAccount": (PendingCause.CHANGE, "its account is not valid"),
    "InvalidQOS": (PendingCause.CHANGE, "its QOS is not valid"),
    "JobArrayTaskLimit": (PendingCause.OTHERS, "its array has reached its limit of running tasks"),
    "JobHeldAdmin": (PendingCause.CHANGE, "is held by an administrator"),
    "JobHeldUser": (PendingCause.CHANGE, "is held by its user: release it with scontrol release JOB"),
    "JobHoldMaxRequeue": (PendingCause.CHANGE, "is held because it was requeued too often"),
    "JobLaunchFailure": (PendingCause.CHANGE, "could not be launched: file system problem or invalid program name"),
    "Licenses": (PendingCause.OTHERS, "it waits for a licence"),
    "MaxMemPerLimit": (PendingCause.CHANGE, "it requests more memory than the partition allows"),
    "NodeDown": (PendingCause.NODES, "a node that it needs is down"),
    "Nodes required for job are DOWN": (
        PendingCause.NODES,
        "its nodes are down or reserved for jobs of higher priority",
    ),
    "NonZeroExitCode": (PendingCause.CHANGE, "it ended with an error and was requeued"),
    "PartitionConfig": (PendingCause.CHANGE, "it requests something that the partition does not have"),
    "PartitionDown": (PendingCause.OTHERS, "its partition is down"),
    "PartitionInactive": (PendingCause.OTHERS, "its partition is inactive"),
    "PartitionNodeLimit": (PendingCause.CHANGE, "it requests more or fewer nodes than the partition allows"),
    "PartitionTimeLimit": (PendingCause.CHANGE, "it requests more time than the partition allows"),
    "Priority": (PendingCause.NODES, "jobs of higher priority are pending"),
    "Prolog": (PendingCause.NODES, "its prolog is still running"),
    "QOSJobLimit": (PendingCause.OTHERS, "its QOS has reached its job limit"),
    "QOSNotAllowed": (PendingCause.CHANGE, "its QOS may not be used in this partition"),
    "QOSResourceLimit": (PendingCause.OTHERS, "its QOS has reached its resource limit"),
    "QOSTimeLimit": (PendingCause.CHANGE, "its QOS has used up its time"),
    "QOSUsageThreshold": (PendingCause.OTHERS, "the usage threshold of its QOS is breached"),
    "ReqNodeNotAvail": (PendingCause.NODES, "a node that it needs is down, drained or reserved"),
    "Reservation": (PendingCause.OTHERS, "its reservation has not begun"),
    "ReservationDeleted": (PendingCause.CHANGE, "its reservation was deleted"),
    "Resources": (PendingCause.NODES, "it is next, as soon as enough nodes are free"),
    "SchedDefer": (PendingCause.NODES, "it waits for the next pass of the scheduler"),
    "SystemFailure": (PendingCause.CHANGE, "Slurm, the file system or the network failed"),
}

# There are many limits with systematic names; the first match counts.
_REASON_PARTS = (
    ("requeued held", PendingCause.CHANGE, "could not be launched and is held"),
    ("held state", PendingCause.CHANGE, "was requeued and is held"),
    ("WallDurationPerJob", PendingCause.CHANGE, "it requests more time than a per-job limit of its QOS or account"),
    ("MinutesPerJob", PendingCause.CHANGE, "it requests more than a per-job limit of its QOS or account"),
    ("PerJobLimit", PendingCause.CHANGE, "it requests more than a per-job limit of its QOS or account"),
    ("PerJob", PendingCause.CHANGE, "it requests more than a per-job limit of its QOS or account"),
    ("PerNode", PendingCause.CHANGE, "it requests more than a per-node limit of its QOS or account"),
    ("QOSMin", PendingCause.CHANGE, "it requests less than the minimum of its QOS"),
    ("JobsPerUser", PendingCause.OTHERS, "its user has reached the job limit of the QOS"),
    ("SubmitJob", PendingCause.OTHERS, "its user or account has reached its limit of queued jobs"),
    ("QOSMax", PendingCause.OTHERS, "its user has reached the resource limit of the QOS"),
    ("QOSGrp", PendingCause.OTHERS, "its QOS has reached its resource limit"),
    ("AssocGrp", PendingCause.OTHERS, "its account has reached its resource limit"),
    ("AssocMax", PendingCause.OTHERS, "its account has reached its resource limit"),
    ("BurstBuffer", PendingCause.OTHERS, "it waits for its burst buffer"),
)


def explain_reason(reason: str) -> tuple[PendingCause, str]:
    """Return the meaning of Slurm's reason for a pending job.

    An unknown reason counts as waiting for nodes, which is the conservative assumption about other users' jobs.
    """
    known = _REASONS.get(reason) or _REASONS.get(reason.partition(",")[0])
    if known is not None:
        return known
    for part, waiting, sentence in _REASON_PARTS:
        if part in reason:
            return waiting, f"{sentence} ({reason})"
    return PendingCause.NODES, reason


UNUSABLE = {
    "BLOCKED": "blocked by a job that takes whole racks",
    "DOWN": "down",
    "DRAIN": "drained",
    "DRAINED": "drained",
    "DRAINING": "drained",
    "ERROR": "in an error state",
    "FAIL": "failing",
    "FAILING": "failing",
    "FUTURE": "not built yet",
    "INVALID_REG": "registered with an invalid configuration",
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
"""Node state flags that keep jobs from starting on the node, in plain English."""

# The first part that the message contains, ignoring case, counts.
_COMPLAINTS = (
    ("invalid account or account/partition", False, "this account may not be charged here: set another `account`"),
    ("invalid account", False, "unknown account: set another `account`"),
    ("invalid partition", False, "unknown partition: set another `partition`"),
    ("invalid qos", False, "the QOS does not exist or your account may not use it: set another `qos`"),
    ("invalid feature", False, "no node has the features of `constraint`"),
    ("invalid generic resource", False, "the nodes have no such GPUs: change `gpus_per_node`"),
    ("requested time limit is invalid", False, "the block is longer than the partition allows: lower `max_walltime`"),
    ("time limit exceeds", False, "the block is longer than the partition allows: lower `max_walltime`"),
    ("node count specification invalid", False, "the partition does not allow this number of nodes"),
    ("more processors requested than permitted", False, "no node has this many CPUs: lower `cpus_per_node`"),
    ("memory specification can not be satisfied", False, "no node has this much memory: lower `memory_per_node`"),
    ("requested node configuration is not available", False, "no node of the partition has the requested resources"),
    ("required node not available", True, "a node of the block has just gone down or been drained"),
    ("requested partition configuration not available", True, "the partition is down or has too few nodes now"),
    ("required partition not available", True, "the partition is down or inactive"),
    ("user's group not permitted", False, "you are not in a group that may use this partition"),
    ("access/permission denied", False, "you do not have permission: ask the site"),
    ("submitjob", True, "you have reached the limit of queued jobs of your QOS or account"),
    ("accounting/qos policy", False, "a limit of your QOS or account: jobs queued, nodes or walltime"),
    ("unable to contact slurm controller", True, "Slurm's controller is down"),
    ("unable to contact controller", True, "Slurm's controller is down"),
    ("connection refused", True, "Slurm's controller is down"),
    ("socket timed out", True, "Slurm's controller is slow; the job may have been accepted nevertheless"),
    ("zero bytes were transmitted", True, "the connection to Slurm's controller broke"),
    ("temporarily unable to accept job", True, "Slurm's queue is full"),
    ("resource temporarily unavailable", True, "Slurm's queue is full"),
    ("protocol authentication error", True, "Slurm does not accept this machine's credentials (munge)"),
    ("slurm_persist_conn", True, "Slurm's database is down"),
    ("slurmdbd", True, "Slurm's database is down"),
    ("unable to open file", False, "the batch script cannot be read"),
    ("command not found", False, "sbatch is not on PATH: run this on a login node"),
)


_ANSWER_LOST = ("socket timed out", "zero bytes were transmitted")


def explain_complaint(complaint: str) -> Refusal:
    """Explain in plain English why sbatch rejected a job; unknown messages count as permanent."""
    words = " ".join(complaint.split())
    for part, passing, sentence in _COMPLAINTS:
        if part in words.lower():
            return Refusal(f"{sentence} (Slurm: {words})", passing, uncertain=part in _ANSWER_LOST)
    return Refusal(f"sbatch rejected the job{': ' + words if words else ' without a message'}", passing=False)
