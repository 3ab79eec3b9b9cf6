"""An array's run in a slot: translates the driver's messages for its members, and their reports for the driver.

The main thread is in `ArrayRun.perform`; `ArrayRun.handle` is called by the channel's thread meanwhile.
"""

from __future__ import annotations

import math
import platform
import sys
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from freetrain_parsl.errors import CannotFuse, CheckpointError, TrainingError
from freetrain_parsl.executor.jobs.port import Run
from freetrain_parsl.executor.payloads.payloads import unpack_training
from freetrain_parsl.executor.slot.output import flush_streams
from freetrain_parsl.executor.slot.run_end import (
    deposit,
    end_by,
    print_exception,
    serialize_result,
    serialized_exception,
)
from freetrain_parsl.executor.training_logs import FIRST
from freetrain_parsl.extensions.fusion.messages import (
    AddMember,
    ArraySized,
    BaseShared,
    MemberEnded,
    MemberReport,
    ReleaseMember,
)
from freetrain_parsl.extensions.fusion.slot.array_mailbox import ArrayMailbox, Member
from freetrain_parsl.extensions.fusion.slot.array_sizes import MeasuredSize, read_array_size, write_array_size
from freetrain_parsl.protocol.messages import Output, PauseRun, RunEnded, Values
from freetrain_parsl.protocol.options import digest_of
from freetrain_parsl.protocol.reports import (
    Logged,
    PauseReason,
    Progress,
    RunFailed,
    RunFinished,
    RunPaused,
)
from freetrain_parsl.training.mailbox import Finished, Paused

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from freetrain_parsl.executor.payloads.value_files import ValueFiles
    from freetrain_parsl.extensions.fusion.messages import StartArray
    from freetrain_parsl.extensions.fusion.slot.sizing import ArraySizing
    from freetrain_parsl.protocol.messages import RunMessage, StoreReply, ToDriver
    from freetrain_parsl.protocol.options import SessionOptions
    from freetrain_parsl.protocol.reports import Report, RunEnd

__all__ = ["ArrayRun"]

_MOST_MEMBERS = 1024
_REPORTS_PER_SECOND = 8.0  # of all members
_LONGEST_WAIT = 60.0  # seconds, for the first members
_SMALLEST_BASE = 100_000  # bytes that are worth a line


class ArrayRun(Run):
    """The execution of one `StartArray` command."""

    source = ""
    """Whose output it is before a member has its first turn: nobody's."""

    def __init__(self, command: StartArray, send: Callable[[ToDriver], None], files: ValueFiles | None = None) -> None:
        super().__init__(command, send, files)
        self.mailbox: ArrayMailbox = ArrayMailbox()
        self.fused_steps = 0
        """Number of steps that were made for several members at once, after the end."""
        self._command = command
        self._missing = set(command.members)
        self._members: dict[str, None] = {}  # those that were added, and have not ended
        self._complete = threading.Event()
        self._options: SessionOptions | None = None  # of the first member
        self._sizing: ArraySizing | None = None
        self._too_large = False
        self._base = 0  # bytes that are in memory once for all members, as it has reported
        self._dtype: torch.dtype | None = None  # that the import of the members' modules has set
        self._reported: dict[str, tuple[float, int | None]] = {}  # time and step of the checkpoint

    @property
    def expendable(self) -> bool:
        """Whether no work would be lost if this process ended now."""
        return not self.mailbox.underway

    @property
    def label(self) -> str:
        """What it is, for people and for the other slots of its node: other arrays of its cohort are neighbours."""
        return f"array-{self.number} of {self._training}"

    def end_over_share(self, reason: str) -> list[ToDriver]:
        """Return the reports of the end: its members go on from their checkpoints in arrays of half the size.

        A member that is alone in its array fails: it would need as much again.
        """
        members = list(self._members)
        said: list[ToDriver]
        if len(members) > 1:
            why = f"{self.label}, with {len(members)} members, {reason}"
            said = [
                ArraySized(self._training, self.number, len(members) // 2, fused=True, decided=True, reason=why),
            ]
        else:
            errors = {name: TrainingError(f"training job {name!r} {reason}") for name in members}
            said = [
                MemberEnded(self._training, self.number, name, RunFailed(str(error)), serialized_exception(error))
                for name, error in errors.items()
            ]
        return [*said, RunEnded(self._training, self.number, RunPaused(PauseReason.REQUESTED))]

    def handle(self, message: RunMessage | StoreReply) -> bool:
        """Handle a message from the driver; return false if it is for another run."""
        match message:
            case AddMember(run=self.number):
                self._options = self._options or message.options
                self._members[message.options.name] = None
                self.mailbox.add(Member(message.options, partial(self._load, message.payload)))
                self._missing.discard(message.options.name)
                if not self._missing:
                    self._complete.set()
            case ReleaseMember(run=self.number):
                self.mailbox.release(message.member)
            case PauseRun(run=self.number):
                self.mailbox.end()
                self._complete.set()
            case _:
                return False
        return True

    def close(self) -> None:
        """Wait for nothing more: the driver has failed, or the run is over."""
        self._complete.set()

    def deliver(self, member: str, lines: bytes) -> None:
        """Pass on what a member has printed; what precedes the first member's turn goes where slots print."""
        if member:
            self._send(Output(member, FIRST, lines))
        else:
            sys.stderr.write(lines.decode(errors="replace"))

    # The main thread.

    def _load(self, payload: bytes) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        """Return a member's function with its arguments.

        Its modules are imported with the first member. A default dtype that they set is that of each member.
        """
        import torch

        before = torch.get_default_dtype()
        loaded = unpack_training(payload)
        if torch.get_default_dtype() != before:
            self._dtype = torch.get_default_dtype()
        elif self._dtype is not None:
            torch.set_default_dtype(self._dtype)
        return loaded

    def perform(self) -> RunEnded:
        """Run the array until all members have ended; return the message that reports it."""
        self._complete.wait(_LONGEST_WAIT)
        end: RunEnd = RunPaused(PauseReason.REQUESTED)
        payload = b""
        try:
            self._run()
        except Exception as error:  # noqa: BLE001 - of the engine; the members' own are theirs
            end, payload = end_by(error)
        return RunEnded(self._training, self.number, end, payload)

    def _run(self) -> None:
        from freetrain_parsl.extensions.fusion.engine.memory import memory_limit
        from freetrain_parsl.extensions.fusion.slot.run import run_members
        from freetrain_parsl.extensions.fusion.slot.sizing import ArraySizing

        size = self._command.size
        if size is None and (known := self._known_size()) is not None:
            size = known.size
            self._send_size(size, fused=True, gain=known.gain, gain_size=size, decided=True)
        most = self._command.limit or _MOST_MEMBERS
        self._sizing = ArraySizing(most, size, memory=memory_limit(), turns=self._command.turns)
        engine = run_members(
            (),
            self.mailbox,
            report=self._report,
            ended=self._ended,
            sizing=self._sizing,
            resized=self._resized,
            refused=self._refused,
            shared=self._shared,
            turn=self.attribute,
        )
        self.fused_steps = engine.fused_steps

    def _report(self, member: str, report: Report) -> None:
        if isinstance(report, Logged):
            self._send(Values(member, report.rows))
            return
        if not isinstance(report, Progress):
            return  # of a change of the group, which a member of an array has to itself
        now, checkpoint = time.monotonic(), report.checkpoint_step
        before, known = self._reported.get(member, (-math.inf, None))
        if now - before < len(self._reported) / _REPORTS_PER_SECOND and checkpoint == known:
            return
        self._reported[member] = now, checkpoint
        self._send(MemberReport(self._training, self.number, member, report))

    def _ended(self, member: str, ended: Finished | Paused | BaseException) -> None:
        self._reported.pop(member, None)
        self._members.pop(member, None)
        end: RunEnd
        payload, stored = b"", None
        if isinstance(ended, Finished):
            end = RunFinished(ended.progress)
            try:
                payload, stored = deposit(serialize_result(member, ended.value), self._files)
            except (TrainingError, CheckpointError) as error:
                end, payload = end_by(error)
        elif isinstance(ended, Paused):
            end = RunPaused(ended.reason, ended.progress)
        elif isinstance(ended, CannotFuse):  # it was found too late to go on one by one: from the checkpoints, alone
            end = RunPaused(PauseReason.LEFT)
            self._refused(str(ended))
        elif self._is_too_large(ended):  # it continues from its checkpoint, in a smaller array
            end = RunPaused(PauseReason.LEFT)
        else:
            end, payload = end_by(ended)
            if isinstance(end, RunFailed):
                print_exception(ended)
        if self.output is not None:
            flush_streams()
            self.output.flush()
        self._send(MemberEnded(self._training, self.number, member, end, payload, stored))

    def _is_too_large(self, error: BaseException) -> bool:
        """Return whether an array, and not one of its members, has run out of memory; the next one is half as large.

        Members that train one by one in this process have all their models in memory, too.
        """
        if not _is_out_of_memory(error):
            return False
        members = len(self._members) + 1  # with this one
        if not self._too_large and members > 1:
            self._too_large = True
            reason = f"{members} members need more memory than there is"
            self._send_size(members // 2, fused=True, decided=True, reason=reason)
        return self._too_large

    def _resized(self, sizing: ArraySizing) -> None:
        self._send_size(sizing.size, sizing.fused, sizing.gain, sizing.gain_size, sizing.decided, turns=sizing.turns)
        if sizing.decided and sizing.fused and self._options is not None:
            write_array_size(self._options.checkpoint_root, self._key(), MeasuredSize(sizing.size, sizing.gain))

    def _shared(self, size: int) -> None:
        if size != self._base and max(size, self._base) >= _SMALLEST_BASE:
            self._base = size
            self._send(BaseShared(self._training, self.number, size))

    def _known_size(self) -> MeasuredSize | None:
        """Return the size that an earlier array of this function has found on such a device."""
        return None if self._options is None else read_array_size(self._options.checkpoint_root, self._key())

    def _key(self) -> str:
        import torch

        assert self._options is not None
        device = f"{platform.machine()} with {torch.get_num_threads()} threads"
        if torch.cuda.is_available():
            device = torch.cuda.get_device_name()
        code = self._options.code
        return digest_of(["" if code is None else code.identity, device])  # whatever the arguments of its members

    def _send_size(self, size: int, *details: Any, **more: Any) -> None:
        self._send(ArraySized(self._training, self.number, size, *details, **more))

    def _refused(self, reason: str, passing: bool = False) -> None:  # noqa: FBT001, FBT002 - of a callback
        sizing = self._sizing
        measured = (False, sizing.gain, sizing.gain_size) if sizing is not None else ()
        self._send_size(1, *measured, decided=True, reason=reason, passing=passing)


def _is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error is that of a device, or of the host if its memory is limited."""
    import torch

    of_host = isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)  # torch has no class for it
    return of_host or isinstance(error, (torch.OutOfMemoryError, MemoryError))
