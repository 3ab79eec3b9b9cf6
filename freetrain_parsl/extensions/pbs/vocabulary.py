"""Tables of PBS terms and their meanings: states, holds, comments, exit codes, error messages of qsub.

The terms are from PBS's documentation and the messages of OpenPBS 23.06; `docs/howto/run-on-pbs.md` lists those that
were seen on a real system.
"""

from __future__ import annotations

import re

from freetrain_parsl.windows.base import BlockState, BlockStatus, Refusal

__all__ = [
    "HOLDS_NODES",
    "WAITS",
    "describe_end",
    "describe_hold",
    "explain_comment",
    "explain_complaint",
    "unusable_reason",
]

HOLDS_NODES = frozenset("RE")
"""Job states in which a job holds nodes: running, exiting."""

WAITS = frozenset("QHWTSU")
"""Job states in which a job will need nodes: queued, held, waiting for its time, in transit, suspended."""

_NODE_STATES = {
    "down": "down",
    "initializing": "starting up",
    "maintenance": "in maintenance",
    "offline": "taken offline",
    "offline_by_mom": "taken offline by a health check",
    "powered-off": "switched off",
    "powering-down": "being switched off",
    "powering-on": "being switched on",
    "provisioning": "being provisioned",
    "sleep": "asleep",
    "stale": "stale: PBS receives no updates from it",
    "state-unknown": "in an unknown state",
    "unresolvable": "not resolvable by name",
    "wait-provisioning": "waiting to be provisioned",
}


def unusable_reason(states: str, comment: str) -> str:
    """Explain why no job can start on a node; empty if one can.

    Parameters
    ----------
    states
        Its state, separated by commas.
    comment
        Comment of an administrator or a health check.
    """
    words = [word.strip().lower() for word in states.split(",")]
    reasons = [_NODE_STATES[word] for word in words if word in _NODE_STATES]
    if not reasons:
        return ""
    return ", ".join(reasons) + (f": {comment}" if comment else "")


_HOLDS = {
    "u": "by its user (release it with qrls)",
    "o": "by an operator",
    "s": "by the system",
    "p": "because of a wrong password",
}


def describe_hold(holds: str, comment: str) -> str:
    """Explain a hold; `holds` is the job's ``Hold_Types``, such as ``u`` or ``so``."""
    by = [words for letter, words in _HOLDS.items() if letter in holds]
    text = f"is held {' and '.join(by)}" if by else "is held"
    return f"{text}: {comment}" if comment else text


# Comment of a pending job -> whether it could start if there were nodes, and its meaning. The first match counts.
_COMMENTS = (
    (r"Can Never Run", False, "can never run"),
    (r"[Qq]ueue not started", False, "its queue is stopped"),
    (r"running job limit|job limit|running limit", False, "its user, group or queue has reached its job limit"),
    (r"limit on resource|limit reached on resource", False, "its user, group or queue has reached its resource limit"),
    (r"[Dd]edicated time", False, "it would overlap the site's dedicated time"),
    (r"primetime", False, "it waits for primetime or non-primetime"),
    (r"zero shares", False, "its user has no share of the machine"),
    (r"job_sort_formula threshold", False, "its priority is below the threshold"),
    (r"strict sorted order", True, "it waits for the jobs before it"),
    (r"conflict with reservation or top job|interfere with", True, "it would delay a reservation or a top job"),
    (r"[Nn]ot enough (free|of the right|total)", True, "not enough free nodes"),
    (r"exclusive node and node is in use", True, "not enough free nodes"),
    (r"Insufficient amount of|No available resources", True, "not enough free resources"),
    (r"preempt enough", True, "not enough free nodes, and not enough jobs that it can preempt"),
    (r"placement set|psets", True, "not enough free nodes in one placement set"),
)


def explain_comment(comment: str) -> tuple[bool, str]:
    """Return whether a queued job could start if there were nodes, and the meaning of the scheduler's comment.

    An unknown comment counts as waiting for nodes, which is the conservative assumption about other users' jobs.
    """
    for pattern, eligible, meaning in _COMMENTS:
        if re.search(pattern, comment):
            return eligible, meaning
    return True, comment


_WALLTIME_OVER = -29
_EXIT_CODES = {
    -1: (BlockState.FAILED, "could not be started"),
    -2: (BlockState.FAILED, "could not be started"),
    -3: (BlockState.FAILED, "could not be started; PBS would retry"),
    -4: (BlockState.NODE_FAILED, "was aborted when PBS on its first node was restarted"),
    -5: (BlockState.NODE_FAILED, "was aborted when PBS on its first node was restarted"),
    -6: (BlockState.NODE_FAILED, "was aborted when PBS on its first node was restarted"),
    -10: (BlockState.FAILED, "its user is unknown on the node"),
    -11: (BlockState.PREEMPTED, "was requeued"),
    -12: (BlockState.PREEMPTED, "was checkpointed and ended"),
    -14: (BlockState.NODE_FAILED, "one of its nodes failed"),
    -16: (BlockState.FAILED, "a hook of the site rejected it"),
    -17: (BlockState.FAILED, "a hook of the site ended it"),
    -18: (BlockState.PREEMPTED, "a hook of the site requeued it"),
    -19: (BlockState.CANCELLED, "a hook of the site deleted it"),
    -20: (BlockState.NODE_FAILED, "its first node failed"),
    -22: (BlockState.FAILED, "a hook of the site failed"),
    -24: (BlockState.FAILED, "used more CPUs than requested"),
    -25: (BlockState.FAILED, "used more CPUs than requested"),
    -26: (BlockState.FAILED, "used more virtual memory than requested"),
    -27: (BlockState.FAILED, "ran out of memory: request more memory per node"),
    -28: (BlockState.FAILED, "used more CPU time than requested"),
    _WALLTIME_OVER: (BlockState.TIMED_OUT, ""),
    -30: (BlockState.NODE_FAILED, "its nodes could not join"),
}
_TERMINATED, _SIGTERM, _SIGKILL = 91, 15, 9
_LATE = 2.0  # seconds before the end of the walltime that still count as the end


def describe_end(
    exit_status: int | None, substate: int, comment: str, ran: float | None, walltime: float | None
) -> BlockStatus:
    """Determine how a job ended.

    The exit status of a killed job does not depend on the reason (256 + the signal, or 128 + the signal from its
    shell): the comment shows who deleted it, the run time shows whether its walltime was over, and otherwise it was
    preempted.

    Parameters
    ----------
    exit_status
        ``None`` if it never ran.
    substate
        91 deleted, 92 finished, 93 failed.
    comment
        Comment of the server.
    ran, walltime
        Run time and walltime, seconds, if known.
    """
    deleted = re.search(r"terminated by (\S+)", comment)
    if exit_status is None:
        reason = f"was deleted by {deleted[1]} before it started" if deleted else "was deleted before it started"
        return BlockStatus(BlockState.CANCELLED, reason=reason)
    if exit_status in _EXIT_CODES:
        state, reason = _EXIT_CODES[exit_status]
        return BlockStatus(state, reason=reason)
    signal = exit_status - 256 if exit_status > 256 else exit_status - 128 if exit_status > 128 else 0
    if signal in (_SIGTERM, _SIGKILL):
        if deleted:
            return BlockStatus(BlockState.CANCELLED, reason=f"was deleted by {deleted[1]}")
        if ran is not None and walltime is not None and ran >= walltime - _LATE:
            return BlockStatus(BlockState.TIMED_OUT)
        if re.search(r"[Pp]reempt", comment):
            return BlockStatus(BlockState.PREEMPTED, reason=comment)
        if substate == _TERMINATED:
            return BlockStatus(BlockState.CANCELLED, reason="was deleted")
        return BlockStatus(BlockState.PREEMPTED, reason="was killed before its walltime; PBS does not report by whom")
    if exit_status == 0:
        return BlockStatus(BlockState.COMPLETED)
    how = f"was killed by signal {signal}" if signal else f"its batch script ended with exit code {exit_status}"
    return BlockStatus(BlockState.FAILED, reason=how)


_ANSWER_LOST = "the PBS server did not respond in time; the job may have been accepted nevertheless"

# Output of qsub -> plain English with the remedy, and whether it is transient. The first match counts.
_COMPLAINTS = (
    (r"[Uu]nknown queue", "unknown queue; `qstat -Q` lists them", False),
    (r"[Qq]ueue is not enabled", "the queue currently accepts no jobs", True),
    (r"Access to queue is denied", "this user may not use the queue; ask the site or use another one", False),
    (r"Unauthorized Request", "this user is not authorised; check queue, account and permissions", False),
    (r"Invalid Account|account.*(not valid|invalid)", "the account is not valid; give the provider one that is", False),
    (r"Maximum number of jobs|limit .*(queued|jobs)", "this user has reached the site's limit of queued jobs", True),
    (r"would exceed|exceeds? .*limit", "it would exceed a limit of the queue or of this user", True),
    (
        r"violates queue and/or server resource limits",
        "the queue's limits do not allow a job of these nodes and walltime; `qstat -Qf` shows them",
        False,
    ),
    (
        r"rejected by all possible destinations",
        "no destination of this routing queue accepts such a job; `qstat -Qf` shows why",
        False,
    ),
    (r"Unknown resource|invalid in .select", "it requests a resource that this site does not have", False),
    (r"Illegal attribute or resource value", "PBS does not accept a value in the batch script", False),
    (r"Cannot have .max_walltime. without", "max_walltime requires min_walltime", False),
    (r"Bad (UID|GID)", "this user cannot run jobs here", False),
    (r"[Ii]nvalid credential|Expired credential", "the credentials are invalid or expired; log in again", False),
    (r"cannot connect to server|Connection refused|errno=15010|errno=111", "the PBS server cannot be reached", True),
    (r"Server shutting down|Request not allowed", "the PBS server is shutting down", True),
    (r"[Cc]onnection table full|No free connections", "the PBS server is overloaded", True),
    (r"temporarily unavailable", "the PBS server did not respond in time", True),
    (r"Timed? ?out|errno=15096|End of File", _ANSWER_LOST, True),
)


def explain_complaint(complaint: str) -> Refusal:
    """Explain in plain English why ``qsub`` rejected a job; unknown messages are quoted and count as permanent."""
    complaint = "; ".join(filter(None, map(str.strip, complaint.splitlines()))) or "no reason given"
    for pattern, meaning, passing in _COMPLAINTS:
        if re.search(pattern, complaint):
            return Refusal(f"{meaning} (qsub: {complaint})", passing, uncertain=meaning is _ANSWER_LOST)
    return Refusal(f"qsub: {complaint}", passing=False)
