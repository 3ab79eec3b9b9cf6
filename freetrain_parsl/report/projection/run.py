"""The state of a run, folded from the journal's entries, during the run or afterwards."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

from freetrain_parsl.executor.journal import last_record, newest_entry, read_journal, read_kinds, read_progress
from freetrain_parsl.places import node_of, slots_of
from freetrain_parsl.protocol import journal as record
from freetrain_parsl.report.projection.blocks import BlockFold
from freetrain_parsl.report.projection.obstacles import FailedStarts, FreeUnits, Obstacles, UnusedWindows
from freetrain_parsl.windows.hostlist import show_units

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from freetrain_parsl.report.projection.blocks import BlockHistory

__all__ = ["NO_NODES_YET", "Fragment", "RunState", "TrainingState"]

NO_NODES_YET = "its driver has found no nodes for it yet"
"""Why a training job waits of which nothing is recorded; after less than a minute there is."""

_KINDS_WITH_REASONS = (
    record.PlannerStarted,
    record.StartsFailed,
    record.BlockRequested,
    record.BlockSubmitted,
    record.BlockStarted,
    record.BlockReleased,
    record.BlockEnded,
    record.NodeJoined,
    record.NodeLeft,
    record.NodeSetAside,
    record.EnvironmentDiffers,
    record.TrainingSubmitted,
    record.TrainingStalled,
    record.TrainingWaits,
    record.TrainingTriesAgain,
    record.TrainingFinished,
    record.TrainingFailed,
    record.TrainingCancelled,
    record.TrainsAlone,
    record.BaseShared,
    record.CodeChanged,
    record.TrainingNoted,
    record.BatchChanged,
    record.CohortJoined,
    record.CohortStalled,
    record.FragmentStarted,
    record.FragmentResumed,
    record.FragmentEnded,
)


@dataclass
class Fragment:
    """The time that a training job spends in one group; times in seconds since the epoch."""

    training: str
    nodes: tuple[str, ...]
    """Where jobs share nodes: slots."""
    start: float
    end: float | None = None
    failure: bool = False
    """Whether it ended because a member failed, not by a pause."""
    resumed_from: int | None = None
    """Step of the checkpoint from which it started."""
    in_place: bool = False
    """Whether it continues the previous fragment without a checkpoint."""
    paused: float = 0.0
    """Seconds without progress before it, if it continues in place or has resumed after a failure."""
    array: str = ""
    """The array in which it trains, fused with others."""
    lane: int = 0
    """Its place among the members of the array, from 0: free ones are taken first."""
    slots_per_node: int = 1
    """Number of slots of a node, if jobs share nodes; 1: jobs have whole nodes."""


@dataclass
class TrainingState:
    """The state of a training job.

    Parameters
    ----------
    state
        ``waiting``, ``running``, ``finished``, ``failed`` or ``cancelled``.
    min_nodes, max_nodes, nodes
        Of whole nodes; where jobs share nodes, of slots.
    progress
        Last progress report; see ``protocol.reports.Progress``.
    error
        Why it failed or, if it waits for ``freetrain resume``, why it ended.
    """

    name: str
    min_nodes: int
    max_nodes: int
    submitted: float
    state: str = "waiting"
    ended: float | None = None
    nodes: tuple[str, ...] = ()
    fragments: int = 0
    rescales: int = 0
    resumes: int = 0
    checkpoints: int = 0
    progress: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    waits_for: str = ""
    """Why it gets no nodes: the state of the checkpoint directory."""
    next_attempt: float = 0.0
    """Time of the next attempt, seconds since the epoch."""
    stalled: str = ""
    """Any other reason for no progress in about a minute."""
    trained: bool = True
    """Whether a step was made in this run; otherwise its result is from an earlier run."""
    code_note: str = ""
    """Remark for the user on a change of its code."""
    note: str = ""
    """What else its user should know, as its processes have said last."""
    lost: float | None = None
    """When a failure ended its last group, seconds since the epoch; ``None``: something else did."""
    repair: str = ""
    """What the last failure was, and how it continued, until it changes its nodes as planned."""
    array: str = ""
    """The array in which it trains now, fused with others."""
    fused_with: int = 0
    """Number of other training jobs in this array."""
    shared: record.BaseShared | None = None
    """What the members of the array have in memory once, and whether they step in turns; ``None``: not known."""
    cohort: str = ""
    """The training jobs with which it may run fused."""
    waits_with_cohort: str = ""
    """Why it is in no array of its cohort."""
    nodes_come: str = ""
    """The nodes that it waits for, while the run has none yet."""
    nodes_used: bool = False
    """Whether others train on all nodes of the run."""
    alone_because: str = ""
    """Why it is not fused with others, although it may be."""
    node_kind: str = ""
    """The kind of its nodes, where there are several kinds."""
    batch_changes: int = 0
    """How often its batch size has changed."""
    slots_per_node: int = 1
    """As of a `Fragment`, of the nodes that it had last."""

    def where(self) -> str:
        """Return its nodes, or what it has of nodes that jobs share, in words."""
        return show_units(self.nodes, self.slots_per_node)

    def submit_again(self, min_nodes: int, max_nodes: int) -> None:
        """Note that it was submitted again, as by a driver that resumes the run; its progress and its counts stay."""
        self.min_nodes, self.max_nodes = min_nodes, max_nodes
        self.state, self.ended, self.trained, self.error = "waiting", None, True, ""
        self.nodes, self.array, self.cohort, self.lost = (), "", "", None
        self.waits_for = self.stalled = self.code_note = self.note = self.alone_because = self.repair = ""

    def remark(self, now: float | None = None) -> str:
        """Return a remark for the user: why it cannot start or save, whether it is fused, on which kind of nodes it is.

        Of a training job that has ended: how its result came about; it waits for nothing.

        Parameters
        ----------
        now
            Seconds since the epoch, to state the time to the next attempt; ``None``: omit it.
        """
        if self.state not in ("waiting", "running"):
            if self.state != "finished":
                return self.code_note
            if not self.trained:
                return "result of an earlier run: nothing was trained"
            return self.code_note or self.fusion_remark()
        saving = self.progress.get("storage_problem", "") if self.state == "running" else ""
        if not (self.waits_for or saving):
            repair = "" if self.repair.endswith("; ") else self.repair  # it has not continued yet
            doing = (self._on_kind(), self.batch_remark(), self.fusion_remark(), self.note, repair)
            waiting = self.waiting_reason()
            return self.stall() or waiting or self.code_note or "; ".join(filter(None, doing))
        left = self.next_attempt - (now or 0.0) if self.waits_for else self.progress.get("next_save", 0.0)
        head = f"waits: {self.waits_for}" if self.waits_for else f"cannot save: {saving}"
        return head if now is None else f"{head}, next attempt in {max(0.0, left):.0f} s"

    def waiting_reason(self) -> str:
        """Return why it waits: the error with which it has ended until it is resumed, or that of its cohort."""
        if self.state != "waiting":
            return ""
        with_cohort = "" if self.alone_because else self.waits_with_cohort
        used = "waits for a place on the nodes of this run, which others use" if self.nodes_used else ""
        return self.error.partition("\n")[0] or self.nodes_come or with_cohort or used

    def stall(self) -> str:
        """Return why it makes no progress, as its driver has said; not what it said before it requested nodes."""
        return "" if self.state == "waiting" and self.nodes_come else self.stalled

    def _on_kind(self) -> str:
        return f"on {self.node_kind} nodes" if self.state == "running" and self.node_kind else ""

    def batch_remark(self) -> str:
        """Describe the batch of a training job that runs, if the driver chooses its size."""
        batch = self.progress.get("batch")
        if self.state != "running" or not batch:
            return ""
        times = "once" if self.batch_changes == 1 else f"{self.batch_changes} times"
        changed = f", changed {times}" if self.batch_changes else ""
        if batch["square"] is None:
            noise = ""
        elif batch["square"] > 0:
            noise = f", gradient noise scale {batch['variance'] / batch['square']:.0f}"
        else:
            noise = ", gradient lost in its noise"
        return f"in batches of {batch['size']} (at first {batch['initial']}{changed}){noise}"

    def whereabouts(self) -> str:
        """Say on which nodes it runs; empty if it does not."""
        return f"runs on {', '.join(self.nodes)}" if self.state == "running" and self.nodes else ""

    def fusion_remark(self) -> str:
        """Say with how many others it is fused, or why it is not; empty if nothing is known against it."""
        if self.state == "running" and self.array:
            others = f"with {self.fused_with} others" if self.fused_with != 1 else "with 1 other"
            if self.fused_with:
                how = "fused" if self.shared is None else self.shared.how(self.fused_with + 1)
                return f"in {self.array} {others}, {how}"
            return f"in {self.array}, alone" + (f": {self.alone_because}" if self.alone_because else "")
        return f"not fused: {self.alone_because}" if self.alone_because else ""

    def fusion_notice(self) -> str:
        """Say why it is not fused, whether it trains alone or in turns with others; empty if nothing is known."""
        if self.in_turns and self.fused_with:
            return self.fusion_remark()
        alone = "" if self.array and self.fused_with else self.alone_because
        return f"not fused: {alone}" if alone else ""

    @property
    def in_turns(self) -> bool:
        """Whether the members of its array are not fused, but step in turns."""
        return bool(self.array and self.shared is not None and self.shared.turns)

    @property
    def share_done(self) -> float | None:
        """Fraction of all samples that is done; ``None`` while the total is unknown."""
        total = self.progress.get("samples_total")
        return min(1.0, self.progress["samples"] / total) if total else None


class RunState:
    """The content of the journal up to the last entry read.

    Parameters
    ----------
    journal
        Journal file; may not exist yet. ``None``: the entries are passed to `take`.
    """

    def __init__(self, journal: Path | None = None) -> None:
        self._journal = journal
        self._read = 0
        self._last_fragments: dict[str, int] = {}  # training -> index of its last fragment
        self.trainings: dict[str, TrainingState] = {}
        self.fragments: list[Fragment] = []
        self.checkpoints: list[tuple[float, str]] = []
        self.windows: list[dict[str, Any]] = []
        self.slots_per_node = 1
        """Number of slots of a node, if jobs share nodes, of the last driver; 1: jobs have whole nodes."""
        self.gains: dict[str, tuple[int, float]] = {}
        """Cohort -> size of an array, and its speed relative to one by one."""
        self.stalled_cohorts: dict[str, str] = {}
        """Cohort -> why none of its training jobs runs."""
        self.node_kinds: dict[str, str] = {}
        """Node -> its kind, where there are several kinds."""
        self.blocks = BlockFold()
        self.changed_block: BlockHistory | None = None
        """The block that the last record concerned."""
        self.failed_starts: FailedStarts | None = None
        self._unused = UnusedWindows()
        self._free = FreeUnits()
        self._obstacles = Obstacles()
        self.solve_seconds: list[float] = []
        self.solves_proven = 0

    @classmethod
    def with_reasons(cls, journal: Path) -> RunState:
        """Read only what remarks and `reasons` need: a small part of a long journal.

        Raises
        ------
        sqlite3.Error
            It cannot be read.
        """
        return cls().follow_reasons(journal)

    def follow_reasons(self, journal: Path) -> RunState:
        """Read new entries, of those that `with_reasons` reads."""
        newest = newest_entry(journal)
        if newest > self._read:
            for entry in read_kinds(journal, _KINDS_WITH_REASONS, self._read, newest):
                self.take(entry.time, entry.record)
            self.take(0.0, last_record(journal, record.PlannerStep, containing='"windows": '))
            self._read = newest
        self.take_progress(read_progress(journal))
        return self

    def refresh(self) -> RunState:
        """Read new entries."""
        if self._journal is not None and self._journal.exists():
            for number, entry in read_journal(self._journal, self._read):
                self._read = number
                self.take(entry.time, entry.record)
            self.take_progress(read_progress(self._journal))
        return self

    def take(self, time: float, entry: record.Record | None) -> None:
        """Take the next record; ``None``, one of another version, is ignored."""
        self.changed_block = None if entry is None else self.blocks.take(time, entry)
        if entry is None:
            return
        self._obstacles.take(time, entry)
        if (training := self.trainings.get(entry.subject)) is not None:
            self._on_training_record(training, time, entry)
        else:
            self._on_other_record(time, entry)

    def take_progress(self, reports: Mapping[str, dict[str, Any]]) -> None:
        """Take the last progress report of each training job."""
        for name, progress in reports.items():
            if name in self.trainings:
                self.trainings[name].progress = progress
        self._count_members()

    def last_fragment(self, training: str) -> int | None:
        """Return the index in `fragments` of a training job's last fragment."""
        return self._last_fragments.get(training)

    def end_driver(self, time: float) -> None:
        """Note that the driver has ended, also by a kill: nothing runs any more, and nothing waits but for a resume."""
        self.stalled_cohorts = {}
        for training in self.trainings.values():
            if training.state == "running":
                training.state = "waiting"
            if training.state == "waiting":
                training.alone_because = ""
            training.nodes, training.array = (), ""
            training.waits_for = training.stalled = training.waits_with_cohort = ""
            training.nodes_come, training.nodes_used = "", False
            index = self.last_fragment(training.name)
            if index is not None and self.fragments[index].end is None:
                self.fragments[index].end = time

    def reasons(self, now: float) -> list[str]:
        """Return what keeps waiting training jobs from nodes, one line for each reason: failed starts, and `obstacles`.

        Parameters
        ----------
        now
            Seconds since the epoch.
        """
        failed = [] if self.failed_starts is None else [self.failed_starts.sentence(now)]
        return [*failed, *self.obstacles(now)]

    def obstacles(self, now: float) -> list[str]:
        """Return blocks that are refused, nodes that cannot be used, and why idle nodes are not used.

        One line for each reason; none while no training job waits for nodes. `now` is in seconds since the epoch.
        """
        if not any(training.state == "waiting" and not training.waits_for for training in self.trainings.values()):
            return []
        return [*self._obstacles.reasons(now), *self._unused.reasons(now, self.blocks.pending)]

    def _count_members(self) -> None:
        sizes = Counter(training.array for training in self.trainings.values())
        for training in self.trainings.values():
            training.fused_with = sizes[training.array] - 1 if training.array else 0
        coming = self.blocks.coming
        busy = {node for training in self.trainings.values() for node in training.nodes}
        units = (unit for node in self.blocks.nodes for unit in slots_of(node, self.slots_per_node))
        used = bool(self.blocks.nodes) and busy.issuperset(units)
        training_cohorts = {training.cohort for training in self.trainings.values() if training.array}
        for training in self.trainings.values():
            training.nodes_come, training.nodes_used = coming, used
            if training.cohort in training_cohorts:
                training.waits_with_cohort = f"waits for a place in an array of {training.cohort}"
            else:
                training.waits_with_cohort = self.stalled_cohorts.get(training.cohort, "")

    @property
    def blocks_requested(self) -> int:
        """Number of blocks that were requested."""
        return self.blocks.requested

    @property
    def blocks_ended(self) -> list[str]:
        """Why blocks have ended."""
        return self.blocks.endings

    @property
    def completed(self) -> int:
        """Number of finished training jobs."""
        return sum(training.state == "finished" for training in self.trainings.values())

    @property
    def training_nodes(self) -> int:
        """Number of nodes on which training jobs run."""
        return len({node_of(unit) for training in self.trainings.values() for unit in training.nodes})

    @property
    def training_slots(self) -> int:
        """Number of slots, of nodes that jobs share, on which training jobs run; of whole nodes, of nodes."""
        return len({unit for training in self.trainings.values() for unit in training.nodes})

    @property
    def training_place(self) -> str:
        """On how much training jobs run: ``2 nodes``; where jobs share nodes, ``5 of 8 accelerators of 2 nodes``."""
        nodes = self.training_nodes
        if self.slots_per_node == 1:
            return f"{nodes} nodes"
        return f"{self.training_slots} of {self.slots_per_node * nodes} accelerators of {nodes} nodes"

    @property
    def free_slots(self) -> str:
        """Which slots of shared nodes no waiting job can use, and why; empty: none, or not all records were read."""
        return self._free.sentence()

    def why_not_more(self, name: str) -> str:
        """Why a training job that runs has none of the free nodes, too; empty: as for `free_slots`, or it has all."""
        return self._free.why_not_more(name)

    @property
    def idle_nodes(self) -> int:
        """Number of nodes in the windows that were seen last."""
        return sum(len(window["nodes"]) for window in self.windows)

    def _on_other_record(self, time: float, entry: record.Record | None) -> None:
        match entry:
            case record.TrainingSubmitted(subject=name):
                self.trainings[name] = TrainingState(name, entry.min_nodes, entry.max_nodes, time)
            case record.PlannerStarted():  # what an earlier driver saw is over
                self.windows, self.failed_starts, self.stalled_cohorts = [], None, {}
                self.blocks.nodes, self.slots_per_node = {}, entry.slots_per_node
                self._unused.take(entry)
                self._free.take(entry)
                self._obstacles = Obstacles()
            case record.PlannerStep(events=events):
                self.windows = next((e["windows"] for e in reversed(events) if "windows" in e), self.windows)
                self._unused.take(entry)
                self._free.take(entry)
            case record.NodeLeft(subject=node):
                self.blocks.nodes.pop(node, None)
            case record.NodeJoined(subject=node):
                self.blocks.nodes[node] = entry.block
                if entry.node_kind:
                    self.node_kinds[node] = entry.node_kind
            case record.StartsFailed():
                self.failed_starts = FailedStarts.of(entry)
            case record.Decision():
                self.solve_seconds.append(entry.seconds)
                self.solves_proven += entry.proven
            case _:
                self._on_cohort_record(entry)

    def _on_cohort_record(self, entry: record.Record | None) -> None:
        match entry:
            case record.CohortJoined(subject=cohort):
                for name in entry.trainings:
                    if name in self.trainings:
                        self.trainings[name].cohort = cohort
            case record.CohortStalled(subject=cohort):
                self.stalled_cohorts[cohort] = entry.reason
            case record.ArrayMeasured(subject=cohort):
                if entry.gain > self.gains.get(cohort, (0, 0.0))[1]:
                    self.gains[cohort] = (entry.members, entry.gain)

    def _on_training_record(self, training: TrainingState, time: float, entry: record.Record | None) -> None:  # noqa: C901 - one case for each kind
        match entry:
            case record.TrainingSubmitted():
                training.submit_again(entry.min_nodes, entry.max_nodes)
            case record.FragmentStarted() | record.FragmentResumed() | record.FragmentEnded() | record.Checkpoint():
                self._on_fragment_record(training, time, entry)
            case record.BatchChanged():
                training.batch_changes += 1
            case record.CodeChanged():
                training.code_note = entry.note
            case record.TrainingNoted():
                training.note = entry.note
            case record.TrainsAlone():
                training.alone_because = entry.reason
            case record.BaseShared():
                training.shared = entry
            case record.TrainingWaits():
                training.waits_for, training.next_attempt = entry.reason, entry.until
            case record.TrainingTriesAgain():
                training.waits_for = ""
            case record.TrainingStalled():
                training.stalled = entry.reason
            case record.TrainingFinished():
                training.state, training.ended, training.trained = "finished", time, entry.trained
            case record.TrainingFailed():
                training.state = "failed" if entry.final else "waiting"  # for `freetrain resume`
                training.ended, training.error = time, entry.error
            case record.TrainingCancelled():
                training.state, training.ended = "cancelled", time

    def _on_fragment_record(
        self,
        training: TrainingState,
        time: float,
        entry: record.FragmentStarted | record.FragmentResumed | record.FragmentEnded | record.Checkpoint,
    ) -> None:
        index = self.last_fragment(training.name)
        last = None if index is None else self.fragments[index]
        match entry:
            case record.FragmentStarted():
                nodes = tuple(entry.nodes)
                training.rescales += last is not None and last.nodes != nodes
                training.state, training.nodes, training.error = "running", nodes, ""
                training.fragments += 1
                if entry.repaired:
                    training.repair += "the others continued, no step was repeated"
                elif training.lost is None:
                    training.repair = ""
                training.slots_per_node = self.slots_per_node
                training.array, training.shared = entry.array, None
                training.cohort = training.cohort if entry.array else ""
                training.node_kind = ", ".join(sorted({self.node_kinds.get(node_of(node), "") for node in nodes}))
                fragment = Fragment(
                    training.name,
                    nodes,
                    time,
                    in_place=entry.in_place,
                    paused=entry.paused,
                    array=entry.array,
                    lane=self._free_lane(entry.array),
                    slots_per_node=self.slots_per_node,
                )
                self._last_fragments[training.name] = len(self.fragments)
                self.fragments.append(fragment)
            case record.FragmentResumed():
                if last is not None:
                    last.resumed_from = entry.step
                    training.resumes += 1
                    if training.lost is not None:
                        last.paused = time - training.lost
                        training.repair += f"resumed from {entry.source}"
            case record.FragmentEnded():
                if last is not None:
                    last.end, last.failure = time, entry.failure
                training.lost = time if entry.failure else None
                training.repair = f"{entry.loss}; " if entry.failure else training.repair
                training.nodes, training.array = (), ""
                if training.state == "running":
                    training.state = "waiting"
            case record.Checkpoint():
                training.checkpoints += 1
                self.checkpoints.append((time, training.name))

    def _free_lane(self, array: str) -> int:
        if not array:
            return 0
        taken = {fragment.lane for fragment in self.fragments if fragment.array == array and fragment.end is None}
        return next(lane for lane in count() if lane not in taken)
