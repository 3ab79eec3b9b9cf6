"""A campaign with a home on Globus: its driver is killed at one site, another site continues from its checkpoints."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

import pytest
import torch

from freetrain_parsl.cluster.client import EmbeddedCluster
from freetrain_parsl.extensions.globus.storage.login import CLIENT_ID, CLIENT_SECRET
from freetrain_parsl.storage.posix import CheckpointDirectory
from freetrain_parsl.training.fragment import run_local
from tests.campaign.shell import APP, Shell
from tests.campaign.slow_app import train
from tests.support.globus.transfer_service import LoopbackCollections, TransferService

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.cluster, pytest.mark.globus]

SAMPLES, EPOCHS = 200, 6
A, B, HOME = (f"{digit * 8}-0000-4000-8000-000000000000" for digit in "abc")

SITE = """\
system: local
block: {cluster: %s}
planner: {startup: 5 s, min_useful: 2 s, closing_margin: 1.5 s, max_walltime: 300 s, idle_timeout: 2 s, settle: 1 s}
rate_limits: {poll_interval: 0.5 s, submissions_per_minute: 100}
trainings: {threads_per_slot: 1, heartbeat_timeout: 4 s}
checkpoints:
  interval: 1 s
  directory: %s
"""
GLOBUS = """\
  globus:
    collection: %s
    path: /ft
    lease: 20 s
    home: {collection: %s, path: /home/ft}
"""
CAMPAIGN = f"""\
name: two
trainings:
  - app: {APP}:train
    name: t{{lr}}
    max_nodes: 1
    fuse: false
    arguments: {{epochs: {EPOCHS}, slow: SLOW}}
    grid: {{lr: [0.01, 0.02]}}
"""


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackCollections]:
    for name in ("a", "b", "home/home"):
        (tmp_path / name).mkdir(mode=0o700, parents=True)
    machine = LoopbackCollections({A: tmp_path / "a", B: tmp_path / "b", HOME: tmp_path / "home"})
    with TransferService(machine) as service:
        monkeypatch.setenv("GLOBUS_SDK_SERVICE_URL_TRANSFER", service.url)
        monkeypatch.setenv("GLOBUS_SDK_SERVICE_URL_AUTH", service.url)
        monkeypatch.setenv(CLIENT_ID, "dddddddd-0000-4000-8000-000000000000")
        monkeypatch.setenv(CLIENT_SECRET, "secret")
        monkeypatch.setenv("HOME", str(tmp_path))
        yield machine


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[EmbeddedCluster]:
    with EmbeddedCluster(tmp_path / "cluster", nodes=2) as cluster:
        yield cluster


def shell_at(directory: Path, site: str) -> Shell:
    directory.mkdir()
    return Shell(directory, site=site, campaign=CAMPAIGN)


def parameters(root: Path, training: str) -> dict[str, torch.Tensor]:
    path, _ = CheckpointDirectory(root, training).entries()[0].verify()
    return torch.load(path, weights_only=True)["objects"]["model"]


def test_a_campaign_whose_site_dies_goes_on_at_another_with_the_same_results(
    machine: LoopbackCollections, cluster: EmbeddedCluster, tmp_path: Path
) -> None:
    sites = {
        name: SITE % (cluster.name, tmp_path / name / "ft") + GLOBUS % (collection, HOME)
        for name, collection in (("a", A), ("b", B))
    }
    one = shell_at(tmp_path / "shell-a", sites["a"])
    one.slow.touch()
    driver = one.start_campaign()
    home = tmp_path / "home" / "home" / "ft" / "checkpoints"
    try:
        end = time.monotonic() + 240
        while len({path.parents[2] for path in home.glob("*/*/step-*[1-9]*/manifest.json")}) < 2:
            assert driver.poll() is None, driver.communicate()
            assert time.monotonic() < end
            time.sleep(0.2)
        status = one.status()
        driver.kill()
        driver.wait(10)
    finally:
        one.close()
    assert {item["state"] for item in status["trainings"]} <= {"running", "waiting"}
    other = shell_at(tmp_path / "shell-b", sites["b"])
    done = other.run("run", "campaign.yaml", "--config", "site.yaml", "--run-dir", "run", "--json")
    assert done.returncode == 0, done.stderr
    assert "another site owns it (generation 1" in done.stderr
    other.check_results([EPOCHS * SAMPLES] * 2, resumed=True)
    other.close()

    for training in ("t0.01", "t0.02"):
        run_local(train, lr=float(training[1:]), epochs=EPOCHS, directory=tmp_path / f"alone-{training}")
        moved, still = parameters(tmp_path / "b" / "ft", training), parameters(tmp_path / f"alone-{training}", "alone")
        torch.testing.assert_close(moved, still, rtol=0, atol=0)
    assert json.loads(done.stdout)["home"] == []
    whole = {path.parents[2].name for path in home.glob("*/gen-0000000002/step-*/manifest.json")}
    assert whole == {"t0.01", "t0.02"}
