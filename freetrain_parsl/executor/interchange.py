"""HTEX's interchange, which ends itself when the driver is gone, however it went.

Parsl's own outlives a driver that is killed. Started as ``python -m freetrain_parsl.executor.interchange``.
"""

from __future__ import annotations

import os
import runpy
import signal
import threading
import time


def _end_with(parent: int, period: float = 1.0) -> None:
    while os.getppid() == parent:
        time.sleep(period)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    runpy.run_module("parsl.executors.high_throughput.interchange", run_name="__main__")
