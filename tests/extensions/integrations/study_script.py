"""Optimizes a study of four trials; prints from which step each of its jobs has resumed: ``python -m … DIR``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import optuna
import parsl
from parsl.config import Config

from freetrain_parsl import EmbeddedClusterProvider, FreeTrainExecutor, training_app
from freetrain_parsl.extensions.integrations.optuna import optimize
from freetrain_parsl.report.projection.run import RunState
from tests.executor.scenario import CHECKPOINTS, PLANNER, RATE_LIMITS, TRAININGS


@training_app(epochs=12, fuse=False)
def train(session, lr):
    import time

    import torch

    x = torch.randn(64, 4)
    model, _ = session.prepare(torch.nn.Linear(4, 1), torch.optim.SGD, lr=lr)
    data = session.loader(torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16)
    for _ in session.epochs():
        for inputs, targets in data:
            time.sleep(0.1)
            session.step(torch.nn.functional.mse_loss(model(inputs), targets))
    return session.metrics


def main() -> None:
    directory = Path(sys.argv[1])
    executor = FreeTrainExecutor(
        provider=EmbeddedClusterProvider(nodes=2),
        planner=PLANNER,
        trainings=TRAININGS,
        rate_limits=RATE_LIMITS,
        checkpoints=CHECKPOINTS,
        checkpoint_dir=directory / "checkpoints",
    )
    backend = optuna.storages.journal.JournalFileBackend(str(directory / "study.log"))
    study = optuna.create_study(
        study_name="net",
        storage=optuna.storages.JournalStorage(backend),
        pruner=optuna.pruners.NopPruner(),
        load_if_exists=True,
    )
    config = Config(executors=[executor], run_dir=str(directory / "runinfo"), initialize_logging=False)
    with parsl.load(config):
        optimize(study, train, lambda trial: {"lr": trial.suggest_float("lr", 0.01, 0.05)}, n_trials=4, n_jobs=2)
        fragments = RunState(executor.journal_path).refresh().fragments
    resumed: dict[str, int] = {}
    for fragment in fragments:
        resumed[fragment.training] = max(resumed.get(fragment.training, 0), fragment.resumed_from or 0)
    print(json.dumps(resumed))


if __name__ == "__main__":
    main()
