"""A headless Chromium, controlled through its DevTools pipe: standard library only, without opening a port."""

from __future__ import annotations

import base64
import fcntl
import itertools
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_ANSWER_SECONDS = 30.0
_FLAGS = (
    "--headless",
    "--no-sandbox",  # CI runs as root; only our own page is opened
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)


def find() -> str | None:
    """Return the path of a Chromium, if installed."""
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page of a headless Chromium.

    `events` contains all unsolicited messages: network requests, log entries, exceptions. `process` is the browser's
    first process.
    """

    def __init__(self, executable: str) -> None:
        self.events: list[dict[str, Any]] = []
        self._profile = Path(tempfile.mkdtemp(prefix="ft-chromium-"))
        self._numbers = itertools.count(1)
        self._unread = b""
        theirs_in, ours_out = _pipe()
        ours_in, theirs_out = _pipe()
        # Chromium reads from descriptor 3 and writes to 4.
        command = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out} {theirs_in}<&- {theirs_out}>&-'
        self.process = subprocess.Popen(
            ["bash", "-c", command, "bash", executable, *_FLAGS, f"--user-data-dir={self._profile}", "about:blank"],
            pass_fds=(theirs_in, theirs_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._read, self._write = ours_in, ours_out
        self._session: str | None = None
        pages = self.call("Target.getTargets")["targetInfos"]
        target = next(page["targetId"] for page in pages if page["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        """Terminate Chromium and remove its files."""
        self._session = None
        try:
            self.call("Browser.close")
            self.process.wait(10)
        except (OSError, EOFError, TimeoutError, subprocess.TimeoutExpired):
            self.process.kill()
            self.process.wait()
        os.close(self._read)
        os.close(self._write)
        shutil.rmtree(self._profile, ignore_errors=True)

    def open(self, page: Path | str, *, width: int, height: int, dark: bool = False) -> None:
        """Load a file or an address in a window of this size and wait until it is complete; reset `events`."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.events.clear()
        self.call("Page.navigate", url=page.as_uri() if isinstance(page, Path) else page)
        deadline = time.monotonic() + _ANSWER_SECONDS
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self._receive(deadline)

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def screenshot(self, path: Path, clip: dict[str, float] | None = None) -> None:
        """Save a picture (PNG) of the whole page, or of a rectangle of it (`x`, `y`, `width`, `height`)."""
        region = {} if clip is None else {"clip": {**clip, "scale": 1}}
        answer = self.call("Page.captureScreenshot", captureBeyondViewport=True, **region)
        path.write_bytes(base64.b64decode(answer["data"]))

    def requests(self) -> list[str]:
        """Return the addresses that the page requested, including its own."""
        return [event["params"]["request"]["url"] for event in self._of("Network.requestWillBeSent")]

    def complaints(self) -> list[str]:
        """Return the page's console output: errors, warnings, violations of its policy."""
        logged = [event["params"]["entry"]["text"] for event in self._of("Log.entryAdded")]
        said = [json.dumps(event["params"]["args"]) for event in self._of("Runtime.consoleAPICalled")]
        thrown = [event["params"]["exceptionDetails"]["text"] for event in self._of("Runtime.exceptionThrown")]
        return logged + said + thrown

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command of the DevTools protocol and return the response."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + _ANSWER_SECONDS
        while (answer := self._receive(deadline)).get("id") != number:
            pass
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    def _of(self, method: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["method"] == method]

    def _receive(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._read], [], [], max(deadline - time.monotonic(), 0.0))
            if not ready:
                raise TimeoutError("Chromium did not answer")
            chunk = os.read(self._read, 1 << 20)
            if not chunk:
                raise EOFError("Chromium ended")
            self._unread += chunk
        text, _, self._unread = self._unread.partition(b"\0")
        message = json.loads(text)
        if "method" in message:
            self.events.append(message)
        return message


def _pipe() -> tuple[int, int]:
    """Make a pipe with descriptors above 9, to avoid conflicts with 3 and 4, which Chromium uses."""
    low = os.pipe()
    high = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in low)
    for end in low:
        os.close(end)
    return high
