"""Processes that are forked instead of started, and look like those started: by others in ``/proc``, and to Python."""

from __future__ import annotations

import ctypes
import multiprocessing.util
import os
import runpy
import sys
import threading
from multiprocessing import forkserver
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

from freetrain_parsl.interpreters import module_in

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["PoolStarter", "environment_block", "environment_room", "set_command_line", "set_environment"]


# -- what others see in /proc --------------------------------------------------------------------------------
# The kernel shows the memory in which it passed command line and environment to this program. The owner starts the
# server with a long argument and a long variable, so that there is room for others.

_ARGUMENTS: Final = slice(45, 47)  # fields of /proc/PID/stat after the name: addresses of begin and end
_ENVIRONMENT: Final = slice(47, 49)


def environment_block(environment: Mapping[str, str]) -> bytes:
    """Return an environment as the kernel keeps it."""
    return b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in environment.items())


def environment_room() -> int:
    """Return how long an environment block of this process, and those forked from it, can be."""
    begin, end = _memory(_ENVIRONMENT)
    return end - begin - 1


def set_environment(environment: Mapping[str, str]) -> None:
    """Replace the environment of this process."""
    os.environ.clear()  # no pointer into the old memory is left
    os.environ.update(environment)
    _overwrite(_ENVIRONMENT, environment_block(environment))


def set_command_line(arguments: Sequence[str]) -> None:
    """Set what `ps` shows as the command of this process; what does not fit is cut off."""
    _overwrite(_ARGUMENTS, b"".join(os.fsencode(argument) + b"\0" for argument in arguments))


def _memory(which: slice) -> tuple[int, int]:
    stat = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace")
    begin, end = map(int, stat[stat.rindex(")") + 2 :].split()[which])
    return begin, end


def _overwrite(which: slice, data: bytes) -> None:
    begin, end = _memory(which)
    data = data[: end - begin - 1]  # a missing zero at the end has a meaning for the kernel
    ctypes.memset(begin, 0, end - begin)
    ctypes.memmove(begin, data, len(data))


# -- the processes of a node ---------------------------------------------------------------------------------


class PoolStarter:
    """Starts the worker pool for the pilot: in a process that is forked.

    The client, the connection to the node's program, belongs to the pilot alone.
    """

    def __init__(self, client: socket.socket) -> None:
        self._client = client

    def start(self, command: list[str], environment: Mapping[str, str], prepare: Callable[[], None]) -> _Child:
        """Fork a process that runs the module of a `module_command`."""
        pid = os.fork()
        if pid:
            return _Child(pid)
        self._client.close()
        prepare()
        set_environment(environment)
        set_command_line(command)
        multiprocessing.util.spawnv_passfds = _fork_interpreter  # type: ignore[assignment]
        module, sys.argv[1:] = module_in(command)
        sys.modules.pop(module, None)  # else runpy warns
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        sys.exit()  # unwinds the stack of the pilot, and ends as an interpreter does


class _Child:
    """A forked process, with as much of `subprocess.Popen` as the pilot uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self._wait(os.WNOHANG)

    def wait(self) -> int:
        code = self._wait(0)
        assert code is not None
        return code

    def _wait(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


_spawn: Final[Callable[..., int]] = multiprocessing.util.spawnv_passfds


def _fork_interpreter(path: bytes, arguments: Sequence[Any], descriptors: Sequence[int]) -> int:
    """Fork what multiprocessing starts as ``PYTHON -c SCRIPT``: its fork server and its resource tracker."""
    if threading.active_count() > 1:  # a later one: the copy would have the locks, but not the threads
        return _spawn(path, arguments, descriptors)
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    try:
        _run_script(arguments, descriptors)
    finally:
        os._exit(1)


def _run_script(arguments: Sequence[Any], descriptors: Sequence[int]) -> NoReturn:
    kept = {0, 1, 2, *descriptors}
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - numbers
        if int(name) not in kept:
            try:
                os.close(int(name))
            except OSError:
                continue  # the one of the listing
    set_command_line([os.fsdecode(argument) for argument in arguments])
    sys.argv = ["-c"]
    # As in a new interpreter: this copy was made while the starter held the lock, and data workers would wait for it.
    forkserver._forkserver.__init__()  # type: ignore[misc]  # noqa: SLF001
    code: Any = 0
    try:
        exec(arguments[-1], {"__name__": "__main__"})  # noqa: S102 - as the interpreter would
    except SystemExit as end:
        code = end.code
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 0 if code is None else 1)
