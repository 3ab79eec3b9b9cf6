"""A check leaves nothing behind: no process, no file, whatever the function does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from freetrain_parsl.extensions.checking.report import CheckVerdict
from freetrain_parsl.extensions.checking.run import Checker, call_of
from freetrain_parsl.training.group.process_group import Group
from tests.extensions.checking import corpus

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
HANGING = """\
import subprocess, sys, time
from pathlib import Path


def train(session):
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(MARK).touch()
    while True:
        time.sleep(0.1)
"""
# As in a terminal: a test suite in the background ignores SIGINT, and so would its processes.
CHECK = """\
import signal
from freetrain_parsl.cli import main
signal.signal(signal.SIGINT, signal.default_int_handler)
main()
"""


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the directory for temporary files one of the test's own."""
    place = tmp_path / "tmp"
    place.mkdir()
    monkeypatch.setenv("TMPDIR", str(place))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return place


def test_a_function_that_drops_a_group_of_this_process_is_not_ended_by_it() -> None:
    """As a notebook does that has trained with a mesh and has its model in a global variable."""
    group = Group()
    held = [group.mesh(torch.device("cpu"))]
    group.leave()
    del group

    def train(session: Any) -> None:
        held.clear()
        corpus.counter_mended(session)

    report = Checker(call_of(train)).run()
    assert report.holds, str(report)
    assert held


def test_a_function_that_hangs_is_ended_and_its_line_is_named(scratch: Path) -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    report = Checker(call_of(corpus.endless), limit=1.0).run()
    assert report.verdict is CheckVerdict.DOES_NOT_RUN
    assert report.failure.startswith("it did not end (corpus.py:")
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before
    assert list(scratch.iterdir()) == []


def test_a_check_leaves_neither_processes_nor_files(scratch: Path) -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    files = set(Path.cwd().iterdir())
    assert Checker(call_of(corpus.only_printed)).run().holds
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before
    assert list(scratch.iterdir()) == []
    assert set(Path.cwd().iterdir()) == files


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_its_processes_end_with_it(tmp_path: Path, scratch: Path, end: signal.Signals) -> None:
    """Ctrl-C ends all processes, also those that the function has started; so does the death of the check itself."""
    mark = tmp_path / "runs"
    (tmp_path / "hanging.py").write_text(HANGING.replace("MARK", repr(str(mark))))
    check = subprocess.Popen(
        [sys.executable, "-c", CHECK, "check", f"{tmp_path}/hanging.py:train"],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 60
    while not mark.exists():
        assert time.monotonic() < deadline
        assert check.poll() is None
        time.sleep(0.05)
    children = psutil.Process(check.pid).children(recursive=True)
    assert len(children) >= 2
    check.send_signal(end)
    _, message = check.communicate(timeout=30)
    own = children[:1] if end is signal.SIGKILL else children  # what the function starts is its own then
    gone, alive = psutil.wait_procs(own, timeout=10)
    for child in children:
        if child.is_running():
            child.kill()
    assert not alive
    assert len(gone) == len(own)
    if end is signal.SIGINT:
        assert (check.returncode, message) == (130, "freetrain check: interrupted; its processes were ended\n")
        assert list(scratch.iterdir()) == []
