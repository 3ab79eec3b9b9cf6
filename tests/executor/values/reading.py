"""What trackers have of a training job, read with the packages that their users have."""

from __future__ import annotations

import csv
from collections import defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def read_csv(path: Path) -> dict[str, list[tuple[int, float]]]:
    values = defaultdict(list)
    with path.open(newline="") as file:
        for line in csv.DictReader(file):
            if line["name"] != "note":
                value = line["value"]
                values[line["name"]].append((int(line["step"]), float(value == "True" if value.isalpha() else value)))
    return dict(values)


def read_tensorboard(directory: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory), size_guidance={"scalars": 0})
    events.Reload()
    found = {}
    for tag in events.Tags()["scalars"]:
        found[tag] = [(event.step, event.value) for event in events.Scalars(tag)]
    for tag in events.Tags()["tensors"]:
        tensors = events.Tensors(tag)
        if tensors[0].tensor_proto.string_val:
            continue
        found[tag] = [(event.step, event.tensor_proto.float_val[0]) for event in tensors]
    return found


def read_mlflow(uri: str, experiment: str = "freetrain") -> dict[str, list[tuple[int, float]]]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    (run,) = client.search_runs([client.get_experiment_by_name(experiment).experiment_id])
    return {
        name: [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, name)]
        for name in run.data.metrics
    }


def read_wandb(directory: Path) -> dict[str, list[tuple[int, float]]]:
    from freetrain_parsl.extensions.trackers.wandb import offline_history

    runs = sorted(directory.glob("wandb/offline-run-*/*.wandb"))
    assert len({path.name for path in runs}) == 1, "one run id"
    values = defaultdict(list)
    for path in runs:
        for row in offline_history(path):
            for name, value in row.items():
                if not name.startswith("_"):
                    values[name].append((int(row["_step"]), value))
    return dict(values)
