"""HTEX's interchange, ending whenever the driver ends, for whatever reason.

Parsl's own interchange prints a traceback on Ctrl-C, and outlives a driver that is killed. Started as
``python -m freetrain_parsl.executor.htex.interchange``.
"""

from __future__ import annotations

import os
import signal
import threading
import time

from freetrain_parsl.executor.control.doorkeeper import raise_descriptor_limit
from freetrain_parsl.executor.htex.steady import run_steadily


def _end_with(parent: int, period: float = 1.0) -> None:
    while os.getppid() == parent:
        time.sleep(period)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    os.umask(0o077)  # keep its log private
    raise_descriptor_limit()  # workers connect to it, and so can any other process
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the driver, which shuts this process down
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    run_steadily("parsl.executors.high_throughput.interchange")
