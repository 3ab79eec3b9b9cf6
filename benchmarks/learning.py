"""What learning scaling curves gains over wrong ones, on the embedded cluster.

Two training jobs share the holes of ``--nodes`` nodes for ``--minutes``, the same in each row. The steps of one get
shorter with each node; those of the other take the same time on any number. They really train, but their steps mostly
sleep, so that the nodes of one machine do not compete for its cores. Each states the other's scaling, its own, or none
at all (``scaling="learn"``). The table has the last half of the time: mean numbers of nodes, and work, the samples
relative to those of one node without pauses.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import parsl
from _report import report
from parsl.config import Config

from freetrain_parsl import (
    EmbeddedClusterProvider,
    FreeTrainExecutor,
    PlannerSettings,
    RescaleCosts,
    TrainingSettings,
    read_journal,
    training_app,
)
from freetrain_parsl.cluster.workload import generate_workload
from freetrain_parsl.executor.jobs.curve_learning import CurveLearning
from freetrain_parsl.executor.journal import read_progress

BATCH = 48
STEP = 0.6  # seconds of a step on one node
SCALING = {"scales": 0.9, "constant": 0.0}  # the share of a step's time that is divided by the number of nodes
PLANNER = PlannerSettings(
    startup=timedelta(seconds=8),
    min_useful=timedelta(seconds=4),
    closing_margin=timedelta(seconds=2),
    settle=timedelta(seconds=1),
    replan_interval=timedelta(seconds=5),
)


@training_app
def train(session: Any, *, divided: float, batch_size: int, step: float) -> float:
    """Train a small regression whose steps sleep: the `divided` share of the time as this process's part."""
    import time

    import torch
    from torch.nn.functional import mse_loss
    from torch.utils.data import TensorDataset

    x = torch.randn(480, 16, generator=torch.Generator().manual_seed(1))
    model, _ = session.prepare(torch.nn.Linear(16, 1), torch.optim.Adam, lr=1e-3)
    data = session.loader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=batch_size)
    for _ in session.epochs(10**6):
        for inputs, targets in data:
            time.sleep(step * (1 - divided + divided * len(inputs) / batch_size))
            session.step(mse_loss(model(inputs), targets))
    return float(session.metrics["loss"])


def speedup(divided: float, nodes: int) -> float:
    """Return the rate on some nodes relative to one."""
    return 1 / (1 - divided + divided / nodes)


def stated(kind: str, how: str, nodes: int) -> Any:
    """Return the scaling that a training job states: its own, the other's, or ``learn``."""
    if how == "learn":
        return "learn"
    [other] = SCALING.keys() - {kind}
    divided = SCALING[kind if how == "true" else other]
    return {count: speedup(divided, count) for count in range(1, nodes + 1)}


def measure(how: str, *, learns: bool, nodes: int, minutes: float, directory: Path) -> dict[str, Any]:
    """Run both training jobs; return their rates and mean numbers of nodes in the second half."""
    observe = CurveLearning.observe
    if not learns:
        CurveLearning.observe = lambda *_, **__: []  # type: ignore[method-assign]
    queue = generate_workload(nodes=nodes, duration=timedelta(minutes=minutes), seed=2, load=0.3)
    executor = FreeTrainExecutor(
        provider=EmbeddedClusterProvider(nodes=nodes, workload=queue, cluster_dir=str(directory / "cluster")),
        planner=PLANNER,
        checkpoint_dir=directory / "checkpoints",
        trainings=TrainingSettings(rescale_costs=RescaleCosts(*[timedelta(seconds=1)] * 3)),
    )
    config = Config(executors=[executor], run_dir=str(directory / "runinfo"), strategy="none", initialize_logging=False)
    try:
        with parsl.load(config):
            for kind, divided in SCALING.items():
                app = train.options(name=kind, max_nodes=nodes - 1, scaling=stated(kind, how, nodes))
                app(divided=divided, batch_size=BATCH, step=STEP)
            time.sleep(30 * minutes)
            middle, before = time.time(), read_progress(executor.journal_path)
            time.sleep(30 * minutes)
            end, after = time.time(), read_progress(executor.journal_path)
    finally:
        CurveLearning.observe = observe  # type: ignore[method-assign]
    alone = BATCH / STEP * (end - middle)
    done = {kind: (after[kind]["samples"] - before.get(kind, {"samples": 0})["samples"]) / alone for kind in SCALING}
    nodes_held = mean_nodes(executor.journal_path, middle, end)
    columns = {
        f"{what}_{kind}": found[kind] for kind in SCALING for what, found in (("nodes", nodes_held), ("work", done))
    }
    return {**columns, "work": sum(done.values())}


def mean_nodes(journal: Path, begin: float, end: float) -> dict[str, float]:
    """Return the mean numbers of nodes between two times, from a journal."""
    held, node_seconds, since = dict.fromkeys(SCALING, 0), dict.fromkeys(SCALING, 0.0), begin
    changes = [entry for _, entry in read_journal(journal) if entry.kind in ("fragment_started", "fragment_ended")]
    for time_, entry in [*((change.time, change) for change in changes), (end, None)]:
        for kind, count in held.items():
            node_seconds[kind] += count * max(0.0, min(time_, end) - since)
        since = max(since, min(time_, end))
        if entry is not None:
            held[entry.subject] = len(entry.detail["nodes"]) if entry.kind == "fragment_started" else 0
    return {kind: seconds / (end - begin) for kind, seconds in node_seconds.items()}


def main(arguments: list[str]) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=6)
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    rows = []
    for title, how, learns in (
        ("wrong, not learned", "wrong", False),
        ("wrong, learned", "wrong", True),
        ("unknown, learned", "learn", True),
        ("true, not learned", "true", False),
    ):
        with tempfile.TemporaryDirectory(prefix="ft-learning-") as directory:
            found = measure(how, learns=learns, nodes=options.nodes, minutes=options.minutes, directory=Path(directory))
        rows.append({"stated_curves": title, **found})
        rows[-1]["relative"] = rows[-1]["work"] / rows[0]["work"]
    title = f"Learning scaling curves: two training jobs on {options.nodes} nodes, {options.minutes:g} min each"
    report(title, rows, ["freetrain-parsl", "parsl", "torch"], options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
