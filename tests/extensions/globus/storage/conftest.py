"""The real Globus SDK, against stand-ins of Globus Transfer and Globus Auth on the loopback interface."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass, field
from datetime import timedelta
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

from freetrain_parsl.extensions.globus.storage.collections import CollectionPath, GlobusSettings
from freetrain_parsl.extensions.globus.storage.home import check_places
from freetrain_parsl.extensions.globus.storage.login import CLIENT_ID, CLIENT_SECRET, logged_in, make_app
from freetrain_parsl.extensions.globus.storage.mover import Mover
from freetrain_parsl.extensions.globus.storage.mover_directory import MoverPace
from freetrain_parsl.storage.posix import CheckpointDirectory
from tests.conftest import REQUIRED
from tests.support.globus.transfer_service import LoopbackCollections, TransferService

if TYPE_CHECKING:
    from pathlib import Path

    from freetrain_parsl.extensions.globus.storage.collections import Collections

LEASE = 100.0
A, B, HOME = (f"{digit * 8}-0000-4000-8000-000000000000" for digit in "abc")
_PACE = MoverPace(turn=0.0, scan=0.0, copies=0.0, request=0.0, poll_least=0.0, poll_most=0.0, retry=1.0, longest=10.0)


@dataclass
class Clock:
    """Time that only tests move."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class World:
    """Two sites and a home, each a directory that plays a collection; each site has a network of its own."""

    path: Path
    monkeypatch: pytest.MonkeyPatch
    clock: Clock = field(default_factory=Clock)
    stack: list = field(default_factory=list)

    def __post_init__(self) -> None:
        for name in ("site-a", "site-b", "home", "run-a", "run-b"):
            (self.path / name).mkdir()
            (self.path / name).chmod(0o700)
        self.machine = LoopbackCollections({A: self.path / "site-a", B: self.path / "site-b", HOME: self.path / "home"})
        self.services = {name: TransferService(self.machine) for name in "ab"}
        self.settings = {
            "a": GlobusSettings(CollectionPath(A, "/ft"), CollectionPath(HOME, "/ft"), timedelta(seconds=LEASE)),
            "b": GlobusSettings(CollectionPath(B, "/ft"), CollectionPath(HOME, "/ft"), timedelta(seconds=LEASE)),
        }

    def root(self, site: str) -> Path:
        path = self.path / f"site-{site}" / "ft"
        path.mkdir(mode=0o700, exist_ok=True)
        return path

    def collections(self, site: str) -> Collections:
        from freetrain_parsl.extensions.globus.storage.collections import Collections

        service = self.services[site]
        self.monkeypatch.setenv("GLOBUS_SDK_SERVICE_URL_TRANSFER", service.url)
        self.monkeypatch.setenv("GLOBUS_SDK_SERVICE_URL_AUTH", service.url)
        self.monkeypatch.setenv("HOME", str(self.path / f"run-{site}"))
        app = logged_in(make_app())
        self.stack.append(app)
        return Collections(app.__enter__())

    def mover(self, site: str, *, check: bool = True, pace: MoverPace = _PACE) -> Mover:
        collections = self.collections(site)
        if check:
            check_places(collections, self.settings[site], self.root(site))
        return Mover(
            self.settings[site], self.root(site), self.path / f"run-{site}", f"{site}1", collections,
            clock=self.clock, pace=pace,
        )  # fmt: skip

    def save(self, site: str, training: str, step: int, content: bytes = b"state") -> None:
        """Write a checkpoint, as a training job does."""
        directory = CheckpointDirectory(self.root(site), training)
        directory.open()
        directory.publish(step, lambda sink: sink.write(content), {"format": 3})
        directory.close()

    def steps(self, site: str, training: str) -> list[int]:
        return [entry.step for entry in CheckpointDirectory(self.root(site), training).entries()]

    def content(self, site: str, training: str) -> bytes:
        entry = CheckpointDirectory(self.root(site), training).entries()[0]
        entry.verify()
        return (entry.path / "state.pt").read_bytes()

    def at_home(self, training: str) -> list[str]:
        """Return the whole checkpoints at home."""
        found = (self.path / "home" / "ft" / "checkpoints" / training).glob("gen-*/step-*/manifest.json")
        return sorted(f"{path.parents[1].name[-1]}:{int(path.parent.name[5:])}" for path in found)

    def run(self, *movers: Mover, until, seconds: float = 1.0, most: int = 200) -> None:
        """Let movers work until something holds."""
        for number in itertools.count():
            if until():
                return
            assert number < most, [(mover.lines(), mover._carried, mover._carrier) for mover in movers]
            for mover in movers:
                mover.turn()
            self.machine_idle()
            self.clock.now += seconds

    def machine_idle(self) -> None:
        """Wait until all tasks that can end have ended."""
        held = {"offline", "hold"}
        active = [task for task in self.machine.tasks.values() if task.document["status"] == "ACTIVE"]
        if not any(task.mishap in held for task in active):
            self.machine.wait()


@pytest.fixture(scope="session")
def globus_is_here() -> None:
    """Skip without the Globus SDK; fail if it is required."""
    if find_spec("globus_sdk") is None:
        missing = "the extra globus is not installed"
        if "globus" in os.environ.get(REQUIRED, "").split(","):
            pytest.fail(missing)
        pytest.skip(missing)


@pytest.fixture
def world(globus_is_here, tmp_path, monkeypatch):
    monkeypatch.setenv(CLIENT_ID, "dddddddd-0000-4000-8000-000000000000")
    monkeypatch.setenv(CLIENT_SECRET, "secret")
    world = World(tmp_path, monkeypatch)
    with world.services["a"], world.services["b"]:
        yield world
        for app in world.stack:
            app.__exit__(None, None, None)
        world.machine.go_on()
