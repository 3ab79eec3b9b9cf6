"""Running a training job in one process: the entry point for slots.

The user's function is called once and continues while other processes join and leave. It ends in one of four ways: it
returns (`Finished`), it is stopped at a step boundary (`Paused`: the state is saved, or other members have it), peers
fail and no command to continue arrives (`PeerFailed`: nothing is saved, the last checkpoint remains), or it raises an
error, which is passed on unchanged.
"""

from __future__ import annotations

import os
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from freetrain_parsl.errors import PeerFailed, UsageError
from freetrain_parsl.protocol.options import SessionOptions
from freetrain_parsl.protocol.reports import PauseReason, Progress, Report
from freetrain_parsl.training.checkpoints.code.code_identity import code_of
from freetrain_parsl.training.data import random_streams
from freetrain_parsl.training.group.failures import gist, is_lost_peer
from freetrain_parsl.training.group.regrouping import GroupMember
from freetrain_parsl.training.mailbox import Clock, ControlMailbox, Finished, Membership, Paused
from freetrain_parsl.training.runtime import Runtime, Unwind
from freetrain_parsl.training.session import TrainingSession
from freetrain_parsl.training.signature import check_signature
from freetrain_parsl.training.step.elastic_batch import BatchChooser

if TYPE_CHECKING:  # torch.distributed does not export it
    from torch._C._distributed_c10d import Store

    from freetrain_parsl.protocol.options import OnCodeChange
    from freetrain_parsl.training.node_memory import NodeMemory
    from freetrain_parsl.training.recorder import Recorder

__all__ = [
    "ControlMailbox",
    "Finished",
    "Membership",
    "PauseReason",
    "Paused",
    "Progress",
    "SessionOptions",
    "run_fragment",
    "run_local",
]

_OWN_GROUP = "torch.distributed using env:// rendezvous"  # in torch's error if the environment names no other process

TrainingFunction = Callable[..., Any]
"""Takes a `TrainingSession`, then the user's arguments."""


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
    recorder: Recorder | None = None,
    memory: NodeMemory | None = None,
    next_size: int | None = None,
) -> Finished | Paused:
    """Run a training job in this process until it is done or this process has to leave.

    Parameters
    ----------
    function, args, kwargs
        The user's function, called as ``function(session, *args, **kwargs)``.
    options
        Options of the training job; the same on all members.
    membership
        This process's initial membership; ``None``: it joins a running training job, by a command in the `mailbox`.
    meet
        Returns the store in which the members of a group meet; not called for a group of one.
    mailbox
        Commands of the slot while the training job runs.
    report
        Receives the progress on the first member (at the start, at checkpoints, at the end, and in between at most
        twice a second), and on all members the changes of their group. It must not block.
    clock
        Monotonic clock, in seconds.
    recorder
        Sees what happens, in a check of the function.
    memory
        Keeps copies of a sharded state beyond the end of this process; ``None``: there are none.
    next_size
        For a process that joins: how many members its replica is going to have, as far as it is known.

    Raises
    ------
    PeerFailed
        Other members have failed and the training job cannot continue here; the work since the last checkpoint is lost.
    CheckpointError
        The state cannot be loaded, or could not be saved at the end of the fragment.
    """
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    runtime = None
    members = GroupMember(membership, meet, mailbox, report, next_size)
    try:
        runtime = Runtime(options, members, mailbox, report, clock, recorder, memory=memory)
        ended = train(runtime, function, args, kwargs or {})
    except Exception as error:
        step = 0 if runtime is None else runtime.state.training_metrics.step
        if isinstance(error, PeerFailed):
            error.step = step
            raise
        if members.group.size > 1 and is_lost_peer(error):
            lost = PeerFailed(
                f"training job {options.name!r}: a member of a group of {members.group.size} failed ({gist(error)})"
            )
            lost.step = step
            raise lost from error
        if memory is not None:
            memory.empty()
        raise
    else:
        if memory is not None:  # the state is saved, or others have it
            memory.empty()
        return ended
    finally:
        if runtime is not None:
            runtime.close()
        members.leave()


def train(
    runtime: Runtime, function: TrainingFunction, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Finished | Paused:
    """Call the user's function with a session, and close its runtime unless it raises an exception."""
    session = TrainingSession(runtime)
    random_streams.seed_exactly(runtime.options.seed)  # what a plain script has after torch.manual_seed(seed)
    try:
        value = _call(function, session, args, kwargs)
    except Unwind:
        value = None
    except Exception as error:
        runtime.reporter.send_rows()  # those since the last report would be lost: the training job has failed
        if runtime.without_batches and isinstance(error, (NameError, ZeroDivisionError)):
            raise UsageError(
                f"{error}, in the code after the batches of epoch {runtime.state.cursor.epoch}: this process resumed "
                "or joined after its last batch, so that its loop over the batches had none; keep what that code "
                "needs of the batches in session.state, or take it from session.metrics"
            ) from error
        raise
    if runtime.unwinding is None:
        runtime.finish()
    runtime.close()
    if runtime.unwinding is PauseReason.LEFT:
        return Paused(PauseReason.LEFT, runtime.reporter.progress())
    checkpoint = runtime.checkpoint_manager.newest.path if runtime.checkpoint_manager.newest else None
    if runtime.unwinding is None:
        return Finished(value, runtime.reporter.progress(), checkpoint)
    return Paused(runtime.unwinding, runtime.reporter.progress(), checkpoint)


def _call(function: TrainingFunction, session: TrainingSession, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call the user's function; a process that it has forked and that leaves it ends here: it is no member."""
    process = os.getpid()
    try:
        value = function(session, *args, **kwargs)
    except BaseException as error:
        if os.getpid() == process:
            if _OWN_GROUP in str(error):
                raise UsageError(
                    "the training function lets torch.distributed connect processes (fully_shard without mesh=, "
                    "init_device_mesh, init_process_group), which the session does: write fully_shard(…, "
                    "mesh=session.mesh), and leave the others out"
                ) from error
            raise
        if isinstance(error, SystemExit):
            os._exit(error.code if isinstance(error.code, int) else int(error.code is not None))
        traceback.print_exception(error)
        os._exit(1)
    if os.getpid() != process:
        os._exit(0)
    return value


def run_local(
    function: TrainingFunction,
    *args: Any,
    directory: Path | None = None,
    seed: int = 0,
    on_code_change: OnCodeChange = "refuse",
    **kwargs: Any,
) -> Any:
    """Run a training function to its end in this process, without Parsl, for testing or debugging.

    Parameters
    ----------
    function, args, kwargs
        Called as ``function(session, *args, **kwargs)``; a training app stands for its function.
    directory
        Checkpoint directory; a second call resumes from it. ``None``: checkpoints are discarded.
    seed
        Seed of all random numbers.
    on_code_change
        What to do if the checkpoints were written by other code: ``"refuse"``, ``"resume"`` or ``"restart"``.

    Returns
    -------
    value
        Return value of the function.

    Raises
    ------
    InvalidApp
        The function has no parameter for the session.
    """
    stage = getattr(function, "stage", None) if hasattr(function, "training_function") else None
    function = getattr(function, "training_function", function)
    check_signature(function)
    mailbox = ControlMailbox()
    with tempfile.TemporaryDirectory(prefix="freetrain-") as scratch:
        end = run_fragment(
            function,
            args,
            kwargs,
            options=SessionOptions(
                "alone",
                directory or Path(scratch),
                seed=seed,
                code=code_of(function),
                on_code_change=on_code_change,
                stage=stage,
            ),
            membership=Membership("alone"),
            meet=_nobody_to_meet,
            mailbox=mailbox,
            report=BatchChooser(mailbox).take,
        )
    assert isinstance(end, Finished)  # nothing can pause it: the mailbox is not shared
    return end.value


def _nobody_to_meet(membership: Membership) -> Store:
    raise ValueError(f"{membership.trainer} is alone")
