"""One process of a check: runs the function as a member of a group, alone, or twice in an array."""

from __future__ import annotations

import time
import traceback
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch._C._distributed_c10d import FileStore  # torch.distributed does not export it

from freetrain_parsl.errors import FreeTrainError
from freetrain_parsl.extensions.checking.recorder import NAME, TrainingRecorder
from freetrain_parsl.extensions.checking.sources import is_users_file
from freetrain_parsl.extensions.checking.values import flat, hide
from freetrain_parsl.extensions.fusion.slot.array_mailbox import ArrayMailbox, Member
from freetrain_parsl.extensions.fusion.slot.run import run_members
from freetrain_parsl.protocol.options import SessionOptions
from freetrain_parsl.training.fragment import run_fragment
from freetrain_parsl.training.mailbox import ControlMailbox, Finished, Membership, Regroup

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from torch._C._distributed_c10d import Store

    from freetrain_parsl.extensions.checking.records import ProcessRecord, Variant
    from freetrain_parsl.protocol.reports import Report

__all__ = ["Call", "run_variant"]

_LOCAL = "lo"
_NEVER = timedelta(days=1)
_NEVER_TOGETHER = "its model is not called as a whole, as model(x), or its gradients cannot be computed together"


@dataclass(frozen=True)
class Call:
    """What is checked: called as ``function(session, *args, **kwargs)``."""

    function: Callable[..., Any]
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    epochs: int | None = None
    """Default number of epochs of ``session.epochs()``."""


def run_variant(call: Call, variant: Variant, directory: Path) -> ProcessRecord:
    """Run the function in this process, which ends with it: settings of torch are not restored.

    Parameters
    ----------
    call
        The function.
    variant
        How this process runs.
    directory
        Of the processes of this group: for checkpoints, and where they meet.
    """
    began = time.monotonic()
    torch.set_num_threads(1)
    hide(str(directory))
    if variant.double:
        torch.set_default_dtype(torch.float64)
    record = (_run_array if variant.fused else _run_member)(call, variant, directory)
    record.seconds = time.monotonic() - began
    return record


def _run_member(call: Call, variant: Variant, directory: Path) -> ProcessRecord:
    mailbox = ControlMailbox()
    membership: Membership | None = Membership(NAME, 1, variant.rank, variant.size, interface=_LOCAL)
    if variant.joins:
        membership = None
        mailbox.post(Regroup(Membership(NAME, 2, 1, 2, interface=_LOCAL)))

    def meet(of: Membership) -> Store:  # in a file: nothing listens for whoever else uses this host
        return FileStore(str(directory / f"meeting-{of.generation}"), -1)

    changes = variant.joins or variant.grow_at is not None
    recorder = TrainingRecorder(
        variant, call.function, mailbox, FileStore(str(directory / "ready"), -1) if changes else None
    )
    try:
        end = run_fragment(
            call.function,
            call.args,
            call.kwargs,
            options=_options(call, directory),
            membership=membership,
            meet=meet,
            mailbox=mailbox,
            report=recorder.take_report,
            recorder=recorder,
        )
    except BaseException as error:  # noqa: BLE001 - whatever the function raises, SystemExit too, is a result
        recorder.say_ready()
        _note_failure(recorder.record, error)
    else:
        _note_end(recorder, end)
    return recorder.record


def _run_array(call: Call, variant: Variant, directory: Path) -> ProcessRecord:
    """Run two members with the same arguments; return what the first has recorded."""
    recorders = [TrainingRecorder(variant, call.function, ControlMailbox()) for _ in range(2)]
    names = [f"{NAME}-{number}" for number in range(len(recorders))]
    reasons: list[str] = []

    def ended(name: str, end: object) -> None:
        if isinstance(end, BaseException):
            _note_failure(recorders[names.index(name)].record, end)
        else:
            _note_end(recorders[names.index(name)], end)

    def report(_name: str, news: Report) -> None:
        if reason := getattr(news, "not_fused", ""):
            reasons.append(reason)

    members = [
        Member(_options(call, directory, name), lambda: (call.function, call.args, call.kwargs), recorder)
        for name, recorder in zip(names, recorders, strict=True)
    ]
    engine = run_members(members, ArrayMailbox(), report=report, ended=ended, refused=reasons.append)
    record = recorders[0].record
    if not record.error:
        record.failed(recorders[1].record.error, recorders[1].record.trace, refused=recorders[1].record.refused)
    if not engine.fused_steps:
        record.notes.append(reasons[0] if reasons else engine.reason or _NEVER_TOGETHER)
    return record


def _options(call: Call, directory: Path, name: str = NAME) -> SessionOptions:
    return SessionOptions(name, directory, seed=call.seed, checkpoint_interval=_NEVER, epochs=call.epochs)


def _note_end(recorder: TrainingRecorder, end: object) -> None:
    record, training = recorder.record, recorder.training
    if isinstance(end, Finished):
        record.returned = flat(end.value, "the returned value")
    if training is not None:
        record.metrics = flat(training.state.training_metrics.metrics, "session.metrics")
        audit = training.state.training_metrics.audit
        record.seen, record.lost = audit.samples_seen, audit.samples_lost


def _note_failure(record: ProcessRecord, error: BaseException) -> None:
    lines = [f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)]
    lines = [line for line in lines if is_users_file(line.rpartition(":")[0])]
    text = str(error).strip()
    message = f"{type(error).__name__}: {text}" if text else type(error).__name__
    record.failed(message, lines[-1] if lines else "", refused=isinstance(error, FreeTrainError))
