"""PBS's own words and what they mean: states, holds, comments, exit codes, complaints of qsub. Tables only.

The words are those of PBS's documentation and of OpenPBS 23.06's messages; `docs/howto/run-on-pbs.md` says which of
them were seen on a real one.
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
"""Job states in which a job is going to need nodes: queued, held, waiting for its time, in transit, suspended."""

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
    "stale": "stale: PBS does not hear of it any more",
    "state-unknown": "in an unknown state",
    "unresolvable": "not resolvable by name",
    "wait-provisioning": "waiting to be provisioned",
}


def unusable_reason(states: str, comment: str) -> str:
    """Say why nothing new starts on a node; nothing if something may.

    Parameters
    ----------
    states
        Its state, words with commas between.
    comment
        What an administrator or a health check wrote.
    """
    words = [word.strip().lower() for word in states.split(",")]
    reasons = [_NODE_STATES[word] for word in words if word in _NODE_STATES]
    if not reasons:
        return ""
    return ", ".join(reasons) + (f": {comment}" if comment else "")


_HOLDS = {
    "u": "by its user (qrls lets it go)",
    "o": "by an operator",
    "s": "by the system",
    "p": "because of a wrong password",
}


def describe_hold(holds: str, comment: str) -> str:
    """Say who holds a job; `holds` is its ``Hold_Types``, such as ``u`` or ``so``."""
    by = [words for letter, words in _HOLDS.items() if letter in holds]
    text = f"is held {' and '.join(by)}" if by else "is held"
    return f"{text}: {comment}" if comment else text


# Comment of a waiting job -> whether it could start if there were nodes, and what it means. The first that fits counts.
_COMMENTS = (
    (r"Can Never Run", False, "can never run"),
    (r"[Qq]ueue not started", False, "its queue is stopped"),
    (r"running job limit|job limit|running limit", False, "its user, group or queue runs as many jobs as it may"),
    (r"limit on resource|limit reached on resource", False, "its user, group or queue uses as much as it may"),
    (r"[Dd]edicated time", False, "it would run into the site's dedicated time"),
    (r"primetime", False, "it waits for another part of the day"),
    (r"zero shares", False, "its user has no share of the machine"),
    (r"job_sort_formula threshold", False, "its priority is too low to be looked at"),
    (r"strict sorted order", True, "it waits for the jobs before it"),
    (r"conflict with reservation or top job|interfere with", True, "it would delay a reservation or the next job"),
    (r"[Nn]ot enough (free|of the right|total)", True, "not enough free nodes"),
    (r"exclusive node and node is in use", True, "not enough free nodes"),
    (r"Insufficient amount of|No available resources", True, "not enough free resources"),
    (r"preempt enough", True, "not enough free nodes, and not enough work that it may drive out"),
    (r"placement set|psets", True, "not enough free nodes next to each other"),
)


def explain_comment(comment: str) -> tuple[bool, str]:
    """Tell whether a queued job could start if there were nodes, by the scheduler's comment, and what it says.

    A comment that is not known counts as waiting for nodes: that is the careful assumption about jobs of others.
    """
    for pattern, eligible, meaning in _COMMENTS:
        if re.search(pattern, comment):
            return eligible, meaning
    return True, comment


_WALLTIME_OVER = -29
_EXIT_CODES = {
    -1: (BlockState.FAILED, "could not be started"),
    -2: (BlockState.FAILED, "could not be started"),
    -3: (BlockState.FAILED, "could not be started; PBS would try again"),
    -4: (BlockState.NODE_FAILED, "was ended when PBS on its first node was restarted"),
    -5: (BlockState.NODE_FAILED, "was ended when PBS on its first node was restarted"),
    -6: (BlockState.NODE_FAILED, "was ended when PBS on its first node was restarted"),
    -10: (BlockState.FAILED, "its user is not known on the node"),
    -11: (BlockState.PREEMPTED, "was put back into the queue"),
    -12: (BlockState.PREEMPTED, "was checkpointed and ended"),
    -14: (BlockState.NODE_FAILED, "lost one of its nodes"),
    -16: (BlockState.FAILED, "a hook of the site sent it back"),
    -17: (BlockState.FAILED, "a hook of the site ended it"),
    -18: (BlockState.PREEMPTED, "a hook of the site put it back into the queue"),
    -19: (BlockState.CANCELLED, "a hook of the site deleted it"),
    -20: (BlockState.NODE_FAILED, "its first node was lost"),
    -22: (BlockState.FAILED, "a hook of the site failed"),
    -24: (BlockState.FAILED, "used more CPUs than it asked for"),
    -25: (BlockState.FAILED, "used more CPUs than it asked for"),
    -26: (BlockState.FAILED, "used more virtual memory than it asked for"),
    -27: (BlockState.FAILED, "ran out of memory: ask for more memory per node"),
    -28: (BlockState.FAILED, "used more CPU time than it asked for"),
    _WALLTIME_OVER: (BlockState.TIMED_OUT, ""),
    -30: (BlockState.NODE_FAILED, "its nodes could not join"),
}
_TERMINATED, _SIGTERM, _SIGKILL = 91, 15, 9
_LATE = 2.0  # seconds before the end of the walltime that still count as the end


def describe_end(
    exit_status: int | None, substate: int, comment: str, ran: float | None, walltime: float | None
) -> BlockStatus:
    """Tell what became of a job that has finished.

    Killed by a signal looks the same for all reasons (256 + the signal, or the 128 + the signal of its shell); the
    comment tells who deleted it, the time that it ran whether its walltime was over, and what is left is preemption.

    Parameters
    ----------
    exit_status
        ``None`` if it never ran.
    substate
        91 was deleted, 92 finished, 93 failed.
    comment
        The server's.
    ran, walltime
        How long it ran and might have, seconds, if known.
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
        return BlockStatus(BlockState.PREEMPTED, reason="was killed before its time, PBS does not say by whom")
    if exit_status == 0:
        return BlockStatus(BlockState.COMPLETED)
    how = f"was killed by signal {signal}" if signal else f"its batch script ended with exit code {exit_status}"
    return BlockStatus(BlockState.FAILED, reason=how)


# What qsub prints -> plain English with the remedy, and whether it passes. The first that fits counts.
_COMPLAINTS = (
    (r"[Uu]nknown queue", "there is no such queue; `qstat -Q` lists them", False),
    (r"[Qq]ueue is not enabled", "the queue takes no jobs at present", True),
    (r"Access to queue is denied", "this user may not use the queue; ask the site or name another", False),
    (r"Unauthorized Request", "this user may not do that; check queue, account and rights", False),
    (r"Invalid Account|account.*(not valid|invalid)", "the account is not valid; give the provider one that is", False),
    (r"Maximum number of jobs|limit .*(queued|jobs)", "this user has as many jobs queued as the site allows", True),
    (r"would exceed|exceeds? .*limit", "it would exceed a limit of the queue or of this user", True),
    (
        r"violates queue and/or server resource limits",
        "the queue's limits do not allow a job of these nodes and walltime; `qstat -Qf` shows them",
        False,
    ),
    (
        r"rejected by all possible destinations",
        "no queue behind this one takes such a job; `qstat -Qf` shows why",
        False,
    ),
    (r"Unknown resource|invalid in .select", "it asks for a resource that this site does not have", False),
    (r"Illegal attribute or resource value", "a value in the batch script is not one that PBS takes", False),
    (r"Cannot have .max_walltime. without", "max_walltime needs a min_walltime", False),
    (r"Bad (UID|GID)", "this user cannot run jobs here", False),
    (r"[Ii]nvalid credential|Expired credential", "the credentials are not valid (any more); log in again", False),
    (r"cannot connect to server|Connection refused|errno=15010|errno=111", "the PBS server cannot be reached", True),
    (r"Server shutting down|Request not allowed", "the PBS server is shutting down", True),
    (r"[Cc]onnection table full|No free connections", "the PBS server is overloaded", True),
    (r"temporarily unavailable|Timed? ?out|errno=15096|End of File", "the PBS server did not answer in time", True),
)


def explain_complaint(complaint: str) -> Refusal:
    """Say in plain English why ``qsub`` took no job; what is not known is given as it is and counts as lasting."""
    complaint = "; ".join(filter(None, map(str.strip, complaint.splitlines()))) or "no reason given"
    for pattern, meaning, passing in _COMPLAINTS:
        if re.search(pattern, complaint):
            return Refusal(f"{meaning} (qsub: {complaint})", passing)
    return Refusal(f"qsub: {complaint}", passing=False)
