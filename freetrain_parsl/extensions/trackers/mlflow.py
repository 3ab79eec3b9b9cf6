"""The values of a training job in MLflow: a tracking server, or a directory."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from freetrain_parsl.executor.values.tracker import Outcome, Row, TrackedTraining

__all__ = ["MlflowTracker"]

_ID = "freetrain.id"
_ENDED = {"finished": "FINISHED", "failed": "FAILED", "cancelled": "KILLED"}
_MOST_METRICS = 1000  # in one request, MLflow's limit


@dataclass
class MlflowTracker:
    """Logs to an MLflow run that is named after the training job: numbers as metrics, strings as tags.

    Parameters
    ----------
    tracking_uri
        Server, or directory; ``None``: ``MLFLOW_TRACKING_URI``, or a directory of the training job's own.
    experiment
        Name of the experiment, which is created if needed.
    """

    options: ClassVar = ("tracking_uri", "experiment")
    package: ClassVar = ("mlflow", "freetrain-parsl[mlflow]")
    tracking_uri: str | None = None
    experiment: str = "freetrain"

    def open(self, training: TrackedTraining) -> Mapping[str, int]:
        """See `Tracker.open`; the run is found by a tag."""
        import os

        uri = self.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or (training.directory / "mlruns").as_uri()
        if "://" not in uri or uri.startswith("file:"):  # MLflow asks for consent to its file store
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow.tracking import MlflowClient

        self._client: Any = MlflowClient(tracking_uri=uri)
        found = self._client.get_experiment_by_name(self.experiment)
        experiment = self._client.create_experiment(self.experiment) if found is None else found.experiment_id
        runs = self._client.search_runs([experiment], filter_string=f"tags.`{_ID}` = '{training.id}'")
        if runs:
            run = runs[0]
            self._client.update_run(run.info.run_id, status="RUNNING")
        else:
            run = self._client.create_run(experiment, run_name=training.name, tags={_ID: training.id})
        self._run = run.info.run_id
        histories = {name: self._client.get_metric_history(self._run, name) for name in run.data.metrics}
        self._steps = {name: max(metric.step for metric in history) for name, history in histories.items()}
        return self._steps

    def log(self, rows: Sequence[Row]) -> None:
        """See `Tracker.log`."""
        from mlflow.entities import Metric

        metrics = [
            Metric(_allowed(name), float(value), int(row.time * 1000), row.step)
            for row in rows
            for name, value in row.values.items()
            if not isinstance(value, str)
        ]
        metrics = [metric for metric in metrics if metric.step > self._steps.get(metric.key, -1)]  # of renamed values
        for begin in range(0, len(metrics), _MOST_METRICS):
            self._client.log_batch(self._run, metrics=metrics[begin : begin + _MOST_METRICS])
        texts = {name: value for row in rows for name, value in row.values.items() if isinstance(value, str)}
        for name, value in texts.items():
            self._client.set_tag(self._run, _allowed(name), value)

    def close(self, outcome: Outcome) -> None:
        """See `Tracker.close`."""
        if outcome in _ENDED:
            self._client.set_terminated(self._run, _ENDED[outcome])
        else:  # it has not ended: MLflow's status of a run that is to continue later, without an end time
            self._client.update_run(self._run, status="SCHEDULED")


def _allowed(name: str) -> str:
    """Return a name that MLflow accepts."""
    return re.sub(r"[^\w./ -]", "_", name)
