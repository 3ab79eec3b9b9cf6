"""One campaign at two sites, with real endpoints and embedded clusters: one site's nodes are taken, and it dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from freetrain_parsl.campaign.lock import DriverState, driver_state
from freetrain_parsl.campaign.store import RunStore
from freetrain_parsl.cluster.client import EmbeddedCluster
from freetrain_parsl.extensions.globus.storage.login import CLIENT_ID, CLIENT_SECRET
from freetrain_parsl.report.projection.run import RunState
from freetrain_parsl.storage.posix import CheckpointDirectory
from freetrain_parsl.training.fragment import run_local
from tests.campaign.shell import APP, FREETRAIN
from tests.campaign.slow_app import train
from tests.support.globus.transfer_service import LoopbackCollections, TransferService

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.globus.endpoint_daemon import EndpointDaemon

pytestmark = [pytest.mark.cluster, pytest.mark.globus]

CONFIGURATION = Path(__file__).parents[4] / "configs" / "globus-compute"
SAMPLES, EPOCHS = 200, 6
_HANGS = 240.0  # seconds after which what has not happened is taken not to happen, as in `tests.campaign.shell`
UUIDS = {name: f"{name * 8}-0000-4000-8000-000000000000" for name in "abc"}
SITE = """\
system: local
block: {cluster: %s}
planner: {startup: 5 s, min_useful: 2 s, closing_margin: 1.5 s, max_walltime: 300 s, idle_timeout: 2 s, settle: 0.5 s}
rate_limits: {poll_interval: 0.5 s, submissions_per_minute: 100}
trainings: {threads_per_slot: 1, heartbeat_timeout: 4 s}
checkpoints:
  interval: 1 s
  directory: %s
"""
HOME = """\
  globus:
    collection: %s
    path: /ft
    lease: 12 s
    home: {collection: %s, path: /home/ft}
"""
CAMPAIGN = """\
name: four
trainings:
  - app: slow_app.py:train
    name: t{lr}
    max_nodes: 1
    fuse: false
    arguments: {epochs: %d, slow: %s}
    grid: {lr: [0.01, 0.02, 0.03, 0.04]}
"""


@dataclass
class Stand:
    """Two sites with an endpoint each, and the place from which a campaign is run."""

    directory: Path
    clusters: dict[str, EmbeddedCluster]
    endpoints: dict[str, EndpointDaemon]
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        with (self.directory / f"command-{len(self.started)}.log").open("w") as log:
            process = subprocess.Popen(
                [FREETRAIN, *arguments],
                cwd=self.directory,
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        self.started.append(process)
        return process

    def close(self) -> None:
        """Kill the commands, and the drivers at the sites, which outlive them."""
        for process in self.started:
            process.kill()
            process.wait()
        for path in self.directory.glob("*/runs/*/run"):
            driver = RunStore(path).last_driver()
            if driver is not None and driver_state(driver) is DriverState.ALIVE:
                os.kill(driver.pid, signal.SIGKILL)

    def log(self) -> str:
        """Return the output of all commands."""
        return "\n".join(file.read_text() for file in self.directory.glob("*.log"))

    def store(self, name: str) -> RunStore:
        """Return the store of the run at a site."""
        (path,) = (self.directory / name / "runs").glob("*/run")
        return RunStore(path)


@pytest.fixture
def stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, globus_is_here: None) -> Iterator[Stand]:
    from tests.support.globus.compute_service import ComputeService
    from tests.support.globus.endpoint_daemon import EndpointDaemon
    from tests.support.globus.rabbitmq import LoopbackRabbit

    for name in ("a", "b", "home/home", "rabbit", "user"):
        (tmp_path / name).mkdir(mode=0o700, parents=True)
    collections = LoopbackCollections(
        {UUIDS["a"]: tmp_path / "a", UUIDS["b"]: tmp_path / "b", UUIDS["c"]: tmp_path / "home"}
    )
    with ExitStack() as stack:
        rabbit = stack.enter_context(LoopbackRabbit(tmp_path / "rabbit"))
        service = stack.enter_context(ComputeService(rabbit.url))
        transfer = stack.enter_context(TransferService(collections))
        transfer.trust(service)
        for key, value in {
            **service.environment,
            "GLOBUS_SDK_SERVICE_URL_TRANSFER": transfer.url,
            CLIENT_ID: "dddddddd-0000-4000-8000-000000000000",
            CLIENT_SECRET: "the-secret-of-the-mover",
            "GLOBUS_COMPUTE_USER_DIR": str(tmp_path / "user"),
            "XDG_STATE_HOME": str(tmp_path / "user"),
        }.items():
            monkeypatch.setenv(key, value)
        clusters, endpoints = {}, {}
        kept = [CLIENT_SECRET, *(name for name in os.environ if name.startswith("GLOBUS_SDK_"))]
        for name in ("a", "b"):
            clusters[name] = stack.enter_context(EmbeddedCluster(tmp_path / f"cluster-{name}", nodes=2))
            extra = {"FREETRAIN_REMOTE_DIR": str(tmp_path / name / "runs"), "FREETRAIN_REMOTE_KEEP": ",".join(kept)}
            (tmp_path / f"endpoint-{name}").mkdir()
            endpoints[name] = stack.enter_context(
                EndpointDaemon(tmp_path / f"endpoint-{name}", service, CONFIGURATION, extra)
            )
        stand = Stand(tmp_path, clusters, endpoints)
        stack.callback(stand.close)
        yield stand


def eventually(stand: Stand, look: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Wait while the coordinator lives; two endpoints, two drivers and their nodes start slowly on a busy machine."""
    end = time.monotonic() + _HANGS
    while not look():
        assert process.poll() is None, stand.log()
        assert time.monotonic() < end, stand.log()
        time.sleep(0.2)


def parameters(root: Path, training: str) -> dict[str, torch.Tensor]:
    path, _ = CheckpointDirectory(root, training).entries()[0].verify()
    loaded: dict[str, torch.Tensor] = torch.load(path, weights_only=True)["objects"]["model"]
    return loaded


def test_a_campaign_at_two_sites_survives_the_death_of_its_coordinator_and_of_a_site(stand: Stand) -> None:
    place = stand.directory
    names = [f"t{lr}" for lr in (0.01, 0.02, 0.03, 0.04)]
    (place / "slow_app.py").write_text(APP.read_text().replace("+ 1.0", "+ 3.0"))  # steps last until the test continues
    (place / "campaign.yaml").write_text(CAMPAIGN % (EPOCHS, place / "slow"))
    listed = "look: 15 s\nstatus: 6 s\nsites:\n"
    for name in ("a", "b"):
        site = SITE % (stand.clusters[name].directory, place / name / "ft") + HOME % (UUIDS[name], UUIDS["c"])
        (place / f"{name}.yaml").write_text(site)
        latency = "{latency: 0.5 s}"
        listed += (
            f"  - {{name: {name}, endpoint: {stand.endpoints[name].id}, config: {name}.yaml, "
            f"to_home: {latency}, from_home: {latency}}}\n"
        )
    (place / "sites.yaml").write_text(listed)
    (place / "slow").touch()

    # All training jobs run, at both sites, and have saved at home.
    first = stand.start("run", "campaign.yaml", "--sites", "sites.yaml", "--run-dir", "run")
    home = place / "home" / "home" / "ft" / "checkpoints"
    eventually(
        stand,
        lambda: {path.parents[2].name for path in home.glob("*/*/step-*[1-9]*/manifest.json")} == set(names),
        first,
    )
    own = RunStore(place / "run")
    eventually(stand, lambda: sum(item.state == "running" for item in own.trainings()) == 4, first)
    where = {item.name: str(item.remark)[:4] for item in own.trainings()}
    assert sorted(where.values()) == ["at a", "at a", "at b", "at b"]

    # The coordinator is killed; the nodes of one site are taken, and then it dies. Another coordinator continues.
    first.kill()
    first.wait()
    stand.clusters["a"].client.submit(["sleep", "600"], nodes=2, walltime=timedelta(hours=1), preemptible=False)
    driver = stand.store("a").last_driver()
    assert driver is not None
    os.kill(driver.pid, signal.SIGKILL)
    stand.endpoints["a"].stop()
    again = stand.start("resume", "run", "--json")
    eventually(
        stand,
        lambda: all(str(item.remark).startswith("at b") for item in own.trainings() if item.state != "finished"),
        again,
    )
    (place / "slow").unlink()
    assert again.wait(_HANGS) == 0, stand.log()

    # Every sample of every epoch once, and the parameters of an undisturbed run.
    trainings = {item.name: item for item in own.trainings()}
    assert [trainings[name].state for name in names] == ["finished"] * 4
    assert [trainings[name].result["samples"] for name in names] == [EPOCHS * SAMPLES] * 4
    driver = stand.store("b").last_driver()
    assert driver is not None
    run = RunState(Path(str(driver.journal))).refresh()
    for name in names:
        progress = run.trainings[name].progress
        assert (progress["samples_lost"], progress["duplicate_samples"]) == (0, 0)
    moved = [name for name in names if where[name] == "at a"]
    assert all(max(one.resumed_from or 0 for one in run.fragments if one.training == name) > 0 for name in moved)

    for name in names:
        run_local(train, lr=float(name[1:]), epochs=EPOCHS, directory=place / f"alone-{name}")
        torch.testing.assert_close(
            parameters(place / "b" / "ft", name), parameters(place / f"alone-{name}", "alone"), rtol=0, atol=0
        )
    assert (
        json.loads((place / "run" / "coordinator.json").read_text())["coordinator"]["trainings"][moved[0]]["moves"] >= 1
    )
