"""A run as its page shows it: the projection of its journals, passed on as changes since a version.

The state is in tables (`extensions.pages.changes`): arrays of plain values by column, in JSON. A reader that has
version n gets the rows that have changed since; one that has nothing gets all of them. Times are in seconds since
``origin``, which is in seconds since the epoch. ``pages/web/run_view.js`` applies the changes and draws.

The nodes of a fragment are runs of row numbers of ``nodes``, (first, length) pairs. Where jobs share nodes, its
``slots`` is the number of slots of a node, and the runs are of slots: slot 2 of node 3 is 3 × ``slots`` + 2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from freetrain_parsl.extensions.pages.changes import CurvePoints, Rows
from freetrain_parsl.extensions.pages.node_states import NodeStates, WindowHistory, short_hosts
from freetrain_parsl.places import lane_of, node_of
from freetrain_parsl.protocol import journal as record
from freetrain_parsl.report.projection.projection import Projection
from freetrain_parsl.report.sentences import IncidentLevel, actions_in_words, cause_in_words

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from freetrain_parsl.report.projection.blocks import BlockHistory
    from freetrain_parsl.report.projection.run import TrainingState

__all__ = ["FORMAT", "RunView"]

FORMAT = 1
"""Number of the format of the changes."""

_MOST_SHOWN = 3000  # decisions, incidents, windows: the newest ones
_MOST_SILENT = 10.0  # seconds after which the time is stated even if nothing happens
_TABLES = {
    "nodes": ("name", "kind"),
    "spans": ("node", "state", "begin", "end"),
    "fragments": ("training", "nodes", "begin", "end", "failure", "resumed", "lane", "array", "slots"),
    "trainings": (
        "name", "state", "min_nodes", "max_nodes", "submitted", "ended", "nodes", "hosts", "fragments", "rescales",
        "failures", "checkpoints", "share", "samples", "total", "step", "epoch", "loss", "rate", "remark", "error",
    ),
    "decisions": ("time", "cause", "actions", "policy", "value", "proven", "milliseconds"),
    "windows": ("opens", "closes", "ended", "nodes", "names", "kind", "used", "blocks"),
    "blocks": ("name", "job", "nodes", "walltime", "requested", "started", "ended", "reason"),
    "incidents": ("time", "level", "subject", "text"),
    "notices": ("time", "subject", "text"),
    "requests": ("begin", "command", "count"),
}  # fmt: skip
_BOUNDED = ("decisions", "windows", "incidents", "notices")


class RunView(Projection):
    """The view of a run, over all its drivers, one after the other."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name
        self._version = 1  # a reader that has 0 has nothing
        self._stated_now = 0.0
        self._policy = ""
        self._tables = {
            table: Rows(columns, lambda: self._version, _MOST_SHOWN if table in _BOUNDED else None)
            for table, columns in _TABLES.items()
        }
        self._curves = CurvePoints(lambda: self._version)
        self._node_states = NodeStates(self._tables["nodes"], self._tables["spans"], self._relative)
        self._windows = WindowHistory(self._tables["windows"], self._relative)
        self._training_rows: dict[str, int] = {}
        self._block_rows: dict[str, int] = {}
        self._failures: dict[str, int] = {}  # training -> fragments that ended by a failure
        self._touched: set[str] = set()  # training jobs whose rows are to be written
        self._solves: list[record.Decision] = []

    # What happened.

    def on_change(self) -> None:
        """Begin a new version."""
        self._version += 1

    def on_driver_begun(self) -> None:
        """Expect blocks with names that an earlier driver has used."""
        self._block_rows = {}

    def on_taken(self) -> None:
        """Write the rows of the training jobs that records were about."""
        self._write_trainings()

    def on_progress(self, reports: Mapping[str, dict[str, Any]]) -> None:
        """Write the rows of all training jobs: remarks depend on other training jobs, too."""
        self._touched |= self._training_rows.keys()
        for name, report in reports.items():
            row, loss = self._training_rows.get(name), report.get("loss")
            if row is not None and loss is not None and self.state.trainings[name].state == "finished":
                self._curves.end(row, "loss", report["step"], loss)
        self._write_trainings()

    def on_time(self, now: float) -> None:
        """State the time, also if nothing happens."""
        if now - self._stated_now >= _MOST_SILENT:
            self._version, self._stated_now = self._version + 1, now

    def on_driver_ended(self, time: float, blocks: Sequence[BlockHistory]) -> None:
        """Write that nothing runs, and nothing more is known."""
        for block in blocks:
            self._write_block(block)
        self._node_states.end_driver(time)
        self._windows.end_driver(time)
        self._stated_now = 0.0
        for name in self._training_rows:
            self._touch_fragment(name)
        self._touched |= self._training_rows.keys()
        self._write_trainings()

    # What a reader gets.

    @property
    def version(self) -> int:
        """Number of changes so far."""
        return self._version

    def since(self, version: int = 0) -> dict[str, Any]:
        """Return what has changed after a version; 0: everything.

        Returns
        -------
        delta
            A JSON object: ``format``, ``version``, ``reset`` (whether it is everything), ``run`` (all of it, it is
            small), ``curves``, and of each table that has changed the rows, see
            `freetrain_parsl.extensions.pages.changes.Rows.since`.
        """
        found = {name: rows.since(version) for name, rows in self._tables.items()}
        return {
            "format": FORMAT,
            "version": self._version,
            "reset": version == 0,
            "run": self._summary(),
            "curves": self._curves.since(version),
            **{name: changed for name, changed in found.items() if changed is not None},
        }

    def _summary(self) -> dict[str, Any]:
        account = self.node_time()
        failed = self.failed_starts
        return {
            "name": self._name,
            "policy": self._policy,
            "origin": self.origin,
            "now": None if self.origin is None else self._relative(self.now),
            "ended": self.ended,
            "reading": self.is_reading,
            "problem": self.problem,
            "reasons": self.state.obstacles(self.now) if self.ended is None else [],
            "starts_failed": "" if failed is None else failed.sentence(self.now),
            "training_nodes": self.state.training_nodes,
            "idle_nodes": self.state.idle_nodes if self.ended is None else 0,
            "training_slots": self.state.training_slots,
            "shared_slots": account.shared_slots,
            "node_seconds": {phase.value: round(seconds) for phase, seconds in account.phases.items()},
            "useful_node_seconds": round(account.useful),
            "returned_node_seconds": round(account.returned),
            "cut_short_node_seconds": round(account.cut_short),
            "blocks": {"requested": account.requested, "started": account.started, "yielded": account.yielded},
            "closing_notices": account.closing_notices,
            "failures": self.incidents.failures,
        }

    # Records.

    def _relative(self, time: float) -> float:
        assert self.origin is not None, "there is a record"
        return round(time - self.origin, 1)

    def on_record(self, time: float, entry: record.Record) -> None:
        """Write the rows that a record is about."""
        match entry:
            case record.Decision():
                self._solves.append(entry)
            case record.PlannerStep():
                self._on_step(time, entry)
            case record.NodeJoined(subject=node):
                self._node_states.on_block_started(time, entry.block, [node])
                if entry.node_kind:
                    self._node_states.is_kind(node, entry.node_kind)
            case record.PlannerStarted():
                self._policy = entry.policy
            case record.BatchRequests():
                self._on_requests(time, entry)
            case _:
                self._on_block_record(time, entry)
        if entry.subject in self.state.trainings:
            self._on_training_record(entry)

    def on_incident(self, time: float, subject: str, level: IncidentLevel, text: str) -> None:
        """Add its row."""
        if level is IncidentLevel.NOTICE:
            self._tables["notices"].add(self._relative(time), subject, text)
        else:
            self._tables["incidents"].add(self._relative(time), int(level), subject, text)

    def _on_step(self, time: float, step: record.PlannerStep) -> None:
        for event in step.events:
            if event["type"] == "windows_seen":
                windows: Sequence[Mapping[str, Any]] | None = event.get("windows")
                idle = None if windows is None else [node for window in windows for node in window["nodes"]]
                self._node_states.on_survey(time, idle)
                if windows is not None:
                    self._windows.on_survey(time, windows)
        solves, self._solves = self._solves, []
        if not step.actions and not solves:
            return
        decided = next(
            (solve for solve in reversed(solves) if solve.subject == "assign"), solves[-1] if solves else None
        )
        value = (None, None) if decided is None else (float(f"{decided.objective:.6g}"), decided.proven)
        self._tables["decisions"].add(
            self._relative(time),
            cause_in_words(step.events),
            actions_in_words(step.actions) or "no change",
            self._policy if decided is None else decided.policy,
            *value,
            round(1000 * sum(solve.seconds for solve in solves), 1),
        )

    def _on_block_record(self, time: float, entry: record.Record) -> None:
        match entry:
            case record.BlockStarted(subject=name, nodes=nodes):
                since = entry.since
                if since is not None and self.origin is not None:
                    since = max(since, self.origin)
                self._node_states.on_block_started(time, name, nodes, since)
                self._windows.on_block_started(name, nodes)
            case record.BlockEnded(subject=name):
                self._node_states.on_block_ended(time, name)
        if self.state.changed_block is not None:
            self._write_block(self.state.changed_block)

    def _write_block(self, block: BlockHistory) -> None:
        rows, now = self._tables["blocks"], self._relative
        started, ended = (None if time is None else now(time) for time in (block.started, block.ended))
        row = self._block_rows.get(block.name)
        if row is None:
            self._block_rows[block.name] = rows.add(
                block.name, block.job, block.nodes, block.walltime, now(block.requested), started, ended, block.reason
            )
        else:
            rows.change(row, job=block.job, nodes=block.nodes, started=started, ended=ended, reason=block.reason)

    def _on_requests(self, time: float, entry: record.BatchRequests) -> None:
        begin = self._relative(time) - round(entry.seconds, 1)
        for command, count in sorted(entry.counts.items()):
            self._tables["requests"].add(round(begin, 1), command, count)

    # Training jobs.

    def _on_training_record(self, entry: record.Record) -> None:
        name = entry.subject
        self._touched.add(name)
        if name not in self._training_rows:
            self._training_rows[name] = self._tables["trainings"].add(*[None] * len(_TABLES["trainings"]))
        match entry:
            case record.FragmentStarted() | record.FragmentResumed() | record.FragmentEnded():
                self._touch_fragment(name)
                self._failures[name] = self._failures.get(name, 0) + (
                    isinstance(entry, record.FragmentEnded) and entry.failure
                )
            case record.ValuesSampled():
                for key, value in entry.values.items():
                    self._curves.add(self._training_rows[name], key, entry.step, value)

    def _touch_fragment(self, training: str) -> None:
        """Write the row of a training job's last fragment."""
        rows = self._tables["fragments"]
        index = self.state.last_fragment(training)
        if index is None:
            return
        fragment = self.state.fragments[index]
        end = None if fragment.end is None else self._relative(fragment.end)
        if index < rows.count:
            rows.change(index, end=end, failure=int(fragment.failure), resumed=fragment.resumed_from)
            return
        slots = fragment.slots_per_node
        number = self._node_states.number
        units = _runs(sorted(slots * number(node_of(unit)) + (lane_of(unit) or 0) for unit in fragment.nodes))
        begin = self._relative(fragment.start)
        failed, array = int(fragment.failure), (fragment.lane, fragment.array)
        rows.add(self._training_rows[training], units, begin, end, failed, None, *array, slots)

    def _write_trainings(self) -> None:
        for name in self._touched & self._training_rows.keys():
            self._tables["trainings"].change(self._training_rows[name], **self._training(self.state.trainings[name]))
        self._touched.clear()

    def _training(self, training: TrainingState) -> dict[str, Any]:
        progress = training.progress
        loss, rate = progress.get("loss"), progress.get("rate")
        share = training.share_done
        return {
            "name": training.name,
            "state": training.state,
            "min_nodes": training.min_nodes,
            "max_nodes": training.max_nodes,
            "submitted": self._relative(training.submitted),
            "ended": None if training.ended is None else self._relative(training.ended),
            "nodes": len(training.nodes),
            "hosts": short_hosts(training.nodes, training.slots_per_node),
            "fragments": training.fragments,
            "rescales": training.rescales,
            "failures": self._failures.get(training.name, 0),
            "checkpoints": training.checkpoints,
            "share": 1.0 if training.state == "finished" else None if share is None else round(share, 4),
            "samples": progress.get("samples", 0),
            "total": progress.get("samples_total"),
            "step": progress.get("step", 0),
            "epoch": progress.get("epoch", 0),
            "loss": None if loss is None else float(f"{loss:.5g}"),
            "rate": None if rate is None else float(f"{rate:.4g}"),
            "remark": training.remark(),
            "error": training.error.strip().partition("\n")[0][:400],
        }


def _runs(numbers: Sequence[int]) -> list[int]:
    """Return ascending numbers as pairs: the first of a run of successive ones, and its length."""
    runs: list[int] = []
    for number in numbers:
        if runs and number == runs[-2] + runs[-1]:
            runs[-1] += 1
        else:
            runs += [number, 1]
    return runs
