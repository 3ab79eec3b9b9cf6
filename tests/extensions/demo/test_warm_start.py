"""Nodes that are forked from the warm start server are like nodes that start by themselves."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from freetrain_parsl import EmbeddedCluster
from freetrain_parsl.cluster import processes, registry
from freetrain_parsl.extensions.demo.warm_start import ADDRESS, CLIENT
from freetrain_parsl.extensions.demo.warm_start.owner import WarmStart
from freetrain_parsl.interpreters import module_command

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).parents[3]
STARTER = tuple(module_command(CLIENT)[1:])
PILOT = tuple(module_command("freetrain_parsl.executor.slot.pilot")[1:])

# What runs in the place of the worker pool: it reports, and does what its argument says.
_PROGRAM = """
import json, os, signal, sys, time
from pathlib import Path

mask = os.umask(0)
print(json.dumps({
    "forked": "torch" in sys.modules,
    "argv": sys.argv[1:],
    "directory": os.getcwd(),
    "environment": dict(os.environ),
    "shown": Path("/proc/self/environ").read_text().rstrip(chr(0)).split(chr(0)),
    "command": Path("/proc/self/cmdline").read_text().rstrip(chr(0)).split(chr(0)),
    "streams": [os.readlink(f"/proc/self/fd/{number}") for number in range(3)],
    "descriptors": sorted(map(int, os.listdir("/proc/self/fd")))[:-1],
    "ignored": [int(n) for n in signal.valid_signals() if signal.getsignal(n) == signal.SIG_IGN],
    "umask": mask,
    "path": sys.path,
    "leads": os.getsid(0) == int(os.environ["FREETRAIN_PILOT"]),
    "group": os.getpgrp() == os.getpid(),
}), flush=True)
what, *arguments = sys.argv[1:]
if what == "exit":
    sys.exit(int(arguments[0]))
if what == "leave":  # the session, without another program
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.fork() == 0:
        os.setsid()
time.sleep(float(arguments[0]))
"""


class Node:
    """A cluster of one node, and the jobs that run the program on it."""

    def __init__(self, cluster: EmbeddedCluster, directory: Path, server: dict[str, str]) -> None:
        self.client, self.cluster, self.directory, self.server = cluster.client, cluster, directory, server
        (directory / "program.py").write_text(_PROGRAM)

    def submit(self, *arguments: str, python: tuple[str, ...] = (sys.executable,), **environment: str) -> str:
        """Submit a job and wait until it reports."""
        for name in ("out", "err"):
            (self.directory / name).write_text("")
        job = self.client.submit(
            [*python, *STARTER, *python, *PILOT, *python, *module_command("program")[1:], *arguments],
            walltime=timedelta(minutes=2),
            env={**_without(ADDRESS), **_with_program(self.directory), **self.server, **environment},
            cwd=self.directory,
            stdout=self.directory / "out",
            stderr=self.directory / "err",
        )
        assert _until(lambda: (self.directory / "out").read_text().endswith("\n")), self.errors
        return job

    @property
    def report(self) -> dict[str, Any]:
        """What the program has reported."""
        report: dict[str, Any] = json.loads((self.directory / "out").read_text())
        return report

    @property
    def errors(self) -> str:
        """What the program, and what started it, have written to standard error."""
        return (self.directory / "err").read_text()

    def end(self, job: str) -> dict[str, Any]:
        """Wait until a job has ended, and check that it has left no process."""
        assert _until(lambda: self.client.jobs([job])[job]["end"] is not None)
        assert processes.marked(registry.mark_prefix(self.cluster.name) + f"{job}/") == []
        return self.client.jobs([job])[job]


@pytest.fixture
def node(tmp_path: Path, warm_start: WarmStart) -> Iterator[Node]:
    """Start a cluster whose node uses the suite's server."""
    with EmbeddedCluster(tmp_path / "cluster", nodes=1, grace=timedelta(seconds=0.5)) as cluster:
        yield Node(cluster, tmp_path, warm_start.environment)


def _with_program(*directories: Path) -> dict[str, str]:
    """Let Python import the program: no interpreter of a node searches the directory in which it starts."""
    path = filter(None, [*map(str, directories), os.environ.get("PYTHONPATH")])
    return {"PYTHONPATH": os.pathsep.join(path)}


def _without(name: str) -> dict[str, str]:
    return {other: value for other, value in os.environ.items() if other != name}


def _until(condition: Callable[[], object], seconds: float = 60.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return False


_OF_ONE_JOB = {"FREETRAIN_POOL_DIRECTORY", ADDRESS, "FREETRAIN_PILOT", "FREETRAIN_CLUSTER_JOB_ID", processes.MARK}


@pytest.mark.smoke
def test_a_program_sees_and_shows_what_it_would_in_its_own_interpreter(node: Node) -> None:
    reports = []
    for server in (node.server, {}):
        node.server = server
        assert node.end(node.submit("exit", "0", GREETING="hello"))["state"] == "COMPLETED"
        assert node.errors == ""
        report = node.report
        environment = report["environment"]
        assert sorted(report.pop("shown")) == sorted(f"{name}={value}" for name, value in environment.items())
        for name in _OF_ONE_JOB | {"TORCHINDUCTOR_CACHE_DIR"}:  # torch sets it when it is imported
            environment.pop(name, None)
        reports.append(report)
    forked, started = reports
    assert (forked.pop("forked"), started.pop("forked")) == (True, False)
    assert forked == started
    assert (forked["environment"]["GREETING"], forked["directory"]) == ("hello", str(node.directory))
    assert forked["descriptors"] == [0, 1, 2]


def test_the_exit_code_is_that_of_the_node(node: Node) -> None:
    assert node.end(node.submit("exit", "3"))["exit_codes"] == {"n00": 3}
    assert node.report["forked"]


def test_a_cancelled_job_ends_all_processes_even_those_that_left_the_session(node: Node) -> None:
    job = node.submit("leave", "600")
    assert node.report["forked"]
    assert _until(
        lambda: len(processes.marked(registry.mark_prefix(node.cluster.name) + f"{job}/")) == 4
    )  # two, the pilot, the job's own
    node.client.cancel([job])
    assert node.end(job)["state"] == "CANCELLED"


def test_when_the_jobs_own_process_is_killed_the_node_is_released(node: Node) -> None:
    job = node.submit("sleep", "600")
    pilot = int(node.report["environment"]["FREETRAIN_PILOT"])
    (own,) = set(processes.marked(registry.mark_prefix(node.cluster.name) + f"{job}/")) - _with_children(pilot)
    os.kill(own, signal.SIGKILL)
    assert node.end(job)["state"] == "FAILED"


@pytest.mark.smoke
def test_when_the_pilot_is_killed_the_job_fails(node: Node) -> None:
    job = node.submit("sleep", "600")
    os.kill(int(node.report["environment"]["FREETRAIN_PILOT"]), signal.SIGKILL)
    assert node.end(job)["exit_codes"] == {"n00": 128 + signal.SIGKILL}


def test_a_node_goes_on_when_the_server_is_killed_and_the_next_starts_by_itself(node: Node) -> None:
    with WarmStart() as server:
        node.server = server.environment
        job = node.submit("sleep", "3")
        assert node.report["forked"]
        os.kill(server.pid, signal.SIGKILL)
        assert node.end(job)["state"] == "COMPLETED"
        job = node.submit("exit", "0")
        assert not node.report["forked"]
        assert node.errors.count("starts without the warm start server") == 1
        assert node.end(job)["state"] == "COMPLETED"


def test_nodes_in_other_circumstances_start_by_themselves_and_say_why(node: Node) -> None:
    node.end(node.submit("exit", "0", OMP_NUM_THREADS="7"))
    assert not node.report["forked"]
    assert node.errors.endswith(": different variables OMP_NUM_THREADS\n")
    node.end(node.submit("exit", "0", python=(sys.executable, "-X", "utf8")))
    assert not node.report["forked"]
    assert "different flags" in node.errors
    node.end(node.submit("exit", "0", python=(_other_interpreter(node.directory),)))
    assert not node.report["forked"]
    assert "different executable" in node.errors


def test_the_name_of_the_interpreter_in_its_environment_is_no_other_circumstance(node: Node) -> None:
    """Scripts that pip installs name `python`, `python3` or `python3.11`, depending on how pip was started."""
    for name in ("python", "python3"):
        node.end(node.submit("exit", "0", python=(str(Path(sys.executable).with_name(name)),)))
        assert (node.report["forked"], node.errors) == (True, "")


def test_what_scikit_learn_and_lightning_set_for_a_drivers_children_is_no_other_circumstance(node: Node) -> None:
    theirs = {"KMP_DUPLICATE_LIB_OK": "True", "KMP_INIT_AT_FORK": "FALSE", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    node.end(node.submit("exit", "0", **theirs))
    assert (node.report["forked"], node.errors) == (True, "")
    node.end(node.submit("exit", "0", KMP_BLOCKTIME="0"))
    assert node.errors.endswith(": different variables KMP_BLOCKTIME\n")


def test_a_path_of_its_own_is_a_nodes_own_unless_it_has_modules_that_the_server_has_imported(node: Node) -> None:
    more = node.directory / "more"
    more.mkdir()
    for name, forked in (("another.py", True), ("site.yaml", True), ("parsl.py", False)):
        (more / name).touch()
        node.end(node.submit("exit", "0", **_with_program(more, node.directory)))
        assert (node.report["forked"], str(more) in node.report["path"]) == (forked, True)
    assert "its path has other modules: parsl" in node.errors


def test_a_process_that_is_no_node_of_an_embedded_cluster_does_not_use_it(node: Node) -> None:
    """A real batch system would not find its processes."""
    environment = _without(processes.MARK) | _with_program(node.directory) | node.server
    command = [sys.executable, *STARTER, sys.executable, *PILOT, sys.executable, "-m", "program", "exit", "0"]
    done = subprocess.run(command, env=environment, cwd=node.directory, capture_output=True, timeout=60, check=True)
    assert (json.loads(done.stdout)["forked"], done.stderr) == (False, b"")


def test_clients_that_leave_or_send_nonsense_do_not_keep_the_server_from_serving(node: Node) -> None:
    for nonsense in (b"", b"\0", b"\0\0\0\2[]", b"\0\0\0\2{}", b"\xff\xff\xff\xff{"):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(node.server[ADDRESS])
            client.send(nonsense)
    node.end(node.submit("exit", "0"))
    assert node.report["forked"]


def test_the_socket_is_private(warm_start: WarmStart) -> None:
    assert Path(warm_start.environment[ADDRESS]).parent.stat().st_mode & 0o077 == 0


_KILLED_OWNER = """
import os, signal
from freetrain_parsl.extensions.demo.warm_start import ADDRESS
from freetrain_parsl.extensions.demo.warm_start.owner import WarmStart
with WarmStart() as server:
    print(server.environment[ADDRESS], flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_directory_of_an_owner_that_was_killed_is_removed() -> None:
    owner = subprocess.run(
        [sys.executable, "-c", _KILLED_OWNER], capture_output=True, text=True, timeout=60, check=False
    )
    directory = Path(owner.stdout.strip()).parent
    assert directory.name.startswith("ft-warm-")
    end = time.monotonic() + 60
    while directory.exists() and time.monotonic() < end:
        time.sleep(0.1)
    assert not directory.exists()


def _with_children(pid: int) -> set[int]:
    return {pid} | {info.pid for info in processes.living() if info.parent == pid}


def _other_interpreter(directory: Path) -> str:
    """Make a virtual environment with the packages of this one."""
    packages = Path(sysconfig.get_path("purelib"))
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    there = directory / "venv" / "lib" / version / "site-packages"
    there.mkdir(parents=True)
    (there / "packages.pth").write_text(f"{packages}\n{ROOT}\n")
    (directory / "venv" / "pyvenv.cfg").write_text(f"home = {Path(sys.executable).resolve().parent}\n")
    python = directory / "venv" / "bin" / "python"
    python.parent.mkdir()
    python.symlink_to(Path(sys.executable).resolve())
    return str(python)
