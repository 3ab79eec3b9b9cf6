"""The progress of a training job, the reason for a lack of it, and reports to the planner."""

from __future__ import annotations

import math
from collections import deque
from contextlib import suppress
from dataclasses import astuple, dataclass, replace
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from freetrain_parsl.errors import InvalidApp, TooManyRestarts
from freetrain_parsl.executor.jobs import commands as do
from freetrain_parsl.executor.jobs.training.states import Pausing, Regrouping, Role, Running, Starting, Waiting
from freetrain_parsl.planning import events as planner
from freetrain_parsl.planning.model import moved_shares
from freetrain_parsl.planning.sizes import ANY_COUNT
from freetrain_parsl.protocol import journal as record

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from freetrain_parsl.executor.jobs.commands import Response
    from freetrain_parsl.executor.jobs.request import TrainingRequest
    from freetrain_parsl.executor.jobs.training.states import GroupMembers, Participant, Phase
    from freetrain_parsl.planning.model import CostsInSeconds
    from freetrain_parsl.planning.sizes import AllowedCounts
    from freetrain_parsl.protocol.reports import BatchReport, Progress

__all__ = [
    "FailureRate",
    "PlannerView",
    "ProgressTracker",
    "StepWatch",
    "changed_significantly",
    "learned_costs",
    "stall_reason",
    "waiting_reason",
]

_LEAST_SECONDS = 600.0  # compilation, validation and checkpoints are no steps
_MEDIANS = 50.0  # of the time of a step, where this is longer
_STEPS_KEPT = 31
_EXPLAINED_AFTER = 45.0  # seconds; so that the reason is reported within a minute
_WEIGHT = 0.5  # of the newest measurement in the exponential moving average: conditions change little, noise is small
_SIGNIFICANT = 0.1  # relative change below which the planner is not updated


class StepWatch:
    """The times of a training job's steps, as its reports show them.

    Attributes
    ----------
    step
        The latest step.
    """

    def __init__(self) -> None:
        self.step = 0
        self._at: float | None = None  # when it was reported
        self._seconds: deque[float] = deque(maxlen=_STEPS_KEPT)

    @property
    def step_seconds(self) -> float | None:
        """Median time of a step; ``None`` before there are two."""
        return median(self._seconds) if self._seconds else None

    def take(self, step: int, now: float) -> None:
        """Take a report of `step`; a lower one than before: the training job has resumed from a checkpoint."""
        if step == self.step and self._at is not None:
            return
        if self._at is not None and step > self.step:
            self._seconds.append((now - self._at) / (step - self.step))
        self.step, self._at = step, now

    def overdue(self, since: float, now: float) -> float | None:
        """Return a lower bound on the time without a step, in seconds; ``None``: it is not unusually long.

        The result only doubles, so that it rarely changes.

        Parameters
        ----------
        since
            Time at which its group began, seconds.
        now
            Seconds.
        """
        limit = max(_LEAST_SECONDS, _MEDIANS * (self.step_seconds or 0.0))
        without = now - (since if self._at is None else max(since, self._at))
        return limit * 2.0 ** math.floor(math.log2(without / limit)) if without >= limit else None

    def sentence(self, seconds: float, nodes: str) -> str:
        """Describe that there has been no step for more than `seconds` on `nodes`."""
        usual = "" if self.step_seconds is None else f", and a step took {_span(self.step_seconds)}"
        last = f"the last that it reported was step {self.step}{usual}" if self.step else "it has made none yet"
        return f"has made no step for more than {_span(seconds)} on {nodes}; {last}"


def _span(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 600 else f"{seconds:.3g} s"


class ProgressTracker:
    """Follows a training job's progress reports, and records what changed from one to the next.

    Attributes
    ----------
    latest
        The latest report.
    steps
        The times of its steps.
    storage_problem
        Why the checkpoint directory cannot be used; empty if it can.
    """

    def __init__(self, name: str, max_restarts: int, response: Response) -> None:
        self.latest: Progress | None = None
        self.steps = StepWatch()
        self.storage_problem = ""
        self._name = name
        self._max_restarts = max_restarts
        self._response = response
        self._first_step: int | None = None  # at the start of this execution; -1 without a checkpoint
        self._furthest = 0
        self._crashes = 0  # since `_furthest` was reached
        self._last_crash = ""
        self._code_note = self._note = ""

    @property
    def is_sharded(self) -> bool:
        """Whether its processes hold different parts of its state, as far as they have reported."""
        return self.latest is not None and self.latest.sharded_bytes > 0

    @property
    def in_place(self) -> bool:
        """Whether its group can change in place, as far as is known."""
        return self.latest is None or self.latest.in_place

    @property
    def allowed_counts(self) -> AllowedCounts:
        """The numbers of processes on which its model can run, as far as is known."""
        return ANY_COUNT if self.latest is None else self.latest.allowed_counts

    @property
    def counted_seconds(self) -> float | None:
        """Slot-seconds in steps that count, as last reported; ``None`` without a report."""
        return None if self.latest is None else self.latest.slot_seconds

    @property
    def furthest(self) -> int | None:
        """The last step that its processes have reported; ``None``: nothing has been reported to this driver."""
        return None if self._first_step is None else self._furthest

    def reached(self, step: int) -> None:
        """Note how far a process had come that has ended."""
        if step > self._furthest:
            self._furthest, self._crashes = step, 0

    def take(self, progress: Progress, now: float) -> None:
        """Take a report."""
        self.steps.take(progress.step, now)
        if progress.code_note and progress.code_note != self._code_note:
            self._code_note = progress.code_note
            self._response.log(record.CodeChanged(self._name, progress.code_note))
        if progress.storage_problem != self.storage_problem:
            self.storage_problem = condition = progress.storage_problem
            changed = record.SavingFails(self._name, condition) if condition else record.SavingWorks(self._name)
            self._response.log(changed)
        if self._first_step is None:
            self._first_step = -1 if progress.resumed_from is None else progress.resumed_from
        self.reached(progress.step)
        before, self.latest = self.latest, progress
        if before is not None:
            self._note_batch(before.batch, progress.batch)
        known = None if before is None else before.checkpoint_step
        if progress.checkpoint_step is not None and progress.checkpoint_step != known:
            self._response.log(record.Checkpoint(self._name, progress.checkpoint_step))
        self._response.do(do.KeepProgress(progress))

    def note(self, note: str) -> None:
        """Record what the user should know; each new group may say the same."""
        if note != self._note:
            self._note = note
            self._response.log(record.TrainingNoted(self._name, note))

    def _note_batch(self, before: BatchReport | None, batch: BatchReport | None) -> None:
        if before is not None and batch is not None and batch.size != before.size:
            scale = batch.noise_scale
            finite = scale if scale is not None and math.isfinite(scale) else None
            self._response.log(record.BatchChanged(self._name, batch.size, before.size, finite))

    def finish(self) -> None:
        """Record the end of the training job, and whether anything was trained."""
        trained = self._first_step is None or self._furthest > self._first_step
        self._response.log(record.TrainingFinished(self._name, trained, self._furthest))

    def count_crash(self, reason: str) -> None:
        """Count a crash."""
        self._crashes += 1
        self._last_crash = reason

    def too_many_crashes(self) -> TooManyRestarts | None:
        """Return an error if there have been too many crashes without a further step."""
        if self._crashes <= self._max_restarts:
            return None
        return TooManyRestarts(
            f"training job {self._name!r}: {self._crashes} crashes without a step beyond step {self._furthest}, "
            "though its "
            f"nodes were not taken; the last: {self._last_crash}; see the worker logs in the run directory"
        )


def stall_reason(
    phase: Phase,
    participants: Mapping[str, Participant],
    *,
    steps: StepWatch,
    desired: Collection[str],
    assigned: float,
    needed: int,
    shared: bool,
    now: float,
) -> str:
    """Return why a training job makes no progress; empty if it does, or has waited only for a short time.

    Parameters
    ----------
    phase, participants
        Phase and participants of a training job that is not over.
    steps
        The times of its steps.
    desired
        Units that are assigned to it: whole nodes, or slots of shared ones.
    assigned
        Time at which it last got nodes after it had none, seconds.
    needed
        Minimum number of units on which it runs.
    shared
        Whether the units are slots of shared nodes.
    now
        Seconds.
    """
    if isinstance(phase, Waiting):
        return waiting_reason(desired, needed, now - max(phase.since, assigned), shared=shared)
    if isinstance(phase, Starting) and now - phase.group.began >= _EXPLAINED_AFTER:
        return f"on {_listed(phase.group.nodes)} its function has not reached session.epochs() yet"
    newcomers = [one for one in participants.values() if one.role is Role.NEWCOMER]
    slow = {one.place for one in newcomers if one.ready is None and now - one.began >= _EXPLAINED_AFTER}
    if slow:
        return f"on {_listed(slow)}, to join the others, its function has not reached session.epochs() yet"
    if isinstance(phase, (Running, Regrouping, Pausing)):
        overdue = steps.overdue(phase.group.began, now)
        if overdue is not None:
            return steps.sentence(overdue, _blocked_nodes(phase.group, participants, overdue / 2))
    return ""


def waiting_reason(desired: Collection[str], needed: int, seconds: float, *, shared: bool) -> str:
    """Return the reason why a job that has waited for `seconds` does not run; empty if the time is short.

    Parameters
    ----------
    desired, needed, shared
        As for `stall_reason`.
    seconds
        Time since it last had nodes, or got some.
    """
    if seconds < _EXPLAINED_AFTER:
        return ""
    if desired:
        return f"waits for slots on {_listed(desired)} to start or to become free"
    unit = "slot" if shared else "node"
    units = f"a {unit}" if needed == 1 else f"{needed} {unit}s"
    return f"waits for {units} to join; `freetrain explain` shows why idle nodes are not used"


def _blocked_nodes(group: GroupMembers, participants: Mapping[str, Participant], seconds: float) -> str:
    """Name the nodes of a group on which the function does not continue: the others have waited for `seconds`."""
    members = [participants[slot] for slot in group.ranks if slot in participants]
    waiting = {member.place for member in members if member.waited >= seconds}
    blocked = group.nodes - waiting
    if not (waiting and blocked):
        return _listed(group.nodes)
    return f"{_listed(blocked)}, while {_listed(waiting)} only {'waits' if len(waiting) == 1 else 'wait'}"


def _listed(nodes: Iterable[str]) -> str:
    return ", ".join(sorted(nodes))


def learned_costs(known: CostsInSeconds, kind: str, measured: float) -> CostsInSeconds:
    """Return costs updated with one more measurement.

    Parameters
    ----------
    known
        The current costs.
    kind
        The cost that was measured: ``up``, ``down``, ``start`` or ``bandwidth``.
    measured
        The measurement; ignored if negative or not finite.
    """
    if not (math.isfinite(measured) and measured >= 0):
        return known
    before: float = getattr(known, kind)
    return replace(known, **{kind: (1 - _WEIGHT) * before + _WEIGHT * measured})


def changed_significantly(known: CostsInSeconds, learned: CostsInSeconds) -> bool:
    """Return whether costs differ enough from those that the planner knows to update it."""
    pairs = zip(astuple(known), astuple(learned), strict=True)
    return any(abs(after - before) > _SIGNIFICANT * before for before, after in pairs)


@dataclass
class FailureRate:
    """The mean time between failures after which a training job restarts from a checkpoint.

    Parameters
    ----------
    seconds
        Running time of all training jobs; starts at one hour, as a prior.
    failures
        Number of restarts from a checkpoint because all members failed; starts at one, as a prior.
    """

    seconds: float = 3600.0
    failures: int = 1

    @property
    def mean_time_between(self) -> float:
        """The mean, in seconds."""
        return self.seconds / self.failures


class PlannerView:
    """Informs the planner of a training job: its existence, its remaining work and its rescale costs."""

    def __init__(
        self, request: TrainingRequest, costs: CostsInSeconds, response: Response, recalled: AllowedCounts = ANY_COUNT
    ) -> None:
        self._name = request.name
        self._samples = request.samples
        self._costs_are_stated = request.costs is not None
        self._stated = self._trainer = request.trainer(costs, submitted=response.now)
        with suppress(InvalidApp):  # within the bounds of this one, none is allowed: its own report counts
            self._trainer = replace(self._stated, allowed_counts=self._stated.allowed_counts & recalled)
        self._costs = self._trainer.costs
        self._response = response

    @property
    def allowed_counts(self) -> AllowedCounts:
        """The numbers of units that it may have, as far as is known."""
        return self._trainer.allowed_counts

    def submit(self) -> None:
        """Let the planner assign nodes to it."""
        self._response.inform(planner.TrainerSubmitted(self._response.now, self._trainer))

    def withhold(self) -> None:
        """Let the planner assign it no nodes until it is submitted again."""
        self._response.inform(planner.TrainerWithheld(self._response.now, self._name))

    def hold(self, nodes: frozenset[str]) -> None:
        """Report that it continues on these units only."""
        self._response.inform(planner.TrainerHolds(self._response.now, self._name, nodes))

    def describe_model(self, progress: Progress, processes_per_unit: int) -> None:
        """Report what limits the numbers of units, what a change in place has to move, and how long it saves.

        Raises
        ------
        InvalidApp
            The model allows no number of processes within the bounds.
        """
        moved = float(progress.sharded_bytes) if progress.in_place else 0.0
        if moved != self._costs.sharded_bytes:
            self._learn(replace(self._costs, sharded_bytes=moved))
        allowed = self._stated.allowed_counts & progress.allowed_counts.in_units(processes_per_unit)
        saves = progress.write_seconds
        known = self._trainer
        if allowed == known.allowed_counts and abs(saves - known.save_seconds) <= _SIGNIFICANT * known.save_seconds:
            return
        self._trainer = replace(
            known,
            min_nodes=self._stated.min_nodes,
            max_nodes=self._stated.max_nodes,
            allowed_counts=allowed,
            save_seconds=saves,
        )
        self._response.inform(planner.TrainerLearned(self._response.now, self._trainer))

    def finish(self) -> None:
        """Report that it has finished."""
        self._response.inform(planner.TrainerFinished(self._response.now, self._name))

    def fail(self) -> None:
        """Report that it has failed or was cancelled."""
        self._response.inform(planner.TrainerFailed(self._response.now, self._name))

    def advance(self, progress: Progress) -> None:
        """Report how much work is left, if its total is known."""
        total = progress.samples_total or self._samples
        if total is not None:
            left = max(0.0, float(total) - progress.samples)
            self._trainer = replace(self._trainer, work_left=left)
            self._response.inform(planner.TrainerProgressed(self._response.now, self._name, left))

    def measured(self, kind: str, seconds: float) -> None:
        """Update the rescale costs, unless the user stated them; report a significant change.

        Parameters
        ----------
        kind
            The cost that was measured: ``up``, ``down`` or ``start``.
        seconds
            The measurement.
        """
        self._learn(learned_costs(self._costs, kind, seconds))

    def changed_in_place(self, kind: str, paused: float, transferred: float, sizes: tuple[int, int]) -> None:
        """Update the costs after a change in place.

        Parameters
        ----------
        kind
            ``up`` or ``down``.
        paused, transferred
            Seconds without training, and those of them in which the state was moved.
        sizes
            Numbers of units before and after.
        """
        costs = self._costs
        moved = costs.sharded_bytes * float(moved_shares(sizes[0], np.array([sizes[1]]))[0])
        if not (moved and transferred > 0):  # else the time of the move depends on how much is moved
            self.measured(kind, paused)
            return
        costs = learned_costs(costs, "bandwidth", moved / transferred)
        self._learn(learned_costs(costs, kind, max(0.0, paused - transferred)))

    def _learn(self, costs: CostsInSeconds) -> None:
        """Use these costs, unless the user stated them; report a significant change."""
        if self._costs_are_stated:
            return
        self._costs = costs
        if changed_significantly(self._trainer.costs, self._costs):
            self._trainer = replace(self._trainer, costs=self._costs)
            self._response.inform(planner.TrainerLearned(self._response.now, self._trainer))
