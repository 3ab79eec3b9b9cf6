"""Our side of `slurm_neighbours.py`: a driver in its own process, as for an ordinary user.

It prints ``ready``, submits its training jobs when it reads a line, and when it reads another prints its account as one
line of JSON and ends together with its jobs.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import parsl
from _slurm_training import CHECKPOINT_SECONDS, SETTINGS
from parsl.config import Config
from parsl.launchers import SrunLauncher
from parsl.providers import SlurmProvider

from freetrain_parsl import (
    CheckpointSettings,
    FreeTrainExecutor,
    PlannerSettings,
    RateLimits,
    TrainingSettings,
    training_app,
)
from freetrain_parsl.report.projection.run import RunState


def make_app(nodes: int) -> Any:
    """Make the training app, whose code is pickled by value."""

    @training_app(max_nodes=nodes, scaling={1: 1.0, nodes: float(nodes)})
    def train(session: Any, *, batch: int, cost: float, samples: int, features: int) -> None:
        import time

        import torch
        from torch.nn.functional import mse_loss
        from torch.utils.data import TensorDataset

        x = torch.randn(samples, features, generator=torch.Generator().manual_seed(1))
        model, _ = session.prepare(torch.nn.Linear(features, 1), torch.optim.SGD, lr=0.01)
        data = session.loader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=batch)
        for _ in session.epochs(1_000_000):
            for a, b in data:
                time.sleep(cost * len(a))
                session.step(mse_loss(model(a), b))

    return train


def account(executor: FreeTrainExecutor) -> dict[str, Any]:
    """Summarize the training job work from the journal."""
    run = RunState(executor.journal_path).refresh()
    progress = [training.progress for training in run.trainings.values()]
    return {
        "step_node_seconds": sum(p.get("slot_seconds", 0.0) for p in progress),
        "samples": sum(p.get("samples", 0) for p in progress),
        "samples_lost": sum(p.get("samples_lost", 0) + p.get("duplicate_samples", 0) for p in progress),
        "blocks": run.blocks_requested,
        "blocks_ended": run.blocks_ended,
        "rescales": sum(training.rescales for training in run.trainings.values()),
        "fragments": [(f.training, f.nodes, f.start, f.end) for f in run.fragments],
    }


def main() -> int:
    """Serve one run; the first argument contains the settings as JSON."""
    options = json.loads(sys.argv[1])
    directory = Path(options["directory"])
    provider = SlurmProvider(
        partition=options["partition"],
        launcher=SrunLauncher(),
        worker_init=f"export PYTHONPATH={Path(__file__).parents[1]}",
        cmd_timeout=10,
    )
    executor = FreeTrainExecutor(
        provider=provider,
        address="127.0.0.1",
        policy="milp",
        planner=PlannerSettings(
            **{name: timedelta(seconds=seconds) for name, seconds in options["planner"].items()},
            max_nodes_per_block=options["nodes_per_block"],
        ),
        trainings=TrainingSettings(threads_per_slot=1),
        rate_limits=RateLimits(poll_interval=timedelta(seconds=options["poll"])),
        grace=timedelta(seconds=options["grace"]),
        checkpoint_dir=directory / "checkpoints",
        checkpoints=CheckpointSettings(interval=timedelta(seconds=CHECKPOINT_SECONDS)),
    )
    config = Config(executors=[executor], run_dir=str(directory / "runinfo"), strategy="none", initialize_logging=False)
    with parsl.load(config):
        print("ready", flush=True)
        sys.stdin.readline()
        train = make_app(options["nodes"])
        for number in range(options["trainings"]):
            train.options(name=f"training-{number}")(**SETTINGS)
        sys.stdin.readline()
        print(json.dumps(account(executor)), flush=True)
        parsl.dfk().cleanup()
    return 0


if __name__ == "__main__":
    sys.exit(main())
