"""Two embedded clusters as two sites with real endpoints, the holes of which follow a seed: see ``sites.py --live``."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median
from threading import Barrier
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from freetrain_parsl.campaign.lock import DriverState, driver_state
from freetrain_parsl.campaign.store import RunStore
from freetrain_parsl.cluster.client import EmbeddedCluster
from freetrain_parsl.extensions.globus.storage.login import CLIENT_ID, CLIENT_SECRET
from freetrain_parsl.extensions.globus.storage.mover_directory import MoverState
from freetrain_parsl.report.projection.run import RunState

if TYPE_CHECKING:
    import argparse

sys.path.insert(0, str(Path(__file__).parents[1]))  # the tests' stand-ins of Globus' services

from tests.support.globus.compute_service import ComputeService
from tests.support.globus.endpoint_daemon import EndpointDaemon
from tests.support.globus.rabbitmq import LoopbackRabbit
from tests.support.globus.transfer_service import LoopbackCollections, TransferService

NAMES = ("day", "night")
NODES = 2  # of each site, and training jobs
STEP = 0.2  # seconds
LONGEST_START = 300.0  # seconds until the first training jobs have nodes
BATCH = 10
UUIDS = {
    "day": "aaaaaaaa-0000-4000-8000-000000000000",
    "night": "bbbbbbbb-0000-4000-8000-000000000000",
    "home": "cccccccc-0000-4000-8000-000000000000",
}
CONFIGURATION = Path(__file__).parents[1] / "configs" / "globus-compute"
APP = f"""\
import time

from freetrain_parsl import training_app


@training_app
def train(session, *, lr):
    # Only where it trains: the sites import this file at each look, too.
    import torch
    from torch.utils.data import TensorDataset

    layers = torch.nn.Sequential(torch.nn.Linear(8, SIZE // 9), torch.nn.Linear(SIZE // 9, 1))
    model, _ = session.prepare(layers, torch.optim.SGD, lr=lr)
    data = session.loader(TensorDataset(torch.ones(1000, 8)), batch_size={BATCH})
    for _ in session.epochs(1000):
        for (batch,) in data:
            session.step(model(batch).square().mean())
            time.sleep({STEP})
"""
CAMPAIGN = """\
name: moving
trainings:
  - app: moving_app.py:train
    name: t{lr}
    max_nodes: 1
    fuse: false
    rescale_costs: {up: 1 s, down: 1 s, start: 2 s}
    grid: {lr: [0.000001, 0.000002]}
"""
SITE = """\
system: local
block: {cluster: %s}
planner: {startup: 5 s, min_useful: 4 s, closing_margin: 2 s, max_walltime: 30 min, idle_timeout: 2 s, settle: 0.5 s}
rate_limits: {poll_interval: 0.5 s, submissions_per_minute: 100}
trainings: {threads_per_slot: 1, heartbeat_timeout: 6 s}
checkpoints:
  interval: 2 s
  directory: %s
  globus:
    collection: %s
    path: /ft
    lease: 30 s
    home: {collection: %s, path: /home/ft}
"""


@dataclass(frozen=True)
class Busy:
    """A neighbour's job on one node: when it comes, and how long it runs, seconds."""

    begins: float
    seconds: float


def neighbours(number: int, seed: int, seconds: float, phase: float) -> list[Busy]:
    """Return the neighbours of a site: all nodes in every other phase, and one node for a while in the others."""
    chance = random.Random(f"{seed}-{number}")
    jobs = []
    for index in range(int(seconds / phase) + 1):
        begins = index * phase
        if index % 2 != number:
            jobs += [Busy(begins + chance.uniform(0, 2), phase - 4) for _ in range(NODES)]
        else:
            jobs.append(Busy(begins + chance.uniform(0.2, 0.6) * phase, chance.uniform(0.1, 0.3) * phase))
    return sorted(jobs, key=lambda job: job.begins)


class Stand:
    """Clusters, endpoints and services of one way, from an empty directory."""

    def __init__(
        self, directory: Path, stack: ExitStack, seed: int, options: argparse.Namespace, *, with_endpoints: bool
    ) -> None:
        self.directory = directory
        self._options = options
        for name in (*NAMES, "home/home", "rabbit", "user"):
            (directory / name).mkdir(mode=0o700, parents=True)
        places = {UUIDS[name]: directory / name for name in (*NAMES, "home")}
        self.transfer = stack.enter_context(TransferService(LoopbackCollections(places)))
        self.compute: ComputeService | None = None
        if with_endpoints:
            rabbit = stack.enter_context(LoopbackRabbit(directory / "rabbit"))
            self.compute = stack.enter_context(ComputeService(rabbit.url))
            self.transfer.trust(self.compute)
        auth = {"GLOBUS_SDK_SERVICE_URL_AUTH": self.transfer.url}
        self.environment = {
            **(auth if self.compute is None else self.compute.environment),
            "GLOBUS_SDK_SERVICE_URL_TRANSFER": self.transfer.url,
            CLIENT_ID: "dddddddd-0000-4000-8000-000000000000",
            CLIENT_SECRET: "the-secret-of-the-mover",
            "GLOBUS_COMPUTE_USER_DIR": str(directory / "user"),
            "XDG_STATE_HOME": str(directory / "user"),
        }
        kept = ",".join([CLIENT_SECRET, *(name for name in self.environment if name.startswith("GLOBUS_SDK_"))])
        (directory / "moving_app.py").write_text(APP.replace("SIZE", str(options.parameters)))
        (directory / "campaign.yaml").write_text(CAMPAIGN)
        own = "" if options.default_periods is None else "#"  # comments out what is not a default
        self.clusters, self._neighbours = {}, {}
        lines = [f"{own}look: {options.live_look:g} s", f"{own}status: 6 s", "sites:"]
        for number, name in enumerate(NAMES):
            cluster = stack.enter_context(EmbeddedCluster(directory / f"cluster-{name}", nodes=NODES))
            self.clusters[name] = cluster
            self._neighbours[name] = neighbours(number, seed, options.seconds, options.live_phase)
            site = SITE % (cluster.directory, directory / name / "ft", UUIDS[name], UUIDS["home"])
            for key in ("  interval: ", "  lease: "):
                site = site.replace(key, f"{own}{key}")
            (directory / f"{name}.yaml").write_text(site)
            if self.compute is None:
                continue
            (directory / f"endpoint-{name}").mkdir()
            extra = {"FREETRAIN_REMOTE_DIR": str(directory / name / "runs"), "FREETRAIN_REMOTE_KEEP": kept}
            with patch.dict(os.environ, self.environment):
                daemon = EndpointDaemon(directory / f"endpoint-{name}", self.compute, CONFIGURATION, extra)
            stack.enter_context(daemon)
            latency = "{latency: 1 s}"
            lines.append(
                f"  - {{name: {name}, endpoint: {daemon.id}, config: {name}.yaml, to_home: {latency}, "
                f"from_home: {latency}}}"
            )
        (directory / "sites.yaml").write_text("\n".join([*lines, ""]))
        stack.callback(self._kill_drivers)

    def run(self, where: tuple[str, ...], steady: Barrier) -> dict[str, Any]:
        """Run the campaign; once all ways are at work, go through the phases, count what is done, and stop it.

        Before the first phase, the nodes are as in it: the night site has none.
        """
        process = self._start(*where)
        night = self.clusters["night"].client
        before = [
            night.submit(["sleep", "900"], nodes=1, walltime=timedelta(seconds=901), preemptible=False)
            for _ in range(NODES)
        ]
        self._wait_for_work(process, night_only="night.yaml" in where)
        steady.wait(LONGEST_START)
        night.cancel(before)
        begin, done = time.monotonic(), self.steps()
        requests = self.requests()
        crowds = [threading.Thread(target=self._crowd, args=(name, begin), daemon=True) for name in NAMES]
        for crowd in crowds:
            crowd.start()
        time.sleep(self._options.seconds)
        hours = self._options.seconds / 3600
        figures = {
            "node_seconds": (self.steps() - done) * STEP,
            **{key: (number - requests[key]) / hours for key, number in self.requests().items()},
        }
        process.send_signal(signal.SIGINT)
        process.wait(200)
        return figures

    def run_undisturbed(self, seconds: float) -> dict[str, float]:
        """Run the campaign at all sites without neighbours; return requests per hour, once all jobs have nodes."""
        process = self._start("--sites", "sites.yaml")
        self._wait_for_work(process, night_only=False)
        begin, requests = time.monotonic(), self.requests()
        time.sleep(seconds)
        hours = (time.monotonic() - begin) / 3600
        figures = {key: (number - requests[key]) / hours for key, number in self.requests().items()}
        process.send_signal(signal.SIGINT)
        process.wait(200)
        return figures

    def _start(self, *where: str) -> subprocess.Popen[bytes]:
        command = [str(Path(sys.executable).with_name("freetrain")), "run", "campaign.yaml", *where, "--run-dir", "run"]
        with (self.directory / "output.log").open("w") as log:
            return subprocess.Popen(
                command, cwd=self.directory, env={**os.environ, **self.environment}, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip

    def _wait_for_work(self, process: subprocess.Popen[bytes], *, night_only: bool) -> None:
        """Wait until all training jobs have nodes, or, where there are none yet, until a driver is alive."""
        end = time.monotonic() + LONGEST_START
        while time.monotonic() < end and process.poll() is None:
            stores = self.stores()
            running = {item.name for store in stores for item in store.trainings() if item.nodes and item.share}
            if len(running) == NODES or (night_only and any(store.last_driver() for store in stores)):
                return
            time.sleep(1)
        raise RuntimeError(f"no training job has started: {(self.directory / 'output.log').read_text()[-2000:]}")

    def steps(self) -> float:
        """Return the number of steps that all training jobs have done."""
        shares: dict[str, float] = {}
        for store in self.stores():
            for item in store.trainings():
                shares[item.name] = max(shares.get(item.name, 0.0), item.share or 0.0)
        return sum(shares.values()) * 1000 * 1000 / BATCH

    def requests(self) -> dict[str, int]:
        """Return the number of requests to each service, and of calls to the endpoints."""
        calls = self.compute.count("POST", "/v3/endpoints/{endpoint}/submit") if self.compute else 0
        return {
            "calls_per_hour": calls,
            "compute_per_hour": len(self.compute.requests) if self.compute else 0,
            "transfer_per_hour": len(self.transfer.requests),
        }

    def _crowd(self, name: str, begin: float) -> None:
        for job in self._neighbours[name]:
            if job.begins > self._options.seconds:
                return
            time.sleep(max(0.0, begin + job.begins - time.monotonic()))
            self.clusters[name].client.submit(
                ["sleep", f"{job.seconds:.1f}"], nodes=1, walltime=timedelta(seconds=job.seconds + 1), preemptible=False
            )

    def stores(self) -> list[RunStore]:
        """Return the stores of all drivers."""
        found = [*self.directory.glob("*/runs/*/run"), self.directory / "run"]
        stores = [RunStore(path) for path in found if (path / "campaign.sqlite").is_file()]
        return [store for store in stores if store.fact("sites", None) is None]

    def _kill_drivers(self) -> None:
        for store in self.stores():
            driver = store.last_driver()
            if driver is not None and driver_state(driver) is DriverState.ALIVE:
                os.kill(driver.pid, signal.SIGKILL)


def way(seed: int, where: tuple[str, ...], options: argparse.Namespace, steady: Barrier) -> dict[str, Any]:
    """Run one way; return its figures."""
    with tempfile.TemporaryDirectory(prefix="freetrain-sites-") as folder, ExitStack() as stack:
        stand = Stand(Path(folder), stack, seed, options, with_endpoints="--sites" in where)
        figures = stand.run(where, steady)
        audit = {"samples_lost": 0, "duplicate_samples": 0}
        copies = []
        for store in stand.stores():
            copies += MoverState.read(store.directory).measured
            for driver in store.drivers():
                if driver.journal is not None and Path(driver.journal).exists():
                    for training in RunState(Path(driver.journal)).refresh().trainings.values():
                        for key in audit:
                            audit[key] += training.progress.get(key, 0)
        state = stand.directory / "run" / "coordinator.json"
        moves, starts = 0, []
        if state.exists():
            document = json.loads(state.read_text())["coordinator"]
            moves = sum(one["moves"] for one in document["trainings"].values())
            starts = [start for site in document["sites"].values() for start in site["starts"]]
        fetched = [copy for copy in copies if copy.from_home]
        return {
            **figures,
            "moves": moves,
            "median_start_seconds": median(starts) if starts else 0.0,
            "fetches": len(fetched),
            "fetch_seconds": sum(copy.seconds for copy in fetched),
            "fetch_bytes": sum(copy.size for copy in fetched),
            "bytes_to_home": sum(copy.size for copy in copies if not copy.from_home),
            **audit,
        }


def requests_row(options: argparse.Namespace) -> dict[str, Any]:
    """Count the requests of a campaign at two sites with the default periods."""
    with (
        tempfile.TemporaryDirectory(prefix="ft-") as runtime,
        patch.dict(os.environ, {"XDG_RUNTIME_DIR": runtime}),
        tempfile.TemporaryDirectory(prefix="freetrain-sites-") as folder,
        ExitStack() as stack,
    ):
        stand = Stand(Path(folder), stack, 0, options, with_endpoints=True)
        figures = stand.run_undisturbed(options.default_periods)
    return {
        "sites": len(NAMES),
        "trainings": NODES,
        "seconds": options.default_periods,
        **figures,
        "load_average": os.getloadavg()[1],
    }


def live_row(seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Run one pair of sites: each alone, at the same time, then both together."""
    with tempfile.TemporaryDirectory(prefix="ft-") as runtime, patch.dict(os.environ, {"XDG_RUNTIME_DIR": runtime}):
        # The endpoints are other users by number, with other default places for the registry of clusters.
        with ThreadPoolExecutor(len(NAMES)) as pool:
            steady = Barrier(len(NAMES))
            alone = list(pool.map(lambda name: way(seed, ("--config", f"{name}.yaml"), options, steady), NAMES))
        together = way(seed, ("--sites", "sites.yaml"), options, Barrier(1))
    best = max(one["node_seconds"] for one in alone)
    return {
        "seed": seed,
        "best_single": best,
        "worst_single": min(one["node_seconds"] for one in alone),
        "together": together["node_seconds"],
        "ratio": together["node_seconds"] / best,
        "load_average": os.getloadavg()[1],
        **{key: value for key, value in together.items() if key != "node_seconds"},
    }
