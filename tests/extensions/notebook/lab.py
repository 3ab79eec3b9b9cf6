"""A JupyterLab of the tests' own, on the loopback, with its page in a browser."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import time
import urllib.request
from typing import TYPE_CHECKING, Any

from tests.processes import MARK

if TYPE_CHECKING:
    from pathlib import Path

    from tests.browser import Browser

_PANEL = "[...jupyterapp.shell.widgets('main')].find(one => one.sessionContext)"
SETTINGS = {
    "notification": '{"fetchNews": "false", "checkForUpdates": false}',
    "themes": '{"theme": "JupyterLab %s"}',
}


class Lab:
    """A server, and its page.

    Parameters
    ----------
    directory
        Its notebooks.
    browser
        Shows the page.
    mark
        Marks the server's processes and all that they start.
    theme
        ``Light`` or ``Dark``.
    """

    def __init__(self, directory: Path, browser: Browser, mark: str, theme: str = "Light") -> None:
        self._browser = browser
        self._token = secrets.token_hex(16)
        home = directory.parent / "jupyter"
        settings = home / "settings" / "@jupyterlab" / "apputils-extension"
        settings.mkdir(parents=True, exist_ok=True)
        for name, text in SETTINGS.items():
            (settings / f"{name}.jupyterlab-settings").write_text(text.replace("%s", theme))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._address = f"http://127.0.0.1:{probe.getsockname()[1]}"
        places = {f"JUPYTER_{name}_DIR": str(home / name.lower()) for name in ("CONFIG", "RUNTIME")}
        places |= {f"JUPYTERLAB_{name}_DIR": str(home / name.lower()) for name in ("SETTINGS", "WORKSPACES")}
        with (home / "server.log").open("w") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--expose-app-in-browser"),
                    *(f"--port={self._address.rpartition(':')[2]}", "--ServerApp.ip=127.0.0.1"),
                    f"--ServerApp.root_dir={directory}",
                ],
                env={**os.environ, **places, MARK: mark, "JUPYTER_TOKEN": self._token},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._until_it_answers()

    def open(self, notebook: str, *, width: int, height: int) -> None:
        """Load a notebook."""
        address = f"{self._address}/lab/tree/{notebook}?token={self._token}&reset"
        self._browser.open(address, width=width, height=height)
        self.until("window.jupyterapp && document.querySelector('.jp-Notebook .jp-Cell')")
        self.until(f"{_PANEL}?.sessionContext.session?.kernel?.status === 'idle'")

    def command(self, name: str) -> None:
        """Run a command of JupyterLab, as its menu does."""
        self._browser.evaluate(f"jupyterapp.commands.execute('{name}'); 0")

    def save(self) -> None:
        """Save the notebook."""
        self._browser.evaluate(f"{_PANEL}.context.save(); 0")

    def text(self, cell: int) -> str:
        """Return the visible text of the outputs of a cell."""
        return str(
            self._browser.evaluate(
                f"[...document.querySelectorAll('.jp-Cell')][{cell}].querySelector('.jp-OutputArea').innerText"
            )
        )

    def until(self, expression: str, seconds: float = 60.0) -> Any:
        """Wait for a JavaScript expression to be true."""
        end = time.monotonic() + seconds
        while not (found := self._browser.evaluate(f"!!({expression})")):
            assert time.monotonic() < end, (expression, self._browser.evaluate("document.body.innerText"))
            time.sleep(0.25)
        return found

    def close(self) -> None:
        """Stop the server, with its kernels."""
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _until_it_answers(self) -> None:
        end = time.monotonic() + 60
        while not self._answers():
            assert time.monotonic() < end, "JupyterLab did not start"
            assert self._process.poll() is None, "JupyterLab ended"
            time.sleep(0.25)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self._address}/api/status?token={self._token}", timeout=5):
                return True
        except OSError:
            return False
