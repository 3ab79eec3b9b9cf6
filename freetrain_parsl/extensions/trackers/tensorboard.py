"""The values of a training job in TensorBoard's event files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from freetrain_parsl.extensions.trackers.csv_file import name_in

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from freetrain_parsl.executor.values.tracker import Outcome, Row, TrackedTraining, Value

__all__ = ["TensorBoardTracker"]


@dataclass
class TensorBoardTracker:
    """Writes event files: numbers as scalars, strings as texts. TensorFlow is not needed.

    Parameters
    ----------
    directory
        Where, with a directory for each training job, named as by `CsvTracker`; ``None``: in the training job's own
        directory.
    """

    options: ClassVar = ("directory",)
    package: ClassVar = ("tensorboard", "freetrain-parsl[tensorboard]")
    directory: str | None = None

    def open(self, training: TrackedTraining) -> Mapping[str, int]:
        """See `Tracker.open`; each call begins another file, which TensorBoard reads as the same run."""
        from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        directory = training.directory
        if self.directory is not None:
            Path(self.directory).mkdir(mode=0o700, parents=True, exist_ok=True)
            directory = Path(self.directory, name_in(Path(self.directory), training))
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        steps: dict[str, int] = {}
        for path in sorted(directory.glob("events.out.tfevents.*")):
            for event in LegacyEventFileLoader(str(path)).Load():  # up to an incomplete record
                for value in event.summary.value:
                    steps[value.tag] = max(event.step, steps.get(value.tag, 0))
        self._writer: Any = EventFileWriter(str(directory))
        return steps

    def log(self, rows: Sequence[Row]) -> None:
        """See `Tracker.log`."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        for row in rows:
            summary = Summary(value=[_value(name, value) for name, value in row.values.items()])
            self._writer.add_event(Event(wall_time=row.time, step=row.step, summary=summary))
        self._writer.flush()

    def close(self, outcome: Outcome) -> None:  # noqa: ARG002 - event files have no state
        """See `Tracker.close`."""
        self._writer.close()


def _value(name: str, value: Value) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.types_pb2 import DT_STRING

    if not isinstance(value, str):
        return Summary.Value(tag=name, simple_value=float(value))
    plugin = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    return Summary.Value(tag=name, metadata=plugin, tensor=TensorProto(dtype=DT_STRING, string_val=[value.encode()]))
