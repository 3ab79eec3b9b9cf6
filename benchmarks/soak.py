"""Resource usage of a driver in a long run: memory, descriptors, threads and journal, which must not grow with time.

An embedded cluster with a busy main queue runs for ``--minutes``; ``--trainings`` small training jobs are submitted
evenly over that time. Every few seconds the driver's process is measured. The table compares the second quarter of the
run with the last; the first is excluded, because imports and caches fill in it. The growth per hour is the slope of a
line fitted to all samples after the first quarter.

``--json FILE`` saves the table and all samples, ``--plot FILE`` draws them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path
from statistics import linear_regression, median
from typing import TYPE_CHECKING, Any

import parsl
import psutil
from _report import report
from parsl.config import Config

from freetrain_parsl import (
    EmbeddedClusterProvider,
    FreeTrainExecutor,
    PlannerSettings,
    RateLimits,
    TrainingSettings,
    training_app,
)
from freetrain_parsl.cluster.workload import generate_workload

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future

PLANNER = PlannerSettings(
    startup=timedelta(seconds=8),
    min_useful=timedelta(seconds=4),
    closing_margin=timedelta(seconds=2),
    max_walltime=timedelta(minutes=10),
    idle_timeout=timedelta(seconds=5),
    settle=timedelta(seconds=1),
    replan_interval=timedelta(seconds=5),
)
EVERY = 5.0  # seconds between samples
QUANTITIES = ("memory_mb", "descriptors", "threads", "journal_kb_per_training")


@training_app(max_nodes=2)
def train(session: Any, *, epochs: int, pause: float) -> dict[str, Any]:
    """Train a small regression, similar to the load of the demo."""
    import time

    import torch
    from torch.nn.functional import mse_loss
    from torch.utils.data import TensorDataset

    x = torch.randn(256, 16, generator=torch.Generator().manual_seed(1))
    net = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    model, _ = session.prepare(net, torch.optim.Adam, lr=1e-3)
    data = session.loader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=32)
    for _ in session.epochs(epochs):
        for inputs, targets in data:
            time.sleep(pause)
            session.step(mse_loss(model(inputs), targets))
    return {"steps": session.metrics["steps"], "samples": session.metrics["samples"]}


class Meter:
    """Measures this process, the driver, until stopped.

    Parameters
    ----------
    journal
        Journal file.
    futures
        Futures of the training jobs submitted so far.
    """

    def __init__(self, journal: Path, futures: Sequence[Future[Any]]) -> None:
        self._thread = threading.Thread(target=self._run, name="soak-meter", daemon=True)
        self.samples: list[dict[str, float]] = []
        self._journal = journal
        self._futures = futures
        self._over = threading.Event()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def _run(self) -> None:
        """Take a sample every few seconds."""
        process, begin = psutil.Process(), time.monotonic()
        while not self._over.wait(EVERY):
            done = sum(future.done() for future in self._futures)
            size = sum(path.stat().st_size for path in self._journal.parent.glob(f"{self._journal.name}*"))
            self.samples.append(
                {
                    "seconds": time.monotonic() - begin,
                    "trainings_done": done,
                    "memory_mb": process.memory_info().rss / 1e6,
                    "descriptors": process.num_fds(),
                    "threads": process.num_threads(),
                    "journal_kb_per_training": size / 1e3 / max(1, done),
                }
            )

    def stop(self) -> list[dict[str, float]]:
        """End the thread and return the samples."""
        self._over.set()
        self._thread.join()
        return self.samples


def soak(minutes: float, trainings: int, nodes: int, directory: Path) -> tuple[list[dict[str, float]], int]:
    """Run the load; return the samples and the number of training jobs with correct results."""
    queue = generate_workload(nodes=nodes, duration=timedelta(minutes=minutes), seed=2, load=0.6)
    provider = EmbeddedClusterProvider(nodes=nodes, workload=queue, cluster_dir=str(directory / "cluster"))
    executor = FreeTrainExecutor(
        provider=provider,
        planner=PLANNER,
        trainings=TrainingSettings(threads_per_slot=1),
        rate_limits=RateLimits(poll_interval=timedelta(seconds=1), submissions_per_minute=60),
        checkpoint_dir=directory / "checkpoints",
    )
    futures: list[Future[Any]] = []
    epochs = 8
    with parsl.load(Config(executors=[executor], run_dir=str(directory / "parsl"), strategy="none")):
        meter = Meter(executor.journal_path, futures)
        meter.start()
        begin = time.monotonic()
        for number in range(trainings):
            time.sleep(max(0.0, begin + number * 60 * minutes / trainings - time.monotonic()))
            futures.append(train.options(name=f"t{number}")(epochs=epochs, pause=0.05))
        right = sum(future.result()["samples"] == epochs * 256 for future in futures)
        return meter.stop(), right


def table(samples: Sequence[dict[str, float]]) -> list[dict[str, Any]]:
    """Compare the second quarter of the run with the last."""
    quarter = len(samples) // 4
    settled, early, late = samples[quarter:], samples[quarter : 2 * quarter], samples[-quarter:]
    rows = []
    for quantity in QUANTITIES:
        slope = linear_regression([row["seconds"] for row in settled], [row[quantity] for row in settled]).slope
        rows.append(
            {
                "quantity": quantity,
                "second_quarter": median(row[quantity] for row in early),
                "last_quarter": median(row[quantity] for row in late),
                "most": max(row[quantity] for row in settled),
                "growth_per_hour": 3600 * slope,
            }
        )
    return rows


def plot(samples: Sequence[dict[str, float]], path: Path) -> None:
    """Draw each quantity over time."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(len(QUANTITIES), 1, sharex=True, figsize=(8, 8), layout="constrained")
    minutes = [row["seconds"] / 60 for row in samples]
    for axis, quantity in zip(axes, QUANTITIES, strict=True):
        axis.plot(minutes, [row[quantity] for row in samples])
        axis.set_ylim(bottom=0)
        axis.set_ylabel(quantity.replace("_", " "), fontsize=8)
    axes[-1].set_xlabel("minutes")
    figure.savefig(path, dpi=110)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the soak test and report it; return 1 if a training job has a wrong result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--trainings", type=int, default=200)
    parser.add_argument("--nodes", type=int, default=6)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(prefix="freetrain-soak-") as directory:
        samples, right = soak(options.minutes, options.trainings, options.nodes, Path(directory))
    rows = table(samples)
    report(f"Soak: {right} of {options.trainings} training jobs right", rows, ["freetrain-parsl", "parsl", "torch"])
    if options.json is not None:
        options.json.write_text(json.dumps({"rows": rows, "samples": samples}, indent=2) + "\n", encoding="utf-8")
    if options.plot is not None:
        plot(samples, options.plot)
    return int(right != options.trainings)


if __name__ == "__main__":
    sys.exit(main())
