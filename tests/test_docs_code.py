"""The code in README and documentation runs: marked blocks, and commands with the output that they show."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.test_docs import PAGES

SECONDS = 600  # counts as hung; each script takes less than a minute on a machine with one core per node

# "<!-- runnable: FILE [cluster|pytest] -->" before a code block: the tests save it as FILE and run it.
# The files of a page are in one directory, so that they can import each other.
_RUNNABLE = re.compile(
    r"<!-- runnable: (\S+)(?: (cluster|pytest))? -->\n```python\n(.*?)^```$", re.DOTALL | re.MULTILINE
)
# "<!-- runnable: shell -->": lines of the block that begin with "$ " are run, those below are their output, with any
# figures; "…" stands for omitted lines. The blocks of a page are run in order, in one directory.
_SHELL = re.compile(r"<!-- runnable: shell -->\n```\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Script:
    """A marked code block."""

    page: Path
    file: str
    kind: str
    code: str


def scripts(page: Path) -> list[Script]:
    found = _RUNNABLE.findall(page.read_text(encoding="utf-8"))
    return [Script(page, file, kind, code) for file, kind, code in found]


SCRIPTS = [script for page in PAGES for script in scripts(page)]


def commands(page: Path) -> list[tuple[str, list[str]]]:
    """Return the commands of a page's shell blocks, each with the parts of its output shown on the page."""
    blocks = _SHELL.findall(page.read_text(encoding="utf-8"))
    parts = [part.partition("\n") for block in blocks for part in re.split(r"^\$ ", block, flags=re.MULTILINE) if part]
    return [(command, shown.split("…\n")) for command, _, shown in parts]


def without_figures(output: str) -> str:
    """Reduce output to its words: figures, and column widths that depend on them, may differ."""
    return re.sub(r"\s+", " ", re.sub(r"-?\d[\d.,]*", "#", output.replace("\N{NO-BREAK SPACE}", " "))).strip()


def named(script: Script):
    marks = [pytest.mark.cluster if script.kind == "cluster" else pytest.mark.slow]
    marks += [pytest.mark.smoke] if script.page.name in ("README.md", "write-a-policy.md") else []
    return pytest.param(script, id=f"{script.page.stem}-{script.file}", marks=marks)


@pytest.fixture
def directory(tmp_path, monkeypatch):
    """Make a reader's working directory; the tests' clusters are separate from the user's."""
    runtime = Path(tempfile.mkdtemp(prefix="ft-", dir="/tmp"))  # short: socket paths are limited
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    yield tmp_path
    shutil.rmtree(runtime)


def run(arguments: list[str], directory: Path) -> str:
    """Run a command in a directory and return its output; after a timeout, kill it with all its processes."""
    process = subprocess.Popen(
        arguments,
        cwd=directory,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
        output, _ = process.communicate()
        pytest.fail(f"{arguments} did not end in {SECONDS} s:\n{output}")
    assert process.returncode == 0, output
    return output


# What trains longer than shows anything trains less in the tests.
SHORTER = {"digits.py": ("epochs=100", "epochs=25"), "study.py": ("n_trials=20", "n_trials=8")}


def write_page(page: Path, directory: Path) -> None:
    for script in scripts(page):
        whole, part = SHORTER.get(script.file, ("", ""))
        assert whole in script.code
        (directory / script.file).write_text(script.code.replace(whole, part) if whole else script.code)


@pytest.mark.parametrize("script", [named(script) for script in SCRIPTS if script.file != "look.py"])
def test_code_in_the_docs_runs(script, directory):
    """Every block marked as runnable runs; those on the cluster print the loss of three training jobs.

    Their nodes are forked: else each imports what takes seconds.
    """
    write_page(script.page, directory)
    if script.kind == "pytest":
        run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", script.file], directory)
        return
    output = run([sys.executable, script.file], directory)
    if script.kind == "cluster":
        assert output.count("loss") == 3
        errors = [file.read_text(encoding="utf-8") for file in directory.glob("runinfo/*/submit_scripts/*.err")]
        assert errors
        assert not any("without the warm start server" in text for text in errors)
    if script.file == "holes.py":  # the tutorial's next step reads this run's journal
        journal = output.split("journal: ")[1].strip()
        assert run([sys.executable, "look.py", journal], directory).count("training_finished") == 3


SHELL_PAGES = [page for page in PAGES if commands(page)]


@pytest.mark.slow
@pytest.mark.parametrize("page", SHELL_PAGES, ids=lambda page: page.stem)
def test_commands_in_the_docs_run(page, directory, monkeypatch):
    """Every command of a block marked as shell succeeds and prints the output shown on the page."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    for command, shown in commands(page):
        output = without_figures(run(["bash", "-c", command], directory))
        for piece in shown:
            assert without_figures(piece) in output, command


def test_readme_and_tutorial_have_code_that_runs():
    """The introductory pages are among those whose code is executed."""
    pages = {script.page.name for script in SCRIPTS}
    assert {"README.md", "tutorial.md"} <= pages
    assert "idle-nodes.md" in {page.name for page in SHELL_PAGES}
