"""The suite's parts, and a real Slurm on the loopback, shared by all tests that need it."""

from __future__ import annotations

import gc
import os
import re
import sys
import tempfile
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from freetrain_parsl.extensions.demo.warm_start.owner import WarmStart
from tests.__main__ import PARTS
from tests.browser import Browser, find
from tests.support.globus.rabbitmq import broker_missing
from tests.support.slurm.loopback import PARTITIONS, LoopbackPartition, LoopbackSlurm

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# Part -> the marks of its tests; a test with marks of several is in the first of these parts, one with none in `quick`.
MARKS = {
    "gpu": ("gpu",),
    "timed": ("timed",),
    "daemons": ("cluster", "slurm", "hosts", "globus"),
    "slow": ("slow", "browser"),
}

# Files with tests of a minute or more on two busy cores: they begin first, or a part ends with one of them alone.
LONG = {
    "test_calls.py",
    "test_chaos_episodes.py",
    "test_docs.py",
    "test_docs_code.py",
    "test_end_to_end.py",
    "test_gallery.py",
    "test_live_sites.py",
    "test_llm.py",
    "test_scripts.py",
    "test_two_users.py",
    "test_window_end.py",
}

_MARKS_OF_ALL = re.compile(r"^pytestmark = (?:\[.*?^\]|.*?$)", re.MULTILINE | re.DOTALL)  # of the tests of a file

REQUIRED = "FREETRAIN_TESTS_REQUIRE"  # comma-separated requirements whose absence is a failure instead of a skip

# The duration of examples depends on the load of the machine, so there is no deadline.
settings.register_profile("suite", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")

if "PYTEST_XDIST_WORKER" in os.environ:  # workers share the cores
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that select tests by their marks, in addition to `-m` and `-k`."""
    parser.addoption("--part", choices=PARTS, help="run only the tests of this part (see tests/__main__.py)")
    parser.addoption("--smoke", action="store_true", help="of tests that are not quick, run those marked smoke only")
    parser.addoption("--few", action="store_true", help="of each test with parameters, run the first and last instance")


def pytest_configure(config: pytest.Config) -> None:
    """Hide GPUs from all tests but those marked `gpu`: a session uses one wherever it finds one, and results differ."""
    if config.getoption("--part") != "gpu" and "gpu" not in config.getoption("markexpr"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keep what pytest compiles, even where Python must not write bytecode, and collect no garbage meanwhile.

    Compiling all test files takes each worker of each part 7 s of processor time. What is left after the collection
    of the tests lives until the end, so the garbage collector does not look at it any more.
    """
    keep, sys.dont_write_bytecode = sys.dont_write_bytecode, False
    gc.disable()
    try:
        return (yield)
    finally:
        sys.dont_write_bytecode = keep
        gc.freeze()
        gc.enable()


def part_of(item: pytest.Item) -> str:
    """Return the part of a test by its marks."""
    return next((part for part, marks in MARKS.items() if any(map(item.get_closest_marker, marks))), "quick")


def may_have(part: str, file: Path, *, smoke: bool = False) -> bool:
    """Return whether a file may have tests of a part; without an import, which takes seconds for all files.

    A mark is written in the file, or in a ``conftest.py`` of its directory, as that of a fixture's parameter. A file
    whose tests all have a mark of another part has no quick ones.
    """
    texts = [path.read_text(encoding="utf-8") for path in (file, file.with_name("conftest.py")) if path.is_file()]
    if part not in MARKS:
        of_all = _MARKS_OF_ALL.search(texts[0]) if texts else None
        return of_all is None or not any(f"mark.{mark}" in of_all[0] for marks in MARKS.values() for mark in marks)
    if smoke and part != "gpu" and not any("mark.smoke" in text for text in texts):
        return False
    return any(f"mark.{mark}" in text for mark in MARKS[part] for text in texts)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import the files without tests of the part."""
    part = config.getoption("--part")
    if part and collection_path.is_file() and not may_have(part, collection_path, smoke=config.getoption("--smoke")):
        return True
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests of other parts or sets; each must be collected when it is the turn of its own part."""
    parts = [part_of(item) for item in items]
    collected = {key for key in set(zip(parts, (item.path for item in items), strict=True)) if may_have(*key)}
    missed = [item.nodeid for own, item in zip(parts, items, strict=True) if (own, item.path) not in collected]
    if missed:
        raise pytest.UsageError(f"no part would run {missed[0]}: write its mark in its file, as pytest.mark.NAME")
    part, smoke = config.getoption("--part"), config.getoption("--smoke")
    chosen = [
        part in (None, own) and (not smoke or own in ("gpu", "quick") or item.get_closest_marker("smoke") is not None)
        for own, item in zip(parts, items, strict=True)
    ]
    left = [item for item, mine in zip(items, chosen, strict=True) if mine]
    left = first_and_last(left) if config.getoption("--few") else left
    kept = {id(item) for item in left}
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in kept])
    items[:] = sorted(left, key=lambda item: item.path.name not in LONG)


def first_and_last(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return, of the instances of each test, the first and the last one; the order stays."""
    instances: dict[str, list[pytest.Item]] = {}
    for item in items:
        instances.setdefault(item.nodeid.partition("[")[0], []).append(item)
    kept = {id(item) for group in instances.values() for item in (group[0], group[-1])}
    return [item for item in items if id(item) in kept]


@pytest.fixture(scope="session", autouse=True)
def runtime_of_the_tests() -> Iterator[None]:
    """Separate embedded clusters from the user's and those of other workers; short, because it contains sockets."""
    with tempfile.TemporaryDirectory(prefix="ft-", dir="/tmp") as directory, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", directory)
        patch.setenv("XDG_STATE_HOME", f"{directory}/state")  # which code was checked
        yield


@pytest.fixture(scope="session")
def warm_start() -> Iterator[WarmStart]:
    """Start the server from which the nodes of all embedded clusters are forked; it is needed at most once."""
    with WarmStart() as server:
        yield server


@pytest.fixture(autouse=True)
def warm_nodes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the nodes of embedded clusters from the server, except where a test is of the ordinary start (`cold`)."""
    if request.node.get_closest_marker("cluster") and not request.node.get_closest_marker("cold"):
        for name, value in request.getfixturevalue("warm_start").environment.items():
            monkeypatch.setenv(name, value)


@pytest.fixture(scope="session")
def slurm_is_here() -> None:
    """Skip with the missing requirements without Slurm; fail if it is required."""
    missing = LoopbackSlurm.missing()
    if missing is not None and "slurm" in os.environ.get(REQUIRED, "").split(","):
        pytest.fail(missing)
    if missing is not None:
        pytest.skip(missing)


@pytest.fixture(scope="session")
def shared_cluster(slurm_is_here) -> Iterator[LoopbackSlurm]:
    """Start the cluster: eight nodes, the first two with the feature `fast`, and a scheduler pass every second."""
    small = LoopbackPartition("small", nodes="node[01-04]", tier=100, extra="MaxTime=30")
    graceless = LoopbackPartition("graceless", preempt="cancel")
    kinds = (LoopbackPartition("west", nodes="node[01-03]"), LoopbackPartition("east", nodes="node[04-08]"))
    with LoopbackSlurm(
        nodes=8,
        features={"node01": "fast", "node02": "fast"},
        partitions=(*PARTITIONS, small, graceless, *kinds),
        bf_interval=1,
        kill_wait=20,
    ) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared_cluster, monkeypatch) -> Iterator[LoopbackSlurm]:
    """Provide the cluster to one test, empty, with this process as a client."""
    for name in ("PATH", "SLURM_CONF"):
        monkeypatch.setenv(name, shared_cluster.environment[name])
    yield shared_cluster
    shared_cluster.clear()


@pytest.fixture(scope="session")
def globus_packages() -> None:
    """Skip without the packages of Globus Compute; fail if they are required."""
    packages = ("globus_compute_sdk", "globus_compute_endpoint")
    if missing := [package for package in packages if find_spec(package) is None]:
        _skip("globus", f"{', '.join(missing)} not installed (pip install -e '.[dev]')")


@pytest.fixture(scope="session")
def globus_is_here(globus_packages: None) -> None:
    """Skip without RabbitMQ, too; fail if it is required."""
    if missing := broker_missing():
        _skip("globus", missing)


def _skip(requirement: str, why: str) -> None:
    if requirement in os.environ.get(REQUIRED, "").split(","):
        pytest.fail(why)
    pytest.skip(why)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """Start one browser for all tests of a module; skip without one, unless it is required."""
    executable = find()
    if executable is None:
        reason = "no Chromium on PATH (Debian: apt-get install chromium)"
        if "chromium" in os.environ.get(REQUIRED, "").split(","):
            pytest.fail(reason)
        pytest.skip(reason)
    window = Browser(executable)
    yield window
    window.close()
