"""Makes the pictures of the documentation's gallery, by the commands that the gallery shows.

``python -m tests.gallery`` replaces those in ``docs/images/gallery``; it needs Chromium.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests import browser
from tests.campaign.shell import FREETRAIN

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGE = DOCS / "gallery.md"
PICTURES = DOCS / "images" / "gallery"
WIDTH = 1100

# Picture -> report, and the text with which its first and its last part begin.
PARTS = {
    "losses": ("idle.html", "Efficiency and losses", "Losses only"),
    "idle-nodes": ("idle.html", "Idle nodes and their use", "Idle nodes and their use"),
    "completion-times": ("jobs.html", "Distribution of completion times", "Distribution of completion times"),
    "life-of-a-job": ("jobs.html", "The life of ", "Goodput"),
    "fine-tuning-sweep": ("sweep.html", "Members finished over time", "Members finished over time"),
    "two-sites": ("sites.html", "Efficiency over time", "Efficiency over time"),
}
_SHELL = re.compile(r"^```\n((?:\$ .*\n)+)```$", re.MULTILINE)
# The rectangle from the first to the last element that begin with these texts; parts in closed sections are shown.
_RECTANGLE = """((first, last) => {
  document.querySelectorAll('details').forEach(part => part.open = true);
  const parts = [...document.querySelectorAll('h2, h3, figure')];
  const from = parts.findIndex(part => part.textContent.startsWith(first));
  const to = parts.findIndex((part, index) => index >= from && part.textContent.startsWith(last));
  const top = parts[from].getBoundingClientRect(), end = parts[to].getBoundingClientRect();
  return {x: end.left - 16, y: top.top + scrollY - 16, width: end.width + 32, height: end.bottom - top.top + 32};
})(%r, %r)"""


def commands(*verbs: str) -> list[list[str]]:
    """Return the arguments of the gallery's commands with these verbs."""
    blocks = (match[1] for match in _SHELL.finditer(PAGE.read_text(encoding="utf-8")))
    lines = [line.removeprefix("$ freetrain ").split() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line[0] in verbs]


def make_reports(window: browser.Browser, directory: Path, pictures: Path) -> None:
    """Replay and simulate in a directory, and save a picture of each part of the reports."""
    for arguments in commands("replay", "simulate"):
        subprocess.run([FREETRAIN, *arguments], cwd=directory, check=True, stdout=subprocess.DEVNULL)
    for name, (report, first, last) in PARTS.items():
        window.open(directory / report, width=WIDTH, height=900)
        window.screenshot(pictures / f"{name}.png", window.evaluate(_RECTANGLE % (first, last)))


def make_live_page(window: browser.Browser, directory: Path, pictures: Path) -> None:
    """Run the campaign in a directory, and save a picture of its page."""
    (directory / "configs").symlink_to(ROOT / "configs")
    (run,), (dashboard,) = commands("run"), commands("dashboard")
    subprocess.run([FREETRAIN, *run], cwd=directory, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    with subprocess.Popen([FREETRAIN, *dashboard], cwd=directory, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        address = next(line.strip() for line in server.stdout if line.strip().startswith("http://"))
        window.open(address, width=WIDTH, height=900)
        deadline = time.monotonic() + 20
        while not window.evaluate("document.querySelector('.ft-badge')?.textContent === 'finished'"):
            assert time.monotonic() < deadline, window.evaluate("document.body.innerText")
            time.sleep(0.1)
        window.screenshot(pictures / "live-page.png")
        server.terminate()


def main() -> int:
    """Replace the pictures."""
    executable = browser.find()
    if executable is None:
        print("no Chromium on PATH (Debian: apt-get install chromium)", file=sys.stderr)
        return 1
    PICTURES.mkdir(exist_ok=True)
    window = browser.Browser(executable)
    try:
        with tempfile.TemporaryDirectory() as directory:
            make_reports(window, Path(directory), PICTURES)
            make_live_page(window, Path(directory), PICTURES)
    finally:
        window.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
