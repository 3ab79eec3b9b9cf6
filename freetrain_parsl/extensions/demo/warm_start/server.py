"""The server: ``python -m freetrain_parsl.extensions.demo.warm_start.server DESCRIPTOR ROOM``, started by `owner`.

A request names a node's program, environment, directory and standard streams. The server forks, and the forked process
becomes that program: it leaves the server's session, enters the node's namespaces, and replaces everything that it has
inherited and that a new interpreter would have from its parent, down to the command line and environment that other
processes see in ``/proc``: the cluster finds the processes of a node by these. It cannot replace what the libraries
read when they were imported, so the server refuses a node whose `client.circumstances` differ from its own.

It ends when its standard input is closed, with its owner; processes that it has forked continue.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import pkgutil
import platform
import selectors
import signal
import socket
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from freetrain_parsl.cluster import processes
from freetrain_parsl.executor.htex.worker_pool import WARM_IMPORTS
from freetrain_parsl.executor.slot import pilot
from freetrain_parsl.extensions.demo.warm_start import forked
from freetrain_parsl.extensions.demo.warm_start.client import ENTERED, LENGTH, circumstances, enter_namespaces

if TYPE_CHECKING:
    from collections.abc import Callable

_SECONDS: Final = 5.0  # for a client to send its request, or to confirm the answer
_REAP: Final = 1.0  # seconds between looks for processes that have ended
_STREAMS: Final = 3
_PASSED: Final = _STREAMS + len(ENTERED)  # descriptors


def main(descriptor: int) -> None:
    """Serve until the owner is gone; in a forked process, run the node's program."""
    processes.adopt_orphans()  # of the nodes, whose ancestor this process is
    own = _plain(circumstances())  # before the imports
    with socket.socket(fileno=descriptor) as listener:
        before = dict(os.environ)
        for module in ("torch._dynamo", WARM_IMPORTS):  # nodes that connect meanwhile wait; all share the compiler
            importlib.import_module(module)
        set_by_imports = {name: value for name, value in os.environ.items() if before.get(name) != value}
        program = _serve(listener, own, set_by_imports)
        if program is None:
            _remove_address(Path(listener.getsockname()))
    if program is not None:
        program()


def _remove_address(path: Path) -> None:
    """Remove the socket and its directory, as an owner that was killed could not."""
    with suppress(OSError):  # the owner has
        path.unlink()
        path.parent.rmdir()


def _serve(listener: socket.socket, own: dict[str, Any], set_by_imports: dict[str, str]) -> Callable[[], None] | None:
    """Serve requests; return the program to run in a forked process, ``None`` in the server when the owner is gone."""
    with selectors.DefaultSelector() as selector:
        selector.register(sys.stdin, selectors.EVENT_READ)
        selector.register(listener, selectors.EVENT_READ)
        while True:
            ready = [key.fileobj for key, _ in selector.select(_REAP)]
            processes.reap()
            if sys.stdin in ready:
                return None
            if listener in ready:
                client, _ = listener.accept()
                try:
                    program = _answer(client, own, set_by_imports)
                except Exception as error:  # noqa: BLE001 - whatever it has sent, others are to be served
                    sys.stderr.write(f"freetrain: the warm start server cannot answer: {error!r}\n")
                else:
                    if program is not None:
                        return program
                client.close()


def _answer(client: socket.socket, own: dict[str, Any], set_by_imports: dict[str, str]) -> Callable[[], None] | None:
    client.settimeout(_SECONDS)
    request, passed = _receive(client)
    try:
        theirs = request["circumstances"]
        request["environment"] = set_by_imports | request["environment"]
        for name, value in set_by_imports.items():  # as a driver has them that has imported the same
            if theirs["variables"].get(name) == value != own["variables"].get(name):
                del theirs["variables"][name]
        if theirs != own:
            _tell(client, refused=_difference(theirs, own))
        elif others := _other_modules(request["path"]):
            _tell(client, refused=f"its path has other modules: {', '.join(others)}")
        elif len(forked.environment_block(request["environment"])) > forked.environment_room():
            _tell(client, refused="its environment is too long")
        elif len(passed) != _PASSED:
            _tell(client, refused=f"it has passed {len(passed)} descriptors instead of {_PASSED}")
        elif os.fork() == 0:
            return lambda: _become(client, request, passed)
    finally:
        if os.getpid() == _SERVER:
            _close(passed)
    return None


def _difference(theirs: dict[str, Any], own: dict[str, Any]) -> str:
    what = [name for name, value in own.items() if theirs.get(name) != value]
    variables = {name for name, _ in own["variables"].items() ^ theirs["variables"].items()}
    return f"different {', '.join(what)} {' '.join(sorted(variables))}"


def _other_modules(path: list[str]) -> list[str]:
    """Return the modules that this process has imported, or would at its start, and a program with this path may not.

    Only directories that are not in the path of this process are searched.
    """
    imported = {name.partition(".")[0] for name in sys.modules} | {"sitecustomize", "usercustomize"}
    others = pkgutil.iter_modules([entry for entry in path if entry not in sys.path])
    return sorted({module.name for module in others} & imported)


def _receive(client: socket.socket) -> tuple[dict[str, Any], list[int]]:
    head, passed, _, _ = socket.recv_fds(client, LENGTH.size, _PASSED)
    try:
        with client.makefile("rb") as stream:
            request: dict[str, Any] = json.loads(stream.read(*LENGTH.unpack(head)))
    except BaseException:
        _close(passed)
        raise
    return request, passed


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _tell(client: socket.socket, **answer: object) -> None:
    client.sendall(json.dumps(answer).encode() + b"\n")


def _plain(value: dict[str, Any]) -> dict[str, Any]:
    """Return a value as the client's arrives: JSON knows no tuples."""
    plain: dict[str, Any] = json.loads(json.dumps(value))
    return plain


# -- in the forked process -----------------------------------------------------------------------------------


def _become(client: socket.socket, request: dict[str, Any], passed: list[int]) -> None:
    """Become the program of the node, run it, and tell the client its exit code."""
    os.setsid()
    try:
        enter_namespaces(passed[_STREAMS:])
    except OSError as error:
        _tell(client, refused=error.strerror)
        return
    for number, stream in enumerate(passed[:_STREAMS]):
        os.dup2(stream, number)
    _close(passed)
    for number in signal.valid_signals():
        if number in request["ignored"]:
            signal.signal(number, signal.SIG_IGN)
        elif signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    os.chdir(request["directory"])
    os.umask(request["umask"])
    forked.set_environment(request["environment"])
    forked.set_command_line(request["argv"])
    sys.argv[1:] = request["arguments"]
    sys.path[:] = request["path"]
    _forget()
    _tell(client, pid=os.getpid())
    if client.recv(3) != b"go\n":
        return  # the node has started without us
    client.settimeout(None)
    pilot.start_pool = forked.PoolStarter(client).start  # type: ignore[assignment]  # as much of it as the pilot uses
    code = pilot.main(request["arguments"])
    client.sendall(b"%d\n" % code)
    sys.stderr.flush()
    os._exit(code)  # at once: to take the imports down lasts a second, for which the node would be held


def _forget() -> None:
    """Drop what an interpreter determines once and keeps."""
    import numpy as np

    time.tzset()
    platform._uname_cache = None  # type: ignore[attr-defined]  # noqa: SLF001 - the name of this host; no other way before 3.14
    tempfile.tempdir = None
    multiprocessing.current_process().authkey = os.urandom(32)
    np.random.seed()  # noqa: NPY002 - the global one, which a new interpreter would seed; `random` does it itself


_SERVER: Final = os.getpid()

if __name__ == "__main__":
    main(int(sys.argv[1]))
