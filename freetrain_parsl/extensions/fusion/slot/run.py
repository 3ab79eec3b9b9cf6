"""Running the training jobs of an array in one process."""

from __future__ import annotations

import math
import time
from collections import deque
from functools import partial
from typing import TYPE_CHECKING

import torch
from greenlet import GreenletExit

from freetrain_parsl.extensions.fusion.engine.engine import FusionEngine
from freetrain_parsl.extensions.fusion.engine.lockstep import Lockstep
from freetrain_parsl.extensions.fusion.engine.memory import freed_memory_kept
from freetrain_parsl.extensions.fusion.forward.shared_base import FROZEN
from freetrain_parsl.extensions.fusion.slot.member import MemberExtension
from freetrain_parsl.protocol.reports import PauseReason
from freetrain_parsl.training.fragment import train
from freetrain_parsl.training.group.regrouping import GroupMember
from freetrain_parsl.training.mailbox import Membership, Paused
from freetrain_parsl.training.runtime import Runtime

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch._C._distributed_c10d import Store

    from freetrain_parsl.extensions.fusion.slot.array_mailbox import ArrayMailbox, Member
    from freetrain_parsl.extensions.fusion.slot.sizing import ArraySizing
    from freetrain_parsl.protocol.reports import Report
    from freetrain_parsl.training.mailbox import Clock, ControlMailbox, Finished

__all__ = ["run_members"]


def run_members(
    members: Sequence[Member],
    mailbox: ArrayMailbox,
    *,
    report: Callable[[str, Report], None],
    ended: Callable[[str, Finished | Paused | BaseException], None],
    sizing: ArraySizing | None = None,
    resized: Callable[[ArraySizing], None] = lambda _sizing: None,
    refused: Callable[[str, bool], None] = lambda _reason, _passing: None,
    shared: Callable[[int], None] = lambda _size: None,
    turn: Callable[[str], None] = lambda _name: None,
    clock: Clock = time.monotonic,
) -> FusionEngine:
    """Run training jobs in lockstep until all have ended or have been paused.

    Parameters
    ----------
    members
        The first training jobs; those with the same model structure are fused.
    mailbox
        Further training jobs, and requests to pause some or all of them.
    report
        Receives the name of a member and its report.
    ended
        Receives the name of a member and how it ended, at once: an exception if it failed.
    sizing
        Decides how many members train at a time; the others follow as these end. ``None``: all at once.
    resized
        Called when the sizing has changed the number of members, or decided.
    refused
        Called with the reason when the members cannot be fused, and with whether others that are alike may be.
    shared
        Called with the bytes of the frozen base that is in memory once for all members.
    turn
        Called with the name of the member whose function runs next.
    clock
        Monotonic clock, in seconds.

    Returns
    -------
    engine
        The engine, with what it has counted.
    """

    def fill(leaving: int = 0) -> None:
        """Start members while there is room."""
        waiting.extend(mailbox.take())
        if not waiting or mailbox.pausing:
            return
        for member in [each for each in waiting if mailbox.of(each.options.name).pause_requested.is_set()]:
            waiting.remove(member)
            mailbox.forget(member.options.name)
            ended(member.options.name, Paused(PauseReason.LEFT))
        room = math.inf if sizing is None else sizing.size
        while waiting and len(lockstep.strands) - leaving < room:
            member = waiting.popleft()
            lockstep.add(member.options.name, partial(run, member))

    def on_resized() -> None:
        if sizing is not None:
            resized(sizing)
        fill()

    lockstep = Lockstep(turn)
    engine = FusionEngine(lockstep, sizing, resized=on_resized, stepped=fill, refused=refused, shared=shared)
    waiting = deque(members)

    def run(member: Member) -> None:
        name = member.options.name
        try:
            end = _run(member, engine, mailbox.of(name), lambda each: report(name, each), clock)
        except GreenletExit:  # the array itself has failed
            raise
        except BaseException as error:  # noqa: BLE001 - of one member, KeyboardInterrupt, too: the others continue
            ended(name, error)
        else:
            ended(name, end)
        mailbox.forget(name)
        fill(leaving=1)

    fill()
    with freed_memory_kept(), engine.active():
        lockstep.run()
    FROZEN.purge()
    return engine


def _run(
    member: Member,
    engine: FusionEngine,
    mailbox: ControlMailbox,
    report: Callable[[Report], None],
    clock: Clock,
) -> Finished | Paused:
    options = member.options
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    function, args, kwargs = member.load()
    group = GroupMember(Membership(options.name), _nobody_to_meet, mailbox, report)
    extension = MemberExtension(engine, options.name)
    runtime = Runtime(options, group, mailbox, report, clock, member.recorder, extension)
    try:
        return train(runtime, function, args, kwargs)
    finally:
        runtime.close()


def _nobody_to_meet(membership: Membership) -> Store:
    raise ValueError(f"{membership.trainer} is the only process of its group")
