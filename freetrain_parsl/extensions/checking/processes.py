"""Forks the processes of a check, and ends them: none is left, whatever happens."""

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
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from freetrain_parsl.extensions.checking.member import run_variant
from freetrain_parsl.extensions.checking.records import CRASHED, ProcessRecord
from freetrain_parsl.extensions.checking.sources import is_users_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from freetrain_parsl.extensions.checking.member import Call
    from freetrain_parsl.extensions.checking.records import Variant

__all__ = ["Processes"]

_POLL = 0.005
_DUMPED_WITHIN = 1.0  # seconds for a process that hangs to write where it is
_PR_SET_PDEATHSIG = 1
_PLACE = re.compile(r'File "(.*?)", line (\d+)')


class Processes:
    """Runs groups of processes, one after another.

    Forked from this process, which has imported torch and the user's module: a process costs 0.05 s, not seconds.

    Parameters
    ----------
    call
        What they run.
    scratch
        A private directory.
    """

    def __init__(self, call: Call, scratch: Path) -> None:
        self._call = call
        self._scratch = scratch

    def directory(self) -> Path:
        """Return a new directory for the processes of a group, or of several after another."""
        return Path(tempfile.mkdtemp(dir=self._scratch))

    def run(self, variants: Sequence[Variant], limit: float, directory: Path | None = None) -> list[ProcessRecord]:
        """Run processes together, each at most `limit` seconds; return what they have recorded.

        Parameters
        ----------
        variants
            One for each process.
        limit
            Seconds.
        directory
            Of the group; ``None``: a new one.
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
