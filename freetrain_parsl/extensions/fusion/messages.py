"""The messages between driver and slots about arrays, whose runs train several members of a cohort at once."""

from __future__ import annotations

from dataclasses import dataclass

from freetrain_parsl.protocol.codec import Count, Duration, Name, Text
from freetrain_parsl.protocol.messages import Keys, RunMessage, RunStart, StoredValue, WithFunction
from freetrain_parsl.protocol.reports import Progress, RunEnd

__all__ = [
    "FAILED",
    "AddMember",
    "ArraySized",
    "BaseShared",
    "MemberEnded",
    "MemberReport",
    "ReleaseMember",
    "StartArray",
]

FAILED = "the fused call failed"
"""Beginning of the reason if members are not fused because of an error that may not occur again."""

# ── driver to slot ────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class StartArray(RunStart):
    """Run an array of training jobs in one process; an `AddMember` for each of the first members follows.

    Parameters
    ----------
    members
        Names of the first members.
    limit
        Maximum number of members; ``None``: no limit but the device's memory.
    size
        Number of members that is known to be best; ``None``: it is to be found by timing steps.
    turns
        Why its members step in turns; empty: they are fused.
    """

    members: Keys
    limit: Count | None = None
    size: Count | None = None
    turns: Text = ""


@dataclass(frozen=True)
class AddMember(WithFunction):
    """Train one more training job in an array."""


@dataclass(frozen=True)
class ReleaseMember(RunMessage):
    """A member pauses at its next boundary, after a checkpoint; the others continue."""

    member: Name


# ── slot to driver ────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class MemberReport(RunMessage):
    """The progress of a member of an array."""

    member: Name
    report: Progress


@dataclass(frozen=True)
class MemberEnded(RunMessage):
    """A member has left its array; the others continue. `end`, `payload` and `stored` are as in `RunEnded`."""

    member: Name
    end: RunEnd
    payload: bytes = b""
    stored: StoredValue | None = None


@dataclass(frozen=True)
class ArraySized(RunMessage):
    """An array has timed its steps, or found that its members cannot be fused.

    Parameters
    ----------
    size
        Number of members that it can train now.
    fused
        Whether it fuses them.
    gain
        Steps per second of all members, relative to one by one; 1.0 before fused steps were timed.
    gain_size
        Number of members with which `gain` was measured.
    decided
        Whether the size stays.
    reason
        Why the members are not fused, or, if they are, why they are no more; empty if nothing is known against it.
    passing
        Whether the reason may not hold for others that are alike: it is how these members differ from each other, such
        as in their data.
    turns
        Why the members stay in one process although they are not fused, and step in turns: memory, and this reason not
        to fuse them; empty: they do not.
    """

    size: Count
    fused: bool = False
    gain: Duration = 1.0
    gain_size: Count = 1
    decided: bool = False
    reason: Text = ""
    turns: Text = ""
    passing: bool = False


@dataclass(frozen=True)
class BaseShared(RunMessage):
    """All members of an array have frozen tensors of `size` bytes in common, which are in memory once."""

    size: Count
