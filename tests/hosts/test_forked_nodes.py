"""Nodes on other hosts are forked from the warm start server, which is on none of them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest

import freetrain_parsl
from freetrain_parsl import EmbeddedCluster
from freetrain_parsl.extensions.demo.warm_start import CLIENT
from tests.support.hosts import Hosts

pytestmark = pytest.mark.hosts

SITE = {"login": {"eth0": "10.77.0.1/24"}, "n00": {"eth0": "10.77.0.10/24"}}

# What runs in the place of the worker pool.
_PROGRAM = """
import json, os, platform, socket, sys
print(json.dumps({
    "forked": "torch" in sys.modules,
    "name": socket.gethostname(),
    "node": platform.node(),
    "addresses": socket.gethostbyname_ex("login")[2],
    "interfaces": sorted(name for _, name in socket.if_nameindex()),
    "shown": sorted(os.listdir("/sys/class/net")),
    "directory": os.getcwd(),
}))
"""


@pytest.fixture(scope="module")
def hosts():
    with Hosts(SITE) as hosts:
        yield hosts


@pytest.fixture
def run(hosts, tmp_path, warm_start):
    """Run the program as a node on the host n00, after a shell command; return its report and its error output."""
    (tmp_path / "program.py").write_text(_PROGRAM)
    out, err = tmp_path / "out", tmp_path / "err"

    def on_a_node(before: str = "true"):
        modules = (CLIENT, "freetrain_parsl.executor.slot.pilot", "program")
        program = " ".join(f"{sys.executable} -m {module}" for module in modules)
        with EmbeddedCluster(tmp_path / "cluster", nodes=1, grace=timedelta(seconds=0.5)) as cluster:
            job = cluster.client.submit(
                hosts["n00"].command("unshare", "--mount", "sh", "-c", f"{before} && exec {program}", cwd=tmp_path),
                walltime=timedelta(minutes=2),
                env={**os.environ, **warm_start.environment},
                cwd=tmp_path,
                stdout=out,
                stderr=err,
            )
            end = time.monotonic() + 60
            while cluster.client.jobs([job])[job]["end"] is None and time.monotonic() < end:
                time.sleep(0.02)
        return json.loads(out.read_text()), err.read_text()

    return on_a_node


def test_a_forked_node_is_on_its_host(run, tmp_path):
    report, errors = run()
    assert errors == ""
    assert report == {
        "forked": True,
        "name": "n00",
        "node": "n00",
        "addresses": ["10.77.0.1"],
        "interfaces": ["eth0", "lo"],
        "shown": ["eth0", "lo"],
        "directory": str(tmp_path),
    }


def test_a_host_with_other_files_starts_its_node_by_itself(run, tmp_path):
    """As a container would: what the server has imported may be another version."""
    package = Path(freetrain_parsl.__file__).parent
    shutil.copytree(package, tmp_path / "package")
    report, errors = run(f"mount --bind {tmp_path / 'package'} {package}")
    assert (report["forked"], report["name"]) == (False, "n00")
    assert errors.endswith(": different files \n")


_ENTER = """
import os, sys
from freetrain_parsl.extensions.demo.warm_start.client import ENTERED, enter_namespaces, open_namespaces
there = [os.open(f"/proc/{sys.argv[1]}/ns/{kind}", os.O_RDONLY) for kind in ENTERED]
os.setuid(65534)
enter_namespaces(open_namespaces())  # its own
enter_namespaces(there)
"""


def test_an_ordinary_user_enters_no_host(hosts):
    command = [sys.executable, "-c", _ENTER, str(hosts["n00"].pid)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stderr.endswith("\nPermissionError: [Errno 1] Operation not permitted: the net namespace of the node\n")
