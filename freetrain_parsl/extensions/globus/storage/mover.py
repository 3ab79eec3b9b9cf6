"""The mover: carries whole checkpoints between a site's checkpoint directory and home, and owns training jobs there.

A thread of the driver, on the login node: compute nodes need no internet access. Decisions are made by two pure
objects, `Ownership` and `Carrier`; this thread owns all requests and files.

A training job goes through these stages: its next generation is *claimed*; the newest whole checkpoint of home is
*searched* and, if it is of a later generation or step than those here, *fetched* and verified; the training job is
*ready* and runs, and its new checkpoints are copied to home; once it has *finished*, its result counts when a new
listing shows that it is still owned, and it is *released* when its last checkpoint is at home.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from freetrain_parsl.errors import CheckpointError, CollectionUnavailable, DamagedCheckpoint, GlobusRefused
from freetrain_parsl.extensions.globus.storage.carried_training import CarriedStage, CarriedTraining, SeenCheckpoints
from freetrain_parsl.extensions.globus.storage.carrier import (
    GIVE_UP,
    Carrier,
    CopyJob,
    CopyKind,
    backoff,
    progress_line,
)
from freetrain_parsl.extensions.globus.storage.home_search import TOGETHER, HomeSearch, difference_at_home
from freetrain_parsl.extensions.globus.storage.mover_directory import (
    MOST_MEASURED,
    MeasuredCopy,
    MoverDirectory,
    MoverPace,
    MoverState,
    copy_task,
)
from freetrain_parsl.extensions.globus.storage.names import OWNERS
from freetrain_parsl.extensions.globus.storage.ownership import SETTLE, ListOwners, MakeEntry, Ownership, RequestOutcome
from freetrain_parsl.storage.home import ResultStatus
from freetrain_parsl.storage.posix import directory_name
from freetrain_parsl.storage.problems import storage_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from freetrain_parsl.extensions.globus.storage.collections import Collections, GlobusSettings
    from freetrain_parsl.extensions.globus.storage.ownership import OwnerRequest

logger = logging.getLogger(__name__)

__all__ = ["Mover"]

_HALT = 10.0  # seconds: a request may be on its way


class Mover:
    """Carries the checkpoints of a run's training jobs: a `Home`. Its methods may be called from any thread.

    Parameters
    ----------
    settings
        The places.
    root
        The checkpoint directory.
    run_dir
        The run directory, where its jobs are kept.
    driver
        Identity of the run, hexadecimal.
    collections
        Requests; used by its thread only.
    clock
        Seconds, never stepped.
    pace
        Default: that of the lease.
    allowed
        Whether this driver may still act: another one may have replaced it, which has a mover of its own.
    """

    def __init__(
        self,
        settings: GlobusSettings,
        root: Path,
        run_dir: Path,
        driver: str,
        collections: Collections,
        *,
        clock: Callable[[], float] = time.monotonic,
        pace: MoverPace | None = None,
        allowed: Callable[[], bool] = lambda: True,
    ) -> None:
        lease = settings.lease.total_seconds()
        self._settings = settings
        self._run_dir = run_dir
        self._collections = collections
        self._clock = clock
        self._allowed = allowed
        self._pace = pace or MoverPace.of(lease)
        self._exchange = MoverDirectory(root)
        self._ownership = Ownership(driver, lease)
        self._carrier = Carrier(self._pace.retry, self._pace.longest, SETTLE * lease)
        before = MoverState.read(run_dir)
        self._seen = SeenCheckpoints(lease, self._pace.longest, {one.training: one for one in before.whole})
        self._measured = deque(before.measured, MOST_MEASURED)
        self._lock = threading.RLock()
        self._names: dict[str, str] = {}  # of training jobs -> of directories
        self._carried: dict[str, CarriedTraining] = {}  # by directory name
        self._lost: dict[str, str] = {}
        self._next_scan = 0.0
        self._next_copies = 0.0
        self._not_before = 0.0
        self._failures = 0
        self._problem = ""
        self._written: dict[str, Any] = {}
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="freetrain-mover", daemon=True)
        self._search = HomeSearch(
            settings.home, collections, self._exchange, self._ownership, self._carrier, self._seen, self._carried,
            self._lock, clock, self._pace.longest, self._spare,
        )  # fmt: skip
        self._abandoned = [job.task for job in self._carrier.restore(before.jobs) if job.task]
        self._seen.under_way(self._carrier.leaving())
        self._exchange.keep_only(self._carrier.leaving())
        self._exchange.forget_arrivals()

    # The driver's side.

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def want(self, trainings: Iterable[str]) -> None:
        """Get ready to train these, as soon as no other site owns them."""
        with self._lock:
            for training in trainings:
                name = self._names[training] = directory_name(training)
                self._carried[name] = CarriedTraining(name)
                self._ownership.want(name)

    def leave(self, training: str) -> None:
        """Give up a training job that does not run here: its last checkpoint is copied to home, then it is released."""
        with self._lock:
            item = self._carried[self._names[training]]
            item.leaving = True
            lost = self._lost.pop(item.name, None)
            if item.stage is CarriedStage.READY and lost is None:
                item.stage, item.finished, item.confirmed = CarriedStage.FINISHED, self._clock(), True
                self._next_scan = 0.0
            elif item.stage is not CarriedStage.OVER:
                self._drop(item)

    def has_left(self, training: str) -> bool:
        """Return whether a training job was never wanted here, or has left and is released."""
        with self._lock:
            item = self._carried.get(self._names.get(training, ""))
            return item is None or (item.stage is CarriedStage.OVER and not self._ownership.wants(item.name))

    def abandon(self, trainings: Iterable[str]) -> None:
        """Release training jobs that are not wanted here, if an earlier driver of this run has not."""
        with self._lock:
            for training in trainings:
                self._ownership.abandon(directory_name(training))

    def is_ready(self, training: str) -> bool:
        """Return whether a training job may start, or continue, here."""
        with self._lock:
            item = self._carried[self._names[training]]
            return item.stage is CarriedStage.READY and item.name not in self._lost

    def lost(self, training: str) -> str:
        """Return why a training job that runs here must stop; empty if it need not."""
        with self._lock:
            return self._lost.get(self._names[training], "")

    def stopped(self, training: str) -> None:
        """Note that a training job whose ownership was lost no longer runs here; it is wanted again."""
        with self._lock:
            name = self._names[training]
            self._lost.pop(name, None)
            self._ownership.stopped(name)
            self._carrier.forget(name)
            self._carried[name] = CarriedTraining(name, reason=self._ownership.reason(name))

    def finished(self, training: str) -> ResultStatus:
        """Note that a job has ended here with a result; return whether the result counts, once that is known."""
        with self._lock:
            item = self._carried[self._names[training]]
            if item.confirmed:
                return ResultStatus.CONFIRMED
            if item.name in self._lost:
                return ResultStatus.LOST
            if item.stage is CarriedStage.READY:
                item.stage, item.finished = CarriedStage.FINISHED, self._clock()
            return ResultStatus.PENDING

    def remark(self, training: str) -> str:
        """Return what the user should know about a training job: why it waits, or is not copied."""
        with self._lock:
            item = self._carried[self._names[training]]
            trouble = self._carrier.trouble(item.name, self._clock())
            if item.stage is CarriedStage.CLAIMING:
                return self._problem or self._ownership.reason(item.name) or item.reason
            if item.stage in (CarriedStage.SEARCHING, CarriedStage.FETCHING):
                return "; ".join(filter(None, ["fetches its checkpoint from home", item.reason, trouble]))
            return f"not copied to home: {trouble or self._problem}" if trouble or self._problem else ""

    def lines(self) -> list[str]:
        """Describe the copies in progress."""
        with self._lock:
            lines = [progress_line(job) for job in self._carrier.jobs if job.kind is not CopyKind.REMOVE]
            return [*lines, self._problem] if self._problem else lines

    @property
    def settled(self) -> bool:
        """Whether the last checkpoints of all finished training jobs are at home, or cannot be copied."""
        with self._lock:
            return all(item.stage is not CarriedStage.FINISHED for item in self._carried.values())

    def close(self, timeout: float) -> None:
        """Copy the last checkpoints and release the training jobs, then end the thread.

        Parameters
        ----------
        timeout
            Seconds after which what is not at home yet is left for the next driver; other sites wait for the lease.
        """
        with self._lock:
            for item in self._carried.values():
                if item.stage is CarriedStage.READY and item.name not in self._lost:
                    item.stage, item.finished, item.confirmed = CarriedStage.FINISHED, self._clock(), True
                elif item.stage is not CarriedStage.FINISHED:
                    self._ownership.release(item.name)
            self._next_scan = 0.0
        end = self._clock() + timeout
        while self._clock() < end and self._thread.is_alive():
            with self._lock:
                if self.settled and not self._ownership.releasing:
                    break
            time.sleep(self._pace.turn)
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join(timeout)

    def halt(self) -> None:
        """End the thread and leave everything as it is."""
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join(_HALT)

    # The loop.

    def _run(self) -> None:
        while not self._ending.wait(self._pace.turn) and self._allowed():
            try:
                self.turn()
            # The driver continues without copies; its training jobs stop when the lease ends.
            except Exception:  # noqa: PERF203 - see above
                logger.exception("the mover failed; it tries again")
                self._pause(0.0, "internal error; see freetrain.log")

    def turn(self) -> None:
        """Do what is due: one request for ownership, the next step of each training job, and of the copies."""
        with self._lock:
            self._note_lost()
        if self._clock() >= self._not_before:
            try:
                self._own()
                self._advance()
                self._copy()
                self._failures, self._problem = 0, ""
            except (CollectionUnavailable, GlobusRefused) as error:
                self._pause(getattr(error, "wait", 0.0), str(error))
            except CheckpointError as error:  # the disk here
                self._pause(0.0, str(error))
        self._keep()

    def _pause(self, wait: float, problem: str) -> None:
        """Make no request for some time."""
        pause = max(wait, backoff(self._failures, self._pace.retry, self._pace.longest))
        if not self._problem:
            logger.warning("%s", problem)
        self._failures += 1
        self._problem, self._not_before = problem, self._clock() + pause

    def _note_lost(self) -> None:
        for name, reason in self._ownership.lost(self._clock()).items():
            item = self._carried[name]
            if name in self._lost or item.stage is CarriedStage.OVER:
                continue
            logger.warning("training job %s: %s", name, reason)
            if item.confirmed:  # its result counts
                item.stage = CarriedStage.OVER
                self._ownership.release(name)
            elif item.stage in (CarriedStage.READY, CarriedStage.FINISHED):
                self._lost[name] = reason
            else:  # it does not run
                self._ownership.stopped(name)
                self._carrier.forget(name)
                self._carried[name] = CarriedTraining(name, reason=reason)

    # Ownership.

    def _own(self) -> None:
        for _ in range(3):
            with self._lock:
                confirm = [item.finished for item in self._carried.values()
                           if item.stage is CarriedStage.FINISHED and not item.confirmed]  # fmt: skip
                asked = self._clock()
                request = self._ownership.next_request(asked, confirm=max(confirm, default=None))
            if request is None:
                return
            self._carry_out(request, asked)
            self._spare()

    def _carry_out(self, request: OwnerRequest, asked: float) -> None:
        home = self._settings.home
        if isinstance(request, ListOwners):
            names = self._collections.names(home.collection, home.join(OWNERS))
            if names is None:
                self._collections.make_directory(home.collection, home.join(OWNERS))
                names = []
            with self._lock:
                self._ownership.on_listing(names, asked, self._clock())
                self._note_lost()
            return
        outcome = RequestOutcome.UNKNOWN
        try:
            if isinstance(request, MakeEntry):
                done = self._collections.make_directory(home.collection, home.join(OWNERS, request.name))
            else:
                old, new = home.join(OWNERS, request.name), home.join(OWNERS, request.to)
                done = self._collections.rename(home.collection, old, new)
            outcome = RequestOutcome.DONE if done else RequestOutcome.REFUSED
        finally:
            with self._lock:
                self._ownership.on_answer(request, outcome, asked)

    # Training jobs.

    def _advance(self) -> None:
        for name in list(self._carried):
            with self._lock:
                item = self._carried[name]
                generation = self._ownership.generation(name, self._clock())
                if item.stage is CarriedStage.CLAIMING and generation is not None:
                    item.stage, item.generation, item.reason = CarriedStage.SEARCHING, generation, ""
                    logger.info("training job %s: owned in generation %d", name, generation)
            if item.stage is CarriedStage.FETCHING and generation is not None:
                with self._lock:
                    self._search.fetch_next(item)
            with self._lock:
                self._finish(item)
        self._search.search()
        if self._clock() >= self._next_scan:
            self._next_scan = self._clock() + self._pace.scan
            self._scan()

    def _finish(self, item: CarriedTraining) -> None:
        """Confirm that a finished training job is still owned; release it once its last checkpoint is at home."""
        now = self._clock()
        if item.stage is not CarriedStage.FINISHED:
            return
        if not item.confirmed:
            item.confirmed = self._ownership.confirmed_since(item.name, item.finished, now)
        elif item.scanned and not self._carrier.busy(item.name):
            item.stage = CarriedStage.OVER
            self._ownership.release(item.name)
        elif self._carrier.failures(item.name) >= GIVE_UP and not item.leaving:
            trouble = self._carrier.trouble(item.name, now)
            logger.warning("training job %s: its last checkpoint is not at home: %s", item.name, trouble)
            item.stage = CarriedStage.OVER

    def _drop(self, item: CarriedTraining) -> None:
        item.stage = CarriedStage.OVER
        self._ownership.release(item.name)
        self._carrier.forget(item.name)

    # Copies.

    def _scan(self) -> None:
        """Offer the newest checkpoints: at once of jobs that have ended, from time to time of those that run."""
        stages = {CarriedStage.FINISHED}
        if self._clock() >= self._next_copies:
            self._next_copies = self._clock() + self._pace.copies
            stages.add(CarriedStage.READY)
        for item in list(self._carried.values()):
            if item.stage not in stages or item.name in self._lost:
                continue
            finished = item.stage is CarriedStage.FINISHED
            entry = self._exchange.newest(item.name)
            item.scanned = finished
            if entry is None:
                continue
            with self._lock:
                if not self._carrier.wants(item.name, entry.path.name, item.lineage):
                    continue
            try:
                parcel = self._exchange.pack(item.name, item.generation, entry)
            except DamagedCheckpoint as error:
                # One that still runs has removed it meanwhile: there is a newer one.
                level = logging.WARNING if finished else logging.INFO
                logger.log(level, "training job %s: not copied to home: %s", item.name, error)
                continue
            with self._lock:
                self._carrier.offer(parcel)
                self._exchange.keep_only(self._carrier.leaving())

    def _copy(self) -> None:
        while self._abandoned:
            try:
                self._collections.cancel(self._abandoned[-1])
            except GlobusRefused as error:  # what it copies is not used
                logger.warning("%s", error)
            self._abandoned.pop()
        now = self._clock()
        with self._lock:
            self._carrier.next_job(now)
            jobs = list(self._carrier.jobs)
        for job in jobs:
            if not job.task:
                self._submit(job)
            elif now >= job.poll_at:
                self._poll(job)
        self._search.accept()
        self._look_for_sent()

    def _look_for_sent(self) -> None:
        """Ask home whether it lists what was sent; only then older checkpoints are removed, and jobs released."""
        with self._lock:
            parcels = self._carrier.to_look_for(self._clock())[:TOGETHER]
        for parcel in parcels:
            sizes = self._exchange.sizes(parcel)
            try:
                fault = difference_at_home(self._collections, self._settings.home, parcel, sizes)
            except GlobusRefused as error:
                fault = str(error)
            fault = fault if sizes else f"the files of {parcel.name} that were to be copied are gone"
            with self._lock:
                self._carrier.shown(parcel, fault, self._clock())
                if not fault:
                    self._seen.newest[parcel.training] = parcel
                self._exchange.keep_only(self._carrier.leaving())
            self._spare()

    def _submit(self, job: CopyJob) -> None:
        """Submit a job; its submission id is on disk before."""
        if not job.submission:
            job.submission = self._collections.submission_id()
            try:
                self._state().write(self._run_dir)
            except OSError as error:
                job.submission = ""
                raise storage_error(f"cannot write in {self._run_dir}", self._run_dir, error) from error
        task = copy_task(job, self._settings)
        try:
            if job.kind is CopyKind.REMOVE:
                job.task = self._collections.submit_delete(job.submission, task.source, task.paths)
            else:
                job.task = self._collections.submit_transfer(job.submission, task.source, task.target, task.items)
        except GlobusRefused as error:
            with self._lock:
                self._carrier.refused(job, str(error), self._clock())
            return
        job.begun = self._clock()
        job.poll_at = job.begun + self._pace.poll_least
        self._spare()

    def _poll(self, job: CopyJob) -> None:
        state = self._collections.task(job.task)
        now = self._clock()
        with self._lock:
            self._search.arrivals += self._carrier.on_state(job, state, now)
            if state.status == "SUCCEEDED" and job.kind in (CopyKind.DATA, CopyKind.FETCH):
                size = max(job.size, state.bytes_done)
                self._measured.append(MeasuredCopy(job.kind is CopyKind.FETCH, size, now - job.begun))
            self._exchange.keep_only(self._carrier.leaving())
        job.poll_at = now + min(self._pace.poll_most, max(self._pace.poll_least, (now - job.begun) / 10))
        self._spare()

    # Files and requests.

    def _keep(self) -> None:
        """Write the state if it has changed; the jobs that are submitted are on disk already."""
        with self._lock:
            state = self._state()
            document = state.document()
        if document != self._written:
            try:
                state.write(self._run_dir)
                self._written = document
            except OSError as error:
                logger.warning("cannot write the state of the mover in %s: %s", self._run_dir, error)

    def _state(self) -> MoverState:
        return MoverState(self._carrier.jobs, self.lines(), tuple(self._measured), tuple(self._seen.newest.values()))

    def _spare(self) -> None:
        """Keep requests apart."""
        if self._pace.request:
            time.sleep(self._pace.request)
