"""HTEX's interchange, ending whenever the driver ends, for whatever reason.

Parsl's own interchange prints a traceback on Ctrl-C, outlives a driver that is killed, and ignores a worker pool whose
previous connection is still open. Started as ``python -m freetrain_parsl.executor.htex.interchange``.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import TYPE_CHECKING

import zmq

from freetrain_parsl.executor.driver.doorkeeper import raise_descriptor_limit
from freetrain_parsl.executor.htex.worker_pool import import_lean_parsl, run_steadily

if TYPE_CHECKING:
    from parsl.curvezmq import ServerContext


def _end_with(parent: int, period: float = 1.0) -> None:
    while os.getppid() == parent:
        time.sleep(period)
    os.kill(os.getpid(), signal.SIGTERM)


def _accept_reconnections() -> None:
    """Let a new connection replace an open one of the same name, whose peer would otherwise wait forever.

    A worker pool connects to find out which address works, closes this connection, and connects again under the same
    name. A busy interchange may not yet have seen the first one end; neither has it after a broken network link.
    """
    import_lean_parsl()
    from parsl.curvezmq import ServerContext

    make = ServerContext.socket

    def socket(self: ServerContext, socket_type: int, *args: object, **options: object) -> zmq.Socket[bytes]:
        made: zmq.Socket[bytes] = make(self, socket_type, *args, **options)
        if socket_type == zmq.ROUTER:
            made.setsockopt(zmq.ROUTER_HANDOVER, 1)
        return made

    ServerContext.socket = socket  # type: ignore[method-assign]


if __name__ == "__main__":
    os.umask(0o077)  # keep its log private
    raise_descriptor_limit()  # workers connect to it, and so can any other process
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the driver, which shuts this process down
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    _accept_reconnections()
    run_steadily("parsl.executors.high_throughput.interchange")
