"""Interpreters that this package starts run no modules that somebody has left in the current directory."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from freetrain_parsl.executor.htex.executor import INTERCHANGE_COMMAND
from freetrain_parsl.executor.payloads import app_modules
from freetrain_parsl.interpreters import FREETRAIN, module_command, module_in, script_command

ROOT = Path(__file__).parents[1]
TRACE = "ran-what-was-planted"
PLANTED = (
    "freetrain_parsl",
    "json",
    "multiprocessing",
    "parsl",
    "random",
    "runpy",
    "selectors",
    "socket",
    "torch",
    "zmq",
)

# The slots' side of a worker pool: its fork server, which imports what the slots need, and a process that it forks.
_POOL = """
import multiprocessing, os
from freetrain_parsl.executor.htex import worker_pool
worker_pool.WARM_IMPORTS = "torch"
def pool(_):
    process = multiprocessing.get_context("forkserver").Process(target=os.mkdir, args=("slot",))
    process.start()
    process.join()
worker_pool.run_steadily = pool
worker_pool.main()
"""

# Values that are computed in several processes by the start method "spawn".
_SPAWN = """
import multiprocessing, os
from freetrain_parsl.interpreters import in_root_directory
with in_root_directory():
    process = multiprocessing.get_context("spawn").Process(target=len, args=("",))
    process.start()
process.join()
assert process.exitcode == 0
os.mkdir("slot")
"""


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """Make a directory in which another user has left modules."""
    place = tmp_path / "shared"
    place.mkdir()
    for name in PLANTED:
        (place / f"{name}.py").write_text(f"open({str(place / TRACE)!r}, 'a').write(__name__)\nraise SystemExit(3)\n")
    return place


def run(command: list[str], shared: Path, text: str = "") -> int:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, cwd=shared, env=environment, input=text, capture_output=True, text=True, timeout=60, check=False
    ).returncode


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ([*module_command("freetrain_parsl.cluster.daemon"), "--help"], 0),
        ([*module_command("freetrain_parsl.executor.slot.pilot"), "true"], 0),
        ([*script_command(FREETRAIN), "--version"], 0),
        (list(INTERCHANGE_COMMAND), 1),  # without its settings on standard input
    ],
    ids=["cluster", "pilot", "command line", "interchange"],
)
def test_planted_modules_do_not_run(shared: Path, command: list[str], code: int) -> None:
    assert run(command, shared) == code
    assert not (shared / TRACE).exists()


@pytest.mark.parametrize("script", [_POOL, _SPAWN], ids=["worker pool", "spawned"])
def test_planted_modules_do_not_run_in_processes_of_multiprocessing(shared: Path, script: str) -> None:
    assert run(script_command(script), shared) == 0
    assert (shared / "slot").is_dir(), "the process is not in the directory of its parent"
    assert not (shared / TRACE).exists()


def test_a_relative_entry_of_the_path_stays_the_same(shared: Path) -> None:
    (shared / "mine").mkdir()
    script = "import os; from freetrain_parsl.interpreters import in_root_directory as root\n"
    script += "with root(): print(os.environ['PYTHONPATH'])"
    environment = {**os.environ, "PYTHONPATH": f"mine{os.pathsep}{ROOT}"}
    done = subprocess.run(
        script_command(script), cwd=shared, env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split(os.pathsep)[0] == str(shared / "mine")


def test_the_module_of_a_command_is_found_again() -> None:
    assert module_in([*module_command("a.b"), "--c", "d"]) == ("a.b", ["--c", "d"])
    assert module_in([sys.executable, "-m", "a.b", "c"]) == ("a.b", ["c"])


def test_launchers_can_put_the_words_into_here_documents() -> None:
    assert not set("$`\\\n{}") & set(" ".join(module_command("freetrain_parsl.executor.slot.pilot")))


def test_modules_for_a_notebooks_cells_are_looked_up_in_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The nodes do not search their own directory, and a kernel does."""
    cell: dict[str, object] = {"__name__": "__main__"}
    exec(compile("def train(session): ...", "<cell>", "exec"), cell)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *filter(None, sys.path)])
    assert app_modules.directory_of(cell["train"]) == str(tmp_path)  # type: ignore[arg-type]
    monkeypatch.setattr(sys, "path", [*filter(None, sys.path)])
    assert app_modules.directory_of(cell["train"]) == ""  # type: ignore[arg-type]


def test_no_other_interpreter_is_started_with_m_or_c() -> None:
    """Each such place would search the current directory."""
    found = []
    for file in (ROOT / "freetrain_parsl").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.List, ast.Tuple)) and "sys.executable" in map(ast.unparse, node.elts):
                options = [item.value for item in node.elts if isinstance(item, ast.Constant)]
                if {"-m", "-c"} & set(options) and "-I" not in options:
                    found.append(f"{file.relative_to(ROOT)}:{node.lineno}")
    assert found == []
