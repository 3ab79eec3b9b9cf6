"""What fusing a sweep gains end to end: learning rates of the digits network on the embedded cluster.

The same training jobs run twice on the same nodes, fused (``fuse="auto"``) and one by one (``fuse=False``), each time
with new checkpoints. Times are from the first node to the last result: starting the blocks takes equally long in both.
``difference`` is the largest one between a training job's losses, in all epochs.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import parsl
from _report import report
from parsl.config import Config

from freetrain_parsl import EmbeddedClusterProvider, FreeTrainExecutor, TrainingSettings, read_journal

APPS = str(Path(__file__).parents[1] / "apps")
sys.path.insert(0, APPS)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [APPS, os.environ.get("PYTHONPATH")]))  # of the nodes


def run(directory: Path, *, fuse: Any, trainings: int, nodes: int, epochs: int, batch_size: int) -> dict[str, Any]:
    """Train the sweep; return seconds, losses by epoch, and sizes and gain of the arrays."""
    from digits import train

    executor = FreeTrainExecutor(
        provider=EmbeddedClusterProvider(
            nodes=nodes, cluster_dir=str(directory / "cluster"), grace=timedelta(seconds=4)
        ),
        trainings=TrainingSettings(threads_per_slot=1),
        checkpoint_dir=directory / "checkpoints",
    )
    config = Config(executors=[executor], run_dir=str(directory / "runinfo"), strategy="none", initialize_logging=False)
    with parsl.load(config):
        rates = [0.002 * (number + 1) for number in range(trainings)]
        futures = train.options(fuse=fuse, max_nodes=1).sweep(lr=rates, epochs=epochs, batch_size=batch_size)
        losses = [[epoch["loss"] for epoch in future.result()["history"]] for future in futures]
    entries = [entry for _, entry in read_journal(executor.journal_path)]
    first = min(entry.time for entry in entries if entry.kind == "node_joined")
    last = max(entry.time for entry in entries if entry.kind == "training_finished")
    measured = [entry.detail for entry in entries if entry.kind == "array_measured"]
    alone = {entry.detail["reason"] for entry in entries if entry.kind == "trains_alone"}
    return {
        "seconds": last - first,
        "losses": losses,
        "arrays": sum(entry.kind == "array_started" for entry in entries),
        "members": max((each["members"] for each in measured), default=0),
        "gain": max((each["gain"] for each in measured), default=0.0),
        "alone": "; ".join(sorted(alone)),
    }


def main() -> None:
    """Print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainings", type=int, default=32)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=50)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    arguments = parser.parse_args()
    sizes = {
        "trainings": arguments.trainings,
        "nodes": arguments.nodes,
        "epochs": arguments.epochs,
        "batch_size": arguments.batch_size,
    }
    with tempfile.TemporaryDirectory(prefix="freetrain-benchmark-") as scratch:
        fused = run(Path(scratch) / "auto", fuse="auto", **sizes)
        alone = run(Path(scratch) / "alone", fuse=False, **sizes)
    pairs = zip(fused["losses"], alone["losses"], strict=True)
    difference = max(abs(a - b) for one, other in pairs for a, b in zip(one, other, strict=True))
    row = {
        **sizes,
        "fused_s": fused["seconds"],
        "one_by_one_s": alone["seconds"],
        "ratio": alone["seconds"] / fused["seconds"],
        "arrays": fused["arrays"],
        "members": fused["members"],
        "gain_of_steps": fused["gain"],
        "difference": difference,
        "not_fused_because": fused["alone"],
    }
    report("A sweep, fused and one by one", [row], ["torch", "parsl"], arguments.json)


if __name__ == "__main__":
    main()
