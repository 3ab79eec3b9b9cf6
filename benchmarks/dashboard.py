"""The live page: how fast it opens, what it costs the browser, and what its viewers cost the driver.

Use ``--json FILE`` to save the rows, ``--quick`` for a small run. Needs Chromium.

The run is synthetic: a day on 1,000 nodes with 200 training jobs and a survey every 30 s (`_long_run.py`).
``open_seconds`` is the median time from the navigation to the drawn page, with the server running;
``first_open_seconds`` the time from the start of ``freetrain dashboard``, whose imports and reading of the journal are
in it. ``browser_mb`` is what the page adds to the memory of the browser's process for it (PSS), compared with a page of
one word, after all views were shown; ``heap_mb`` is its JavaScript heap. ``page_kb`` is the size of the page, its
script and its style sheet.

``driver_slowdown`` is measured with a real campaign on an embedded cluster (`_watched_campaign.py`): the ratio of the
steps per second without and with five viewers. ``turn_slowdown`` is that of the durations of a driver's turns, with the
synthetic run, which is much longer: in a turn the progress of all training jobs and some records are written and
committed, four times a second. Server and viewers are stopped (SIGSTOP) and continued every few seconds, because the
load of a shared machine changes; the ratios are the medians of those of neighbouring periods. Viewers, server, driver
and training share the machine's cores. ``--only-driver`` measures these two.
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
from typing import TYPE_CHECKING, Any

import psutil
from _long_run import LongRun
from _report import report
from _watched_campaign import WatchedCampaign

from freetrain_parsl.extensions.dashboard.application import page_size

sys.path.insert(0, str(Path(__file__).parents[1]))  # the tests' browser

from tests.browser import Browser, find

if TYPE_CHECKING:
    from collections.abc import Callable

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


class Viewers:
    """The server of a run with viewers of its page, which can be stopped and continued."""

    def __init__(self, run: Path) -> None:
        self._server = Server(run)
        address = self._server.address.replace("/?", "/events?")
        self._viewers = [subprocess.Popen(["curl", "-sN", "-o", "/dev/null", address]) for _ in range(VIEWERS)]
        time.sleep(10.0)  # they have the history

    def compare(self, measure: Callable[[], float], pairs: int) -> tuple[list[float], list[float]]:
        """Measure without and with viewers, alternately, so often."""
        alone: list[float] = []
        watched: list[float] = []
        for _ in range(pairs):
            for number, found in ((signal.SIGSTOP, alone), (signal.SIGCONT, watched)):
                for process in (self._server.process, *self._viewers):
                    process.send_signal(number)
                found.append(measure())
        return alone, watched

    def close(self) -> None:
        """End them."""
        for process in self._viewers:
            process.terminate()
            process.wait()
        self._server.close()


def measure_turns(run: Path, journal: Path, pairs: int, *, nodes: int, trainings: int) -> dict[str, Any]:
    """Measure the turns of a driver with a long history, without and with viewers."""
    driver = LongRun(journal, nodes=nodes, trainings=trainings, begin=time.time() - 86400)
    driver.advance(3600.0)
    viewers = Viewers(run)
    alone, watched = viewers.compare(lambda: statistics.median(_turns(driver, 2.0)), pairs)
    viewers.close()
    driver.journal.close()
    return {
        "turn_ms": 1000 * statistics.median(alone),
        f"turn_ms_{VIEWERS}_viewers": 1000 * statistics.median(watched),
        "turn_slowdown": statistics.median(b / a for a, b in zip(alone, watched, strict=True)),
    }


def measure_campaign(directory: Path, pairs: int) -> dict[str, Any]:
    """Measure the steps per second of a real campaign, without and with viewers."""
    campaign = WatchedCampaign(directory)
    try:
        viewers = Viewers(campaign.run_dir)
        alone, watched = viewers.compare(lambda: campaign.rate(4.0), pairs)
        viewers.close()
    finally:
        campaign.close()
    return {
        "steps_per_second": statistics.median(alone),
        f"steps_per_second_{VIEWERS}_viewers": statistics.median(watched),
        "driver_slowdown": statistics.median(a / b for a, b in zip(alone, watched, strict=True)),
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
    parser.add_argument("--quick", action="store_true", help="an hour on 100 nodes with 20 training jobs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="save the rows")
    parser.add_argument("--only-driver", action="store_true", help="do not measure the page; needs no Chromium")
    arguments = parser.parse_args()
    nodes, trainings, hours, pairs = (100, 20, 1, 3) if arguments.quick else (1000, 200, 24, 25)
    with tempfile.TemporaryDirectory(prefix="ft-dashboard-") as directory:
        os.chmod(directory, 0o700)  # noqa: PTH101 - the run's directory is private
        past, live, real = Path(directory, "past"), Path(directory, "live"), Path(directory, "real")
        for run in (past, live):
            (run / "freetrain").mkdir(parents=True)
        row: dict[str, Any] = {"nodes": nodes, "trainings": trainings, "hours": hours}
        if not arguments.only_driver:
            journal = past / "freetrain" / "journal.sqlite"
            writer = LongRun(journal, nodes=nodes, trainings=trainings, begin=time.time() - 3600 * hours)
            writer.advance(3600.0 * hours)
            writer.journal.close()
            row |= measure_page(past)
        real.mkdir()
        row |= measure_campaign(real, pairs)
        row |= measure_turns(live, live / "freetrain" / "journal.sqlite", pairs, nodes=nodes, trainings=trainings)
    report("The live page", [row], ["starlette", "uvicorn"], arguments.json)


if __name__ == "__main__":
    main()
