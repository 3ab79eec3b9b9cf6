"""Which checkpoints are copied when, in which tasks. Pure: `mover` owns the requests.

A checkpoint is sent in two tasks, its data first and its manifest once these have arrived: elsewhere it counts only
with its manifest. The newest checkpoints of several training jobs share a task. A job is kept in the run directory with
its submission id before it is submitted, so that submitting it again after a crash starts nothing twice.

Neither a task that has succeeded nor a listing is believed alone. A checkpoint is at home once a listing shows its
files, with their sizes. Older checkpoints, and partial ones, are removed only if `KEPT` later ones are *proven*: sent,
or fetched and verified, by this driver.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from freetrain_parsl.extensions.globus.storage.names import LAST_NUMBER, generation_name, is_training_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from freetrain_parsl.extensions.globus.storage.collections import TaskState

__all__ = ["GIVE_UP", "MOST_ACTIVE", "Carrier", "CopyJob", "CopyKind", "HomeCheckpoints", "Parcel", "backoff"]

MOST_ACTIVE = 2
"""Tasks of one driver at a time."""
GIVE_UP = 3
"""Failures in a row after which a finished run no longer waits for a copy."""
KEPT = 2
"""Checkpoints of a training job that stay at home."""

_MOST_TOGETHER = 50  # checkpoints in one task
_STEP = re.compile(r"step-([0-9]{10}|[1-9][0-9]{10,17})(?:-([1-9][0-9]{0,8}))?")


class CopyKind(str, Enum):
    """What a task does."""

    DATA = "data"
    MANIFEST = "manifest"
    FETCH = "fetch"
    REMOVE = "remove"


@dataclass(frozen=True)
class Parcel:
    """A checkpoint at home, or on its way.

    Parameters
    ----------
    training
        Directory name of its training job.
    generation
        Generation of the driver that sent it.
    name
        Of its directory, ``step-…``.
    size
        Bytes, 0 if unknown.
    """

    training: str
    generation: int
    name: str
    size: int = field(default=0, compare=False)

    @property
    def path(self) -> tuple[str, str, str]:
        """Its place below ``checkpoints`` on home."""
        return self.training, generation_name(self.generation), self.name

    @property
    def order(self) -> tuple[int, int, int]:
        """Later checkpoints have larger ones. A later generation has continued from what its driver has found."""
        return (self.generation, *step_of(self.name))

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Parcel:
        """Read what ``vars`` has returned."""
        parcel = cls(**document)
        kinds = (parcel.training, str), (parcel.generation, int), (parcel.name, str), (parcel.size, int)
        if not all(isinstance(value, kind) for value, kind in kinds) or not parcel.is_checkpoint:
            raise ValueError("a parcel of a job is none")
        if not is_training_name(parcel.training) or not 0 <= parcel.generation <= LAST_NUMBER:
            raise ValueError("a parcel of a job is outside the checkpoints of a training job")
        return parcel

    @property
    def is_checkpoint(self) -> bool:
        """Whether the name is one of a checkpoint."""
        return _STEP.fullmatch(self.name) is not None


def step_of(name: str) -> tuple[int, int]:
    """Return step and revision of a checkpoint's directory name; (-1, 0) for other names."""
    match = _STEP.fullmatch(name)
    return (int(match[1]), int(match[2] or 0)) if match else (-1, 0)


@dataclass
class HomeCheckpoints:
    """Checkpoints of a training job that home lists: those with a manifest, and those without."""

    whole: set[Parcel] = field(default_factory=set)
    partial: set[Parcel] = field(default_factory=set)

    @property
    def ordered(self) -> list[Parcel]:
        """The whole ones, oldest first."""
        return sorted(self.whole, key=lambda parcel: parcel.order)


@dataclass
class CopyJob:
    """A task of Globus Transfer, submitted or about to be.

    Parameters
    ----------
    kind, parcels
        What it does.
    submission
        Its submission id; empty if it has none yet.
    task
        Id of the task; empty until the service has answered.
    state
        Its state as last asked.
    begun
        When it was submitted.
    poll_at
        When to ask next.
    """

    kind: CopyKind
    parcels: tuple[Parcel, ...]
    submission: str = ""
    task: str = ""
    state: TaskState | None = None
    begun: float = 0.0
    poll_at: float = 0.0

    @property
    def size(self) -> int:
        """Bytes to copy."""
        return sum(parcel.size for parcel in self.parcels) if self.kind in (CopyKind.DATA, CopyKind.FETCH) else 0

    def as_json(self) -> dict[str, Any]:
        """Return what must survive the driver."""
        return {
            "kind": self.kind.value,
            "parcels": [vars(parcel) for parcel in self.parcels],
            "submission": self.submission,
            "task": self.task,
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> CopyJob:
        """Read what `as_json` returned."""
        parcels = tuple(map(Parcel.from_json, document["parcels"]))
        return cls(CopyKind(document["kind"]), parcels, document["submission"], document["task"])


@dataclass
class _Trouble:
    failures: int
    until: float
    reason: str


@dataclass
class _Sent:
    """A checkpoint whose tasks have succeeded, and which home does not list yet."""

    since: float
    look_at: float


@dataclass
class Carrier:
    """The copies of one driver.

    Parameters
    ----------
    retry, longest
        Seconds until a failed copy is tried again: first, and at most.
    patience
        Seconds in which home must list a checkpoint that was sent.
    jobs
        Active ones.
    """

    retry: float
    longest: float
    patience: float = 180.0
    jobs: list[CopyJob] = field(default_factory=list)
    _send: dict[str, Parcel] = field(default_factory=dict)
    _fetch: dict[str, Parcel] = field(default_factory=dict)
    _remove: set[Parcel] = field(default_factory=set)
    _home: dict[str, set[Parcel]] = field(default_factory=dict)
    _partial: dict[str, set[Parcel]] = field(default_factory=dict)
    _proven: dict[str, set[Parcel]] = field(default_factory=dict)
    _sent: dict[Parcel, _Sent] = field(default_factory=dict)
    _trouble: dict[str, _Trouble] = field(default_factory=dict)

    def found(self, training: str, parcels: Iterable[Parcel], partial: Iterable[Parcel] = ()) -> None:
        """Note the checkpoints of a training job that home lists as whole, and those without a manifest."""
        self._home[training] = set(parcels)
        self._partial[training] = set(partial)

    def wants(self, training: str, name: str, lineage: int) -> bool:
        """Return whether the newest checkpoint of a training job is neither at home nor on its way.

        Checkpoints of the generation `lineage` and of later ones at home are of the same course of training.
        """
        known = self._home.get(training, set()) | self.leaving()
        return not any(
            parcel.training == training and parcel.name == name and parcel.generation >= lineage for parcel in known
        )

    def offer(self, parcel: Parcel) -> None:
        """Copy a checkpoint to home, instead of an older one that waits."""
        self._send[parcel.training] = parcel

    def leaving(self) -> set[Parcel]:
        """Return the checkpoints that wait or are being sent."""
        sent = (job.parcels for job in self.jobs if job.kind in (CopyKind.DATA, CopyKind.MANIFEST))
        return {parcel for parcels in sent for parcel in parcels} | set(self._send.values()) | set(self._sent)

    def fetch(self, parcel: Parcel) -> None:
        """Copy a checkpoint from home."""
        self._fetch[parcel.training] = parcel

    def to_look_for(self, now: float) -> list[Parcel]:
        """Return the checkpoints that were sent, and that home must be asked for now."""
        return [parcel for parcel, sent in self._sent.items() if now >= sent.look_at]

    def shown(self, parcel: Parcel, fault: str, now: float) -> None:
        """Note whether home lists a checkpoint that was sent; `fault` is what it lists otherwise, empty if nothing."""
        if (sent := self._sent.get(parcel)) is None:
            return
        if fault and now - sent.since < self.patience:  # a listing may be older than the task
            sent.look_at = now + min(max(self.retry, (now - sent.since) / 2), self.longest)
            return
        del self._sent[parcel]
        if fault:
            self._fail(parcel.training, fault, now)
            self._send.setdefault(parcel.training, parcel)
            return
        self._trouble.pop(parcel.training, None)
        self._remove.discard(parcel)
        self._home.setdefault(parcel.training, set()).add(parcel)
        self.prove(parcel)
        self._tidy(parcel.training)

    def prove(self, parcel: Parcel) -> None:
        """Note that a checkpoint is whole at home, as this driver has sent it or has fetched and verified it."""
        self._proven.setdefault(parcel.training, set()).add(parcel)

    def forget(self, training: str) -> None:
        """Copy nothing more of a training job that is no longer owned."""
        self._send.pop(training, None)
        self._fetch.pop(training, None)
        self._trouble.pop(training, None)
        self._proven.pop(training, None)
        self._sent = {parcel: sent for parcel, sent in self._sent.items() if parcel.training != training}
        self._remove = {parcel for parcel in self._remove if parcel.training != training}

    def busy(self, training: str) -> bool:
        """Whether something of a training job is to be copied, or under way."""
        moving = [*(parcel for job in self.jobs for parcel in job.parcels), *self._sent]
        return (
            any(parcel.training == training for parcel in moving) or training in self._send or training in self._fetch
        )

    def fetching(self, training: str) -> bool:
        """Whether a checkpoint of a training job is to be fetched, or under way from home."""
        fetches = (job for job in self.jobs if job.kind is CopyKind.FETCH)
        return training in self._fetch or any(parcel.training == training for job in fetches for parcel in job.parcels)

    def trouble(self, training: str, now: float) -> str:
        """Return why the last copy of a training job failed, and when the next one begins; empty if none did."""
        if (trouble := self._trouble.get(training)) is None:
            return ""
        return f"{trouble.reason}, next attempt in {max(0.0, trouble.until - now):.0f} s"

    def blocked_until(self, training: str) -> float:
        """Return when the next copy of a training job may begin."""
        return self._trouble[training].until if training in self._trouble else 0.0

    def failures(self, training: str) -> int:
        """Return the number of failed copies of a training job in a row."""
        return self._trouble[training].failures if training in self._trouble else 0

    def next_job(self, now: float) -> CopyJob | None:
        """Return a job to submit, if one is due; it is active from now on."""
        if len(self.jobs) >= MOST_ACTIVE:
            return None
        busy = {parcel.training for job in self.jobs for parcel in job.parcels}
        blocked = busy | {name for name, trouble in self._trouble.items() if now < trouble.until}
        for kind, waiting in ((CopyKind.FETCH, self._fetch), (CopyKind.DATA, self._send)):
            chosen = [name for name in waiting if name not in blocked][:_MOST_TOGETHER]
            if chosen:
                return self._begin(CopyJob(kind, tuple(waiting.pop(name) for name in chosen)))
        doomed = sorted((item for item in self._remove if item.training not in busy), key=lambda item: item.path)
        if doomed:
            self._remove.difference_update(doomed)
            return self._begin(CopyJob(CopyKind.REMOVE, tuple(doomed)))
        return None

    def on_state(self, job: CopyJob, state: TaskState, now: float) -> tuple[Parcel, ...]:
        """Take in the state of a job's task; return the parcels that have arrived here, if it was a fetch."""
        job.state = state
        if state.status not in ("SUCCEEDED", "FAILED"):
            return ()
        self.jobs.remove(job)
        if state.status == "FAILED":
            self._failed(job, state.reason or "the task failed", now)
            return ()
        match job.kind:
            case CopyKind.DATA:
                self._begin(CopyJob(CopyKind.MANIFEST, job.parcels))
            case CopyKind.MANIFEST:
                self._sent.update({parcel: _Sent(now, now) for parcel in job.parcels})
            case CopyKind.FETCH:
                return job.parcels
        return ()

    def refused(self, job: CopyJob, reason: str, now: float) -> None:
        """Note that a job's task will not be carried out."""
        self.jobs.remove(job)
        self._failed(job, reason, now)

    def damaged(self, parcel: Parcel, reason: str, now: float) -> None:
        """Note that a checkpoint from home cannot be used; the next attempt comes later each time."""
        self._home.get(parcel.training, set()).discard(parcel)
        self._proven.get(parcel.training, set()).discard(parcel)
        self._fail(parcel.training, reason, now)

    def delayed(self, training: str, reason: str, now: float) -> None:
        """Note that the checkpoints of a training job at home cannot be listed."""
        self._fail(training, reason, now)

    def searched(self, training: str) -> None:
        """Note that a job continues: what could not be fetched does not count as copies to home that have failed."""
        self._trouble.pop(training, None)

    def arrived(self, parcel: Parcel) -> None:
        """Note that a checkpoint from home was verified."""
        self._trouble.pop(parcel.training, None)
        self.prove(parcel)

    def restore(self, jobs: Iterable[CopyJob]) -> list[CopyJob]:
        """Continue to send what an earlier driver was sending; return its other jobs, which begin anew."""
        others: list[CopyJob] = []
        for job in jobs:
            (self.jobs if job.kind in (CopyKind.DATA, CopyKind.MANIFEST) else others).append(job)
        return others

    def _begin(self, job: CopyJob) -> CopyJob:
        self.jobs.append(job)
        return job

    def _failed(self, job: CopyJob, reason: str, now: float) -> None:
        for parcel in job.parcels:
            if job.kind is CopyKind.REMOVE:
                continue  # it is tidied up with the next ones
            self._fail(parcel.training, reason, now)
            if job.kind is not CopyKind.FETCH and parcel.training not in self._send:  # a fetch is looked for anew
                self._send[parcel.training] = parcel

    def _fail(self, training: str, reason: str, now: float) -> None:
        failures = self.failures(training) + 1
        until = now + backoff(failures - 1, self.retry, self.longest)
        self._trouble[training] = _Trouble(failures, until, reason)

    def _tidy(self, training: str) -> None:
        """Remove what is older than the newest `KEPT` proven checkpoints: what listings show may not be there."""
        proven = sorted(self._proven[training], key=lambda parcel: parcel.order)[-KEPT:]
        self._proven[training] = set(proven)
        if len(proven) < KEPT:
            return
        home, partial = self._home[training], self._partial.get(training, set())
        old = {parcel for parcel in home | partial if parcel.order < proven[0].order}
        self._home[training] = home - old
        self._partial[training] = partial - old
        self._remove |= old


def backoff(failures: int, first: float, longest: float) -> float:
    """Return the seconds until the next attempt after some failures: twice as long each time."""
    return min(first * 2.0 ** min(failures, 40), longest)  # 2.0 ** 1024 is an error


def progress_line(job: CopyJob) -> str:
    """Describe a job's progress for the user."""
    what = {
        CopyKind.DATA: "copying to home",
        CopyKind.MANIFEST: "completing at home",
        CopyKind.FETCH: "fetching from home",
        CopyKind.REMOVE: "removing from home",
    }[job.kind]
    names = ", ".join(sorted({parcel.training for parcel in job.parcels})[:3])
    more = len(job.parcels) - 3
    line = f"{what}: {names}{f' and {more} more' if more > 0 else ''}"
    if job.state is None or not job.size:
        return line
    line += f", {_bytes(job.state.bytes_done)} of {_bytes(job.size)}"
    if job.state.rate > 0:
        left = max(0, job.size - job.state.bytes_done) / job.state.rate
        line += f" at {_bytes(job.state.rate)}/s, {left:.0f} s left"
    return line + (f" ({job.state.reason})" if job.state.reason else "")


def _bytes(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.4g} TB"
