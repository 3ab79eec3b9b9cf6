"""Running a training in one process: the slot's way into it, and the only one.

The user's function is called once, and goes on while other processes come and go. It ends in one of four ways: it
returns (`Finished`), a step boundary decides to stop (`Paused`: the state is saved, or others have it), peers vanish
and nobody tells how to go on (`PeerFailed`: nothing is saved, the last checkpoint holds), or it raises an error of its
own, which goes through unchanged.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from freetrain_parsl.errors import PeerFailed
from freetrain_parsl.protocol.options import SessionOptions
from freetrain_parsl.protocol.reports import PauseReason, Progress, Report
from freetrain_parsl.training.checkpoints.code_identity import code_of
from freetrain_parsl.training.data import random_streams
from freetrain_parsl.training.group.process_group import gist, is_lost_peer
from freetrain_parsl.training.group.regrouping import GroupMember
from freetrain_parsl.training.mailbox import Clock, ControlMailbox, Finished, Membership, Paused
from freetrain_parsl.training.runtime import Runtime, Unwind
from freetrain_parsl.training.session import TrainingSession
from freetrain_parsl.training.signature import check_signature

if TYPE_CHECKING:  # torch.distributed does not declare it among its exports
    from torch._C._distributed_c10d import Store

    from freetrain_parsl.protocol.options import OnCodeChange

__all__ = [
    "ControlMailbox",
    "Finished",
    "Membership",
    "PauseReason",
    "Paused",
    "Progress",
    "SessionOptions",
    "run_alone",
    "run_fragment",
]

TrainingFunction = Callable[..., Any]
"""Takes a `TrainingSession`, then the user's own arguments."""


def run_fragment(
    function: TrainingFunction,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    options: SessionOptions,
    membership: Membership | None,
    meet: Callable[[Membership], Store],
    mailbox: ControlMailbox,
    report: Callable[[Report], None],
    clock: Clock = time.monotonic,
) -> Finished | Paused:
    """Run a training in this process until it is done or has to leave.

    Parameters
    ----------
    function, args, kwargs
        The user's function, called as ``function(session, *args, **kwargs)``.
    options
        How the training keeps its state; the same on all members.
    membership
        This process's place at first; ``None``: it joins a training that runs, by an order of the `mailbox`.
    meet
        Gives the store in which the members of a membership meet; not called for a group of one.
    mailbox
        What the slot tells while the training runs.
    report
        Gets the progress on the first member (at the start, at checkpoints, at the end, and between them at most
        twice a second), and on all members what happens to their group. It must not block.
    clock
        Seconds on a clock that never goes back.

    Raises
    ------
    PeerFailed
        Other members are gone and the training cannot go on here; what was done since the last checkpoint is lost.
    CheckpointError
        The state cannot be read, or could not be saved at the end of the fragment.
    """
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    runtime = None
    members = GroupMember(membership, meet, mailbox, report)
    try:
        runtime = Runtime(options, members, mailbox, report, clock)
        session = TrainingSession(runtime)
        random_streams.seed_all(options.seed)
        try:
            value = function(session, *args, **(kwargs or {}))
        except Unwind:
            value = None
        if runtime.unwinding is None:
            runtime.finish()
        runtime.close()
        if runtime.unwinding is PauseReason.LEFT:
            return Paused(PauseReason.LEFT, runtime.progress())
        checkpoint = runtime.checkpoint_manager.newest.path if runtime.checkpoint_manager.newest else None
        if runtime.unwinding is None:
            return Finished(value, runtime.progress(), checkpoint)
        return Paused(runtime.unwinding, runtime.progress(), checkpoint)
    except Exception as error:
        if members.group.size > 1 and is_lost_peer(error) and not isinstance(error, PeerFailed):
            raise PeerFailed(
                f"trainer {options.name!r}: lost a member of a group of {members.group.size} ({gist(error)})"
            ) from error
        raise
    finally:
        if runtime is not None:
            runtime.close()
        members.leave()


def run_alone(
    function: TrainingFunction,
    *args: Any,
    directory: Path | None = None,
    seed: int = 0,
    on_code_change: OnCodeChange = "refuse",
    **kwargs: Any,
) -> Any:
    """Run a training function to its end in this process, without Parsl: to try it out or to debug it.

    Parameters
    ----------
    function, args, kwargs
        Called as ``function(session, *args, **kwargs)``.
    directory
        Where its checkpoints go; a second call goes on from them. ``None``: they are thrown away.
    seed
        Start of every random number.
    on_code_change
        What to do if the checkpoints were written by other code: ``"refuse"``, ``"resume"`` or ``"restart"``.

    Returns
    -------
    value
        What the function returned.

    Raises
    ------
    InvalidTrainer
        The function has no parameter for the session.
    """
    check_signature(function)
    with tempfile.TemporaryDirectory(prefix="freetrain-") as scratch:
        end = run_fragment(
            function,
            args,
            kwargs,
            options=SessionOptions(
                "alone", directory or Path(scratch), seed=seed, code=code_of(function), on_code_change=on_code_change
            ),
            membership=Membership("alone"),
            meet=_nobody_to_meet,
            mailbox=ControlMailbox(),
            report=lambda _progress: None,
        )
    assert isinstance(end, Finished)  # nobody has the notice to pause it with
    return end.value


def _nobody_to_meet(membership: Membership) -> Store:
    raise ValueError(f"{membership.trainer} is alone")
