"""The node's side: ask the server for a process that runs this node's program, and stand for it until it ends.

Started as ``python -m freetrain_parsl.extensions.demo.warm_start.client COMMAND …``; without a server, it becomes the
command, which is the pilot's.
"""

from __future__ import annotations

import array
import ctypes
import json
import os
import re
import resource
import signal
import socket
import struct
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from freetrain_parsl.cluster.processes import MARK
from freetrain_parsl.extensions.demo.warm_start import ADDRESS
from freetrain_parsl.interpreters import module_in
from freetrain_parsl.location import PACKAGE

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["ENTERED", "LENGTH", "circumstances", "enter_namespaces", "open_namespaces", "run_forked"]

LENGTH: Final = struct.Struct("!I")
"""Precedes the request, which is JSON; the standard streams and the namespaces are sent with it."""

ENTERED: Final = ("net", "uts", "ipc", "mnt")
"""Linux namespaces that a process without threads can change, if it may administer them."""

_FIXED: Final = ("cgroup", "pid", "user")
"""Kinds that a process keeps, or must not change: its parent has to be in the same."""

_PATIENCE: Final = 60.0  # seconds until the server's answer; it may still be importing
_LOST: Final = 128 + signal.SIGKILL  # exit code of a process that ended without one, as a shell would report

# Variables that interpreter and libraries read when they are loaded. What PYTHONPATH changes is sent. scikit-learn sets
# two of OpenMP's when it is imported, in the environment of all later child processes; they do not concern results.
# Lightning sets one of PyTorch's, which is read whenever GPUs are counted.
_READ_AT_IMPORT: Final = re.compile(
    r"PYTHON(?!PATH$)|LD_|LANG|LC_|TZ|MALLOC_|OMP_|KMP_(?!DUPLICATE_LIB_OK$|INIT_AT_FORK$)|GOMP_|MKL_|OPENBLAS_"
    r"|NUMEXPR_|DNNL_|ONEDNN_|TORCH|PYTORCH_(?!NVML_BASED_CUDA_CHECK$)|ATEN_|CUDA_|NVIDIA_|HIP_|HSA_|ROC|ZE_|NCCL_"
    r"|GLOO_"
)


def circumstances() -> dict[str, Any]:
    """Describe what a forked process has from its parent and cannot change: only a server in the same may fork it."""
    return {
        # Not its name: `python` and `python3` of an environment are one file, which is in "files".
        "executable": [str(Path(sys.executable).parent), sys.prefix, sys.version],
        "flags": [str(sys.flags), *sys.warnoptions],
        "variables": {name: value for name, value in sorted(os.environ.items()) if _READ_AT_IMPORT.match(name)},
        "namespaces": [str(Path("/proc/self/ns", kind).readlink()) for kind in _FIXED],
        # The file system may be mounted differently; what has been imported must be the same.
        "files": [[found.st_dev, found.st_ino] for found in map(os.stat, _imported_from())],
        "identity": [os.getresuid(), os.getresgid(), sorted(os.getgroups())],
        "processors": sorted(os.sched_getaffinity(0)),
        "niceness": os.nice(0),
        "limits": [
            resource.getrlimit(getattr(resource, name)) for name in sorted(dir(resource)) if name.startswith("RLIMIT_")
        ],
    }


def run_forked(command: list[str]) -> int | None:
    """Let a process of the server run the program of this node, a module in an interpreter like this one.

    Return its exit code; ``None`` if the program must run in this process.
    """
    if ADDRESS not in os.environ or MARK not in os.environ:
        return None  # without a mark, no node of an embedded cluster: a batch system would not find the process
    # Signals to the job reach the process directly. This one ends after it.
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.settimeout(_PATIENCE)
            server.connect(os.environ[ADDRESS])
            _send(server, command, ignored=_ignored(before))
            with server.makefile("rwb") as stream:
                answer = json.loads(stream.readline())
                if "refused" not in answer:
                    server.settimeout(None)
                    stream.write(b"go\n")
                    stream.flush()
                    code = stream.readline()  # when the process ends
                    return int(code) if code else _LOST
        reason = answer["refused"]
    except (OSError, ValueError) as error:
        reason = repr(error)
    sys.stderr.write(f"freetrain: this node starts without the warm start server: {reason}\n")
    for number, handler in before.items():
        signal.signal(number, handler)
    return None


def _imported_from() -> list[str]:
    return ["/", os.path.realpath(sys.executable), sys.prefix, sys.base_prefix, str(PACKAGE)]


def _send(server: socket.socket, command: list[str], *, ignored: list[int]) -> None:
    option = next(number for number, word in enumerate(command) if word in ("-c", "-m"))  # after the interpreter's own
    _module, arguments = module_in(command[option - 1 :])
    mask = os.umask(0o077)
    os.umask(mask)
    request = {
        "circumstances": circumstances(),
        "argv": command,
        "arguments": arguments,
        "environment": dict(os.environ),
        "directory": os.getcwd(),  # noqa: PTH109 - a plain string
        "path": sys.path,
        "umask": mask,
        "ignored": ignored,
    }
    payload = json.dumps(request).encode()
    opened = open_namespaces()
    passed = array.array("i", [0, 1, 2, *opened])
    server.sendmsg([LENGTH.pack(len(payload))], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, passed)])
    for descriptor in opened:
        os.close(descriptor)
    server.sendall(payload)


def _ignored(before: dict[signal.Signals, Any]) -> list[int]:
    """Return the signals that this process ignored when it started."""
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()} | before
    return [int(number) for number, handler in handlers.items() if handler is signal.SIG_IGN]


def open_namespaces() -> list[int]:
    """Open the namespaces that another process would have to enter to be where this one is."""
    return [os.open(f"/proc/self/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC) for kind in ENTERED]


def enter_namespaces(namespaces: Sequence[int]) -> None:
    """Enter the namespaces of these descriptors; no effect for those that this process is in already.

    Raises
    ------
    OSError
        This process must not: it is neither root, nor has it the capability.
    """
    own = [Path("/proc/self/ns", kind).stat() for kind in ENTERED]
    library = ctypes.CDLL(None, use_errno=True)  # os.setns is in Python since 3.12
    for kind, descriptor, here in zip(ENTERED, namespaces, own, strict=True):
        there = os.fstat(descriptor)
        if (there.st_dev, there.st_ino) != (here.st_dev, here.st_ino) and library.setns(descriptor, 0):
            raise OSError(ctypes.get_errno(), f"{os.strerror(ctypes.get_errno())}: the {kind} namespace of the node")


def _run(command: list[str]) -> int:
    code = run_forked(command)
    if code is None:
        os.execvp(command[0], command)  # noqa: S606 - the command that it was given
    return code


if __name__ == "__main__":
    sys.exit(_run(sys.argv[1:]))
