"""The processes of a check: what one runs, how they are forked, and that none is left, whatever happens."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import os
import pickle
import re
import signal
import tempfile
import time
import traceback
import warnings
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch._C._distributed_c10d import FileStore, ProcessGroup  # torch.distributed does not export it

from freetrain_parsl.errors import FreeTrainError
from freetrain_parsl.extensions.checking.recorder import NAME, TrainingRecorder
from freetrain_parsl.extensions.checking.records import CRASHED, ProcessRecord
from freetrain_parsl.extensions.checking.sources import is_users_file
from freetrain_parsl.extensions.checking.values import flat, hide
from freetrain_parsl.extensions.fusion.slot.array_mailbox import ArrayMailbox, Member
from freetrain_parsl.extensions.fusion.slot.run import run_members
from freetrain_parsl.protocol.options import SessionOptions
from freetrain_parsl.training.extension import count_refused
from freetrain_parsl.training.fragment import run_fragment
from freetrain_parsl.training.mailbox import ControlMailbox, Finished, Membership, Regroup

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch._C._distributed_c10d import Store

    from freetrain_parsl.extensions.checking.records import Variant
    from freetrain_parsl.protocol.reports import Report

__all__ = ["Call", "Processes", "run_variant"]

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

    The directory is that of the processes of this group: for checkpoints, and where they meet.
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
    engine = run_members(
        members, ArrayMailbox(), report=report, ended=ended, refused=lambda reason, _passing: reasons.append(reason)
    )
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
    record.count = count_refused(error)


_POLL = 0.005
_DUMPED_WITHIN = 1.0  # seconds for a process that hangs to write where it is
_PR_SET_PDEATHSIG = 1
_PLACE = re.compile(r'File "(.*?)", line (\d+)')


class Processes:
    """Runs groups of processes, one after another.

    Forked from this process, which has imported torch and the user's module: a process costs 0.05 s, not seconds.
    """

    def __init__(self, call: Call, scratch: Path) -> None:
        self._call = call
        self._scratch = scratch
        self._groups = _process_groups()

    def directory(self) -> Path:
        """Return a new directory for the processes of a group, or of several after another."""
        return Path(tempfile.mkdtemp(dir=self._scratch))

    def run(self, variants: Sequence[Variant], limit: float, directory: Path | None = None) -> list[ProcessRecord]:
        """Run processes together, each at most `limit` seconds; return what they have recorded.

        The directory is that of the group; ``None``: a new one.
        """
        directory = directory or self.directory()
        outputs = [Path(tempfile.mkdtemp(dir=self._scratch)) for _ in variants]
        gc.freeze()  # otherwise the first collection in each process copies all pages
        running: dict[int, Path] = {}
        codes: dict[Path, int] = {}
        try:
            for variant, output in zip(variants, outputs, strict=True):
                running[_fork(self._call, variant, directory, output)] = output
            _await(running, codes, time.monotonic() + limit)
            for pid, output in running.items():
                _ask_where(pid, output)
        finally:
            gc.unfreeze()
            for pid in running:
                _kill(pid)
        return [_result(variant, output, codes.get(output)) for variant, output in zip(variants, outputs, strict=True)]


def _process_groups() -> list[object]:
    """Return this process's process groups, also left ones: a fork that drops one would wait for threads it lacks."""
    names = ""
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            names += (thread / "comm").read_text()
    if "gloo" not in names:
        return []
    holders = gc.get_objects()
    plain = (one for holder in list(holders) for one in gc.get_referents(holder) if type(one) in (dict, tuple))
    holders += [one for one in plain if not gc.is_tracked(one)]
    return [one for holder in holders for one in gc.get_referents(holder) if ProcessGroup in type(one).__mro__]


def _fork(call: Call, variant: Variant, directory: Path, output: Path) -> int:
    parent = os.getpid()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads: libraries may have started some
        pid = os.fork()
    if pid:
        with contextlib.suppress(OSError):  # it has done so itself, or has ended
            os.setpgid(pid, pid)
        return pid
    try:
        os.setpgid(0, 0)  # with the workers of its loader: they are ended together
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it has just been killed
            os._exit(1)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(null, descriptor)
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        warnings.simplefilter("ignore")  # nobody sees them, and as errors they would end the function
        with (output / "where").open("w") as where:
            faulthandler.enable(where)  # members that expect different messages abort in gloo
            faulthandler.register(signal.SIGUSR1, file=where)  # written at once, also while it waits in gloo
            record = run_variant(call, variant, directory)
        (output / "part").write_bytes(pickle.dumps(record))
        (output / "part").rename(output / "record")
    finally:
        os._exit(0)  # whatever it raised: there is no record


def _await(running: dict[int, Path], codes: dict[Path, int], deadline: float) -> None:
    """Wait until processes have ended; those are no longer `running`, but have exit codes."""
    while running and time.monotonic() < deadline:
        for pid in list(running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                _kill_group(pid)  # what it has started
                codes[running.pop(pid)] = os.waitstatus_to_exitcode(status)
        time.sleep(_POLL)


def _ask_where(pid: int, output: Path) -> None:
    """Let a process that hangs write where it is."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGUSR1)
    deadline = time.monotonic() + _DUMPED_WITHIN
    while time.monotonic() < deadline and not _text(output / "where"):
        time.sleep(_POLL)


def _kill(pid: int) -> None:
    _kill_group(pid)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # all have ended; or it has no group yet
        os.killpg(pid, signal.SIGKILL)


def _result(variant: Variant, output: Path, code: int | None) -> ProcessRecord:
    """Return the record of a process, or how it ended without one; `code` is ``None`` if it was killed here."""
    if (output / "record").exists():
        record: ProcessRecord = pickle.loads((output / "record").read_bytes())  # noqa: S301 - from a private directory
        return record
    record = ProcessRecord(variant, hangs=code is None)
    where = next(_users_lines(_text(output / "where")), "")
    if code is None:
        record.failed("it did not end", where)
    elif code < 0:
        record.failed(f"{CRASHED} {signal.Signals(-code).name}", where)
    else:
        record.failed(f"its process ended with exit code {code}", where)
    return record


def _users_lines(dumped: str) -> Iterator[str]:
    for file, line in _PLACE.findall(dumped):
        if is_users_file(file):
            yield f"{file}:{line}"


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
