"""Running the trainings of an array in one process."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from freetrain_parsl.training.fragment import train
from freetrain_parsl.training.fusion.engine import FusionEngine
from freetrain_parsl.training.fusion.lockstep import Lockstep
from freetrain_parsl.training.fusion.member import MemberRuntime
from freetrain_parsl.training.fusion.memory import freed_memory_kept

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from freetrain_parsl.protocol.options import SessionOptions
    from freetrain_parsl.protocol.reports import Report
    from freetrain_parsl.training.fusion.sizing import ArraySizing
    from freetrain_parsl.training.group.regrouping import GroupMember
    from freetrain_parsl.training.mailbox import Clock, ControlMailbox, Finished, Paused

__all__ = ["Member", "run_members"]


@dataclass(frozen=True)
class Member:
    """One training of an array.

    Parameters
    ----------
    function, args, kwargs
        The user's function, called as ``function(session, *args, **kwargs)``.
    options
        Its options.
    """

    function: Callable[..., Any]
    options: SessionOptions
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


def run_members(
    members: Sequence[Member],
    group: GroupMember,
    mailbox: ControlMailbox,
    *,
    report: Callable[[str, Report], None],
    ended: Callable[[str, Finished | Paused | BaseException], None],
    sizing: ArraySizing | None = None,
    clock: Clock = time.monotonic,
) -> FusionEngine:
    """Run trainings in lockstep until all have ended or have been paused.

    Parameters
    ----------
    members
        The trainings; those with the same model structure are fused.
    group, mailbox
        Of the array.
    report
        Receives the name of a member and its report.
    ended
        Receives the name of a member and how it ended, at once: an exception if it failed.
    sizing
        Decides how many members train at a time; the others follow as these end. ``None``: all at once.
    clock
        Monotonic clock, in seconds.

    Returns
    -------
    engine
        The engine, with what it has counted.
    """

    def fill(leaving: int = 0) -> None:
        """Start members while there is room."""
        room = len(members) if sizing is None else sizing.size
        while waiting and len(lockstep.strands) - leaving < room and not mailbox.pause_requested.is_set():
            member = waiting.pop(0)
            lockstep.add(member.options.name, partial(run, member))

    lockstep = Lockstep()
    engine = FusionEngine(lockstep, sizing, fill)
    waiting = list(members)

    def run(member: Member) -> None:
        name = member.options.name
        try:
            end = _run(member, engine, group, mailbox, lambda each: report(name, each), clock)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - of one member: the others go on
            ended(name, error)
        else:
            ended(name, end)
        fill(leaving=1)

    fill()
    with freed_memory_kept():
        lockstep.run()
    return engine


def _run(
    member: Member,
    engine: FusionEngine,
    group: GroupMember,
    mailbox: ControlMailbox,
    report: Callable[[Report], None],
    clock: Clock,
) -> Finished | Paused:
    options = member.options
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    runtime = MemberRuntime(engine, options, group, mailbox, report, clock)
    try:
        return train(runtime, member.function, member.args, member.kwargs)
    finally:
        runtime.close()
