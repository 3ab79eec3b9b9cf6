"""Cohorts as a kind of jobs: gathers training jobs that may run fused, and forms cohorts of them."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any

from freetrain_parsl.executor.jobs.port import JobKind
from freetrain_parsl.extensions.fusion.driver.cohort import Cohort
from freetrain_parsl.extensions.fusion.driver.cohort_trainer import cohort_as_trainer
from freetrain_parsl.extensions.fusion.driver.gathering import Gathering, cohort_key
from freetrain_parsl.extensions.fusion.driver.members import JoinCohort, Refuse, TrainAlone
from freetrain_parsl.extensions.fusion.driver.refusals import Refusals
from freetrain_parsl.extensions.fusion.messages import (
    AddMember,
    ArraySized,
    BaseShared,
    MemberEnded,
    MemberReport,
    ReleaseMember,
    StartArray,
)
from freetrain_parsl.protocol import journal as record

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from freetrain_parsl.executor.jobs.commands import OwnCommand
    from freetrain_parsl.executor.jobs.port import Jobs, Run
    from freetrain_parsl.executor.jobs.request import Training, TrainingRequest
    from freetrain_parsl.executor.payloads.value_files import ValueFiles
    from freetrain_parsl.extensions.fusion.driver.gathering import CohortKey
    from freetrain_parsl.planning.model import CostsInSeconds, PlannedJob
    from freetrain_parsl.protocol.messages import ToDriver

__all__ = ["FusionKind"]


class FusionKind(JobKind):
    """Cohorts of training jobs that may run fused."""

    to_slot = (StartArray, AddMember, ReleaseMember)
    to_driver = (ArraySized, BaseShared, MemberReport, MemberEnded)

    def __init__(self, jobs: Jobs) -> None:
        super().__init__(jobs)
        self._gathering = Gathering()
        self._cohorts: dict[CohortKey, Cohort] = {}  # the last of each key
        self._refusals = Refusals(jobs.settings.options.checkpoint_root)
        self._differ: dict[str, str] = {}  # how training jobs that change their cohort differ from those in the last
        self._names = count(1)

    # In the driver.

    @property
    def gathers(self) -> bool:
        """Whether it has training jobs that are in no cohort yet."""
        return bool(self._gathering)

    def submit(self, training: Training) -> bool:
        """Take a training job that may be fused."""
        key = cohort_key(training.request)
        if key is None or training.sharded_on is not None:
            return False
        if reason := self._refusals.reason(key, training.request):
            self.jobs.log(record.TrainsAlone(training.name, reason))
            return False
        self._gathering.add(key, training, self.jobs.clock())
        return True

    def withdraw(self, future: Future[Any] | None) -> list[Training]:
        """Give back one that is in no cohort yet, or all."""
        return self._gathering.take_all() if future is None else self._gathering.take(future)

    def advance(self) -> None:
        """Form cohorts of those that were submitted together."""
        for key, trainings in self._gathering.ready(self.jobs.clock()):
            self._form(key, trainings)
        self._cohorts = {key: cohort for key, cohort in self._cohorts.items() if not cohort.over}

    def _form(self, key: CohortKey, trainings: list[Training]) -> None:
        """Add training jobs to the cohort of their key, if there is one, or form one of at least two."""
        differ = {training.name: self._differ.pop(training.name, "") for training in trainings}
        known = self._cohorts.get(key)
        if known is not None and not known.over:
            self.jobs.extend(known, trainings)
            return
        left = []
        for training in trainings:
            if reason := self._refusals.reason(key, training.request):  # found out since it was submitted
                self.jobs.log(record.TrainsAlone(training.name, reason))
                self.jobs.offer(training, after=self)
            else:
                left.append(training)
        trainings = left
        if len(trainings) == 1 and not key.structure:
            self.jobs.offer(trainings[0], after=self)
        elif trainings:
            jobs = self.jobs
            cohort = self._cohorts[key] = Cohort(
                f"cohort-{next(self._names)}",
                [training.request for training in trainings],
                key=key,
                limits=jobs.settings.limits,
                costs=jobs.settings.costs,
                slots_per_unit=jobs.registry.slots_per_unit,
                units_per_node=jobs.registry.units_per_node,
                numbers=jobs.numbers,
                best_rate=jobs.curves.best_rate,
                now=jobs.clock(),
                differ=differ[trainings[0].name],
            )
            jobs.hold(self, cohort, trainings)

    def carry_out(self, job: Cohort, training: Training | None, command: OwnCommand) -> None:
        """Let a member of a cohort train elsewhere."""
        match command:
            case Refuse():
                self._refusals.add(job.key, command.likenesses, command.reason, lasting=command.lasting)
            case JoinCohort(structure, differs):
                assert training is not None
                self._differ[training.name] = differs
                self._gathering.add(replace(job.key, structure=structure), training, self.jobs.clock())
            case TrainAlone(reason):
                assert training is not None
                if reason:
                    self.jobs.log(record.TrainsAlone(training.name, reason))
                self.jobs.offer(training, after=self)

    # In a slot.

    @classmethod
    def run(cls, command: StartArray, send: Callable[[ToDriver], None], files: ValueFiles | None) -> Run:
        """Return the run of an array."""
        from freetrain_parsl.extensions.fusion.slot.array_run import ArrayRun

        return ArrayRun(command, send, files)

    # In ``freetrain plan``.

    @classmethod
    def key(cls, request: TrainingRequest) -> CohortKey | None:
        """Return the key of a training job's cohort."""
        return cohort_key(request)

    @classmethod
    def planned(
        cls, number: int, requests: Sequence[TrainingRequest], costs: CostsInSeconds, submitted: float
    ) -> tuple[PlannedJob, str]:
        """Return a cohort as one trainer."""
        name = f"cohort-{number}"
        names = ", ".join(request.name for request in requests[:3]) + (", …" if requests[3:] else "")
        note = f"{name}: {len(requests)} training jobs that may run fused, several in a slot: {names}"
        return cohort_as_trainer(name, requests, costs=costs, slots_per_unit=1, submitted=submitted), note
