"""The live page: how fast it opens, what it costs the browser, and what its viewers cost the driver.

Use ``--json FILE`` to save the rows, ``--quick`` for a small run. Needs Chromium.

The run is synthetic: a day on 1,000 nodes with 200 trainings and a survey every 30 s (`_long_run.py`). ``open_seconds``
is the median time from the navigation to the drawn page, with the server running; ``first_open_seconds`` the time from
the start of ``freetrain dashboard``, whose imports and reading of the journal are in it. ``browser_mb`` is what the
page adds to the memory of the browser's process for it (PSS), compared with a page of one word, after all views were
shown; ``heap_mb`` is its JavaScript heap. ``page_kb`` is the size of the page, its script and its style sheet.

``driver_slowdown`` is the ratio of the durations of the driver's turns with and without five viewers. In a turn the
progress of all trainings and some records are written and committed, four times a second. Server and viewers are
stopped (SIGSTOP) and continued every two seconds, because the load of a shared machine changes; the ratio is the median
of those of neighbouring periods. Viewers, server and driver share the machine's cores.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from _long_run import LongRun
from _report import report

from freetrain_parsl.dashboard.application import page_size

sys.path.insert(0, str(Path(__file__).parents[1]))  # the tests' browser

from tests.browser import Browser, find

FREETRAIN = str(Path(sys.executable).with_name("freetrain"))
READY = (
    "document.querySelector('.ft-badge')?.textContent.match(/running|ended/)"
    " && document.querySelector('canvas')?.height > 200"
)
TABS = "document.querySelectorAll('[role=tab]')"
VIEWERS = 5
TURN = 0.25  # seconds between turns of the driver


class Server:
    """``freetrain dashboard`` for a run."""

    def __init__(self, directory: Path) -> None:
        self.process = subprocess.Popen([FREETRAIN, "dashboard", str(directory)], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.address = next(line.strip() for line in self.process.stdout if line.strip().startswith("http://"))

    def close(self) -> None:
        """End it."""
        self.process.terminate()
        self.process.wait()


def open_page(browser: Browser, address: str) -> float:
    """Open the page; return the seconds until it is drawn."""
    begin = time.monotonic()
    browser.open(address, width=1400, height=900)
    while not browser.evaluate(READY):
        if time.monotonic() - begin > 120:
            raise TimeoutError("the page was not drawn within 120 s")
        time.sleep(0.01)
    browser.call("Runtime.evaluate", expression="new Promise(requestAnimationFrame)", awaitPromise=True)
    return time.monotonic() - begin


def memory_of_page(browser: Browser) -> float:
    """Return the memory of the browser's process for the page (PSS), MB, once it has settled."""
    time.sleep(1.0)
    browser.call("HeapProfiler.collectGarbage")
    processes = psutil.Process(browser.process.pid).children(recursive=True)
    renderers = [process for process in processes if "--type=renderer" in process.cmdline()]
    return max(process.memory_full_info().pss for process in renderers) / 1e6


def measure_page(run: Path) -> dict[str, Any]:
    """Measure how the page of a run opens."""
    executable = find()
    if executable is None:
        raise SystemExit("benchmarks/dashboard.py needs Chromium")
    browser = Browser(executable)
    begin = time.monotonic()
    server = Server(run)
    try:
        open_page(browser, server.address)
        first = time.monotonic() - begin
        times = [open_page(browser, server.address) for _ in range(5)]
        browser.close()
        browser = Browser(executable)
        browser.open("data:text/html,<h1>FreeTrain</h1><canvas></canvas>", width=1400, height=900)
        empty = memory_of_page(browser)
        open_page(browser, server.address)
        for tab in range(int(browser.evaluate(f"{TABS}.length"))):
            browser.evaluate(f"{TABS}[{tab}].click()")
            time.sleep(0.3)
        used = memory_of_page(browser)
        heap = browser.call("Runtime.getHeapUsage")["usedSize"] / 1e6
    finally:
        browser.close()
        server.close()
    return {
        "open_seconds": statistics.median(times),
        "first_open_seconds": first,
        "browser_mb": used - empty,
        "heap_mb": heap,
        "page_kb": page_size() / 1000,
    }


def measure_driver(run: Path, journal: Path, pairs: int, *, nodes: int, trainings: int) -> dict[str, Any]:
    """Measure the driver's turns while server and viewers are stopped, and while they run, alternately."""
    seconds = 2.0
    driver = LongRun(journal, nodes=nodes, trainings=trainings, begin=time.time() - 86400)
    driver.advance(3600.0)
    server = Server(run)
    address = server.address.replace("/?", "/events?")
    viewers = [subprocess.Popen(["curl", "-sN", "-o", "/dev/null", address]) for _ in range(VIEWERS)]
    time.sleep(10.0)  # they have the history
    ratios, alone, watched = [], [], []
    for _ in range(pairs):
        pair = []
        for number, found in ((signal.SIGSTOP, alone), (signal.SIGCONT, watched)):
            for process in (server.process, *viewers):
                process.send_signal(number)
            pair.append(statistics.median(_turns(driver, seconds)))
            found.append(pair[-1])
        ratios.append(pair[1] / pair[0])
    for process in viewers:
        process.terminate()
        process.wait()
    server.close()
    driver.journal.close()
    return {
        "turn_ms": 1000 * statistics.median(alone),
        f"turn_ms_{VIEWERS}_viewers": 1000 * statistics.median(watched),
        "driver_slowdown": statistics.median(ratios),
    }


def _turns(driver: LongRun, seconds: float) -> list[float]:
    found = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        begin = time.monotonic()
        driver.report_progress()
        found.append(time.monotonic() - begin)
        time.sleep(max(0.0, begin + TURN - time.monotonic()))
    return found


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="an hour on 100 nodes with 20 trainings")
    parser.add_argument("--json", type=Path, metavar="FILE", help="save the rows")
    arguments = parser.parse_args()
    nodes, trainings, hours, pairs = (100, 20, 1, 3) if arguments.quick else (1000, 200, 24, 25)
    with tempfile.TemporaryDirectory(prefix="ft-dashboard-") as directory:
        os.chmod(directory, 0o700)  # noqa: PTH101 - the run's directory is private
        past, live = Path(directory, "past"), Path(directory, "live")
        for run in (past, live):
            (run / "freetrain").mkdir(parents=True)
        journal = past / "freetrain" / "journal.sqlite"
        writer = LongRun(journal, nodes=nodes, trainings=trainings, begin=time.time() - 3600 * hours)
        writer.advance(3600.0 * hours)
        writer.journal.close()
        row = {"nodes": nodes, "trainings": trainings, "hours": hours}
        row |= measure_page(past)
        row |= measure_driver(live, live / "freetrain" / "journal.sqlite", pairs, nodes=nodes, trainings=trainings)
    report("The live page", [row], ["starlette", "uvicorn"], arguments.json)


if __name__ == "__main__":
    main()
