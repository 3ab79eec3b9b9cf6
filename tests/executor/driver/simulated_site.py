"""The control loop on a simulated site: its clock, batch system and slots obey a list of holes.

Everything but the training jobs' speed is the executor's; their progress is that of a replay.
"""

from __future__ import annotations

import math
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from parsl.serialize import serialize

from freetrain_parsl.executor.driver.loop import ControlLoop, SlotTaskEnded
from freetrain_parsl.executor.jobs.request import SharedSettings, Training, TrainingRequest
from freetrain_parsl.executor.journal import Journal
from freetrain_parsl.extensions.replay.accounts import Account
from freetrain_parsl.planning.model import BlockTerms, Window, WindowKind
from freetrain_parsl.planning.policies import resolve_policy
from freetrain_parsl.protocol.messages import ChangeGroup, Closing, Exit, Hello, PauseRun, RunEnded, RunReport, StartRun
from freetrain_parsl.protocol.options import SessionOptions
from freetrain_parsl.protocol.reports import Joined, PauseReason, Progress, Ready, RunFinished, RunPaused
from freetrain_parsl.windows.base import BlockState, BlockStatus, Survey

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from freetrain_parsl.planning.model import PlannedJob
    from freetrain_parsl.planning.settings import SettingsInSeconds
    from freetrain_parsl.protocol.messages import ToDriver, ToSlot
    from freetrain_parsl.windows.system import BlockSpec

POLL = 1.0  # seconds between surveys


@dataclass
class _Job:
    """A block in the batch system."""

    spec: BlockSpec
    starts: float
    started: float = math.inf
    state: BlockState = BlockState.PENDING
    slots: dict[str, str] = field(default_factory=dict)
    """Its slots -> their nodes."""
    joined: bool = False


class SimulatedSite:
    """Control channel, job submitter and clock of a control loop.

    Parameters
    ----------
    holes
        (node, start, end), whole seconds.
    trainers
        With their work, and the time when they are submitted.
    """

    port = 1

    def __init__(
        self,
        directory: Path,
        holes: Sequence[tuple[str, float, float]],
        trainers: Sequence[PlannedJob],
        settings: SettingsInSeconds,
        start_delay: float,
    ) -> None:
        self.now = 0.0
        self.holes, self.terms, self.settings = holes, BlockTerms(start_delay=start_delay), settings
        self.accounts = {t.name: Account(t, t.submitted, 1.0) for t in trainers}
        self.waiting = list(self.accounts.values())
        self.futures: dict[str, Future[Any]] = {}
        self.jobs: dict[str, _Job] = {}
        self.inbox: list[tuple[str, ToDriver]] = []
        self.tokens: list[str] = []
        self.token_of: dict[str, str] = {}
        self.runs: dict[str, tuple[str, int]] = {}
        """Slot -> its training job and run."""
        self.first: dict[str, str] = {}
        """Training -> its member of rank 0."""
        self.slots = 0
        self.journal_path = directory / "journal.sqlite"
        self.journal = Journal(self.journal_path)
        self.loop = ControlLoop(
            policy=resolve_policy("milp", "throughput"),
            planner_settings=settings,
            server=self,  # type: ignore[arg-type]
            submitter=self,  # type: ignore[arg-type]
            journal=self.journal,
            shared_settings=SharedSettings(SessionOptions("site", directory)),
            slots_per_node=1,
            outdated=1e9,
            heartbeat_timeout=1e9,
            submit_slot=self.tokens.append,
            fail_all=self._fail,
            clock=lambda: self.now,
            monotonic=lambda: self.now,
        )

    # The control channel.

    def receive(self, _timeout: float) -> list[tuple[str, ToDriver]]:
        messages, self.inbox = self.inbox, []
        return messages

    def send(self, slot: str, message: ToSlot) -> bool:
        match message:
            case StartRun(training=training, run=run, place=place):
                self.runs[slot] = training, run
                if place is None:
                    self.inbox.append((slot, RunReport(training, run, Ready())))
                elif place.rank == 0:
                    self.first[training] = slot
            case ChangeGroup(training=training, run=run, generation=generation, place=place):
                if place is None:
                    self._end(slot, PauseReason.LEFT)
                    return True
                if place.rank == 0:
                    self.first[training] = slot
                self.inbox.append((slot, RunReport(training, run, Joined(generation, 0.0, 0.0))))
            case PauseRun():
                self._end(slot, PauseReason.REQUESTED)
            case Exit():
                self._drop(slot)
        return True

    def wake(self) -> None: ...
    def close(self) -> None: ...
    def forget(self, name: str) -> None: ...

    def _end(self, slot: str, reason: PauseReason) -> None:
        training, run = self.runs.pop(slot)
        self.inbox.append((slot, RunEnded(training, run, RunPaused(reason, self._progress(training)))))

    def _drop(self, slot: str) -> None:
        for job in self.jobs.values():
            job.slots.pop(slot, None)
        self.runs.pop(slot, None)

    # The job submitter.

    def request(self, spec: BlockSpec) -> None:
        self.jobs[spec.block] = _Job(spec, self.now + self.terms.start_delay)
        self._change_blocks()

    def withdraw(self, block: str) -> None:
        self._over(self.jobs[block], BlockState.CANCELLED)

    def rest(self, _resting: bool) -> None: ...
    def works(self) -> None: ...
    def failed_to_start(self, *_: object) -> None:
        raise AssertionError("a block failed to start")

    # The site.

    def run(self, until: float) -> None:
        """Let the loop run."""
        while self.now < until:
            self._turn()
            done = (account.done_at(self.now) for account in self.accounts.values() if account.finished is None)
            poll = POLL * (math.floor(self.now / POLL) + 1)
            due = [poll, self.loop._planner.wake_at(self.now), *done]
            target = min(time for time in due if time > self.now)
            for account in self.accounts.values():
                if account.nodes:
                    account.run(target - self.now)
            self.now = target
        self.loop._journal.close()

    def _turn(self) -> None:
        self._finish_trainings()
        self._change_blocks()
        self._submit()
        self._report()
        if self.now % POLL == 0:
            self.loop.post(self._survey())
        self.loop._turn()
        self._reassign()
        while self.inbox or not self.loop._posted.empty():
            self.loop._turn()
            self._reassign()

    def _fail(self, error: Exception) -> None:
        raise error

    def _finish_trainings(self) -> None:
        for name, account in self.accounts.items():
            if account.finished is None and account.done(self.now) and account.nodes:
                account.finished = self.now
                account.stop()
                for slot, (training, run) in list(self.runs.items()):
                    if training == name:
                        del self.runs[slot]
                        self.inbox.append((slot, RunEnded(name, run, RunFinished(Progress()), serialize(None))))

    def _idle(self) -> set[str]:
        return {node for node, start, end in self.holes if start <= self.now < end}

    def _change_blocks(self) -> None:
        idle = self._idle()
        for job in self.jobs.values():
            nodes = set(job.spec.nodes)
            if job.state is BlockState.RUNNING and not nodes <= idle:
                for account in self.accounts.values():
                    if lost := account.nodes & nodes:
                        account.preempt(lost)
                self._over(job, BlockState.PREEMPTED)
            elif job.state is BlockState.RUNNING and self.now >= job.started + job.spec.seconds:
                self._over(job, BlockState.TIMED_OUT)
        for name, job in self.jobs.items():
            nodes = set(job.spec.nodes)
            if job.state is BlockState.PENDING and self.now >= job.starts and nodes <= idle - self._held():
                job.state, job.started = BlockState.RUNNING, self.now
            if job.state is BlockState.RUNNING and not job.joined and self.now >= job.started + self.settings.startup:
                job.joined = True
                for node in job.spec.nodes:
                    slot = f"{node}/{self.slots}"
                    self.slots += 1
                    job.slots[slot], self.token_of[slot] = node, self.tokens.pop(0)
                    self.inbox.append((slot, Hello(self.token_of[slot], node, name, 0)))

    def _held(self) -> set[str]:
        return {node for job in self.jobs.values() if job.state is BlockState.RUNNING for node in job.spec.nodes}

    def _over(self, job: _Job, state: BlockState) -> None:
        if job.state.ended:
            return
        job.state = state
        for slot in list(job.slots):
            self._drop(slot)
            if state is BlockState.PREEMPTED:
                self.inbox.append((slot, Closing(0.0, gone=True)))
            else:
                self.loop.post(SlotTaskEnded(self.token_of[slot], RuntimeError("cancelled")))

    def _survey(self) -> Survey:
        free = tuple(sorted(self._idle() - self._held()))
        windows = (Window(free, self.now, None, WindowKind.PREEMPTIBLE),) if free else ()
        statuses = {}
        for name, job in self.jobs.items():
            runs = job.state is BlockState.RUNNING
            ends = job.started + job.spec.seconds if runs else None
            statuses[name] = BlockStatus(job.state, tuple(job.spec.nodes) if runs else (), ends)
        return Survey(self.now, windows, statuses, self.terms)

    def _submit(self) -> None:
        for account in list(self.waiting):
            if account.submitted <= self.now:
                self.waiting.remove(account)
                trainer = account.trainer
                self.futures[trainer.name] = Future()
                request = TrainingRequest(
                    SessionOptions(trainer.name), trainer.min_nodes, trainer.max_nodes, trainer.curve,
                    samples=int(trainer.work_left), costs=trainer.costs,
                )  # fmt: skip
                self.loop.post(Training(request, b"", self.futures[trainer.name]))

    def _report(self) -> None:
        for name, account in self.accounts.items():
            slot = self.first.get(name)
            if account.finished is None and slot in self.runs and self.runs[slot][0] == name:
                self.inbox.append((slot, RunReport(name, self.runs[slot][1], self._progress(name))))

    def _progress(self, name: str) -> Progress:
        account = self.accounts[name]
        samples: Any = account.samples  # not rounded, as in a replay
        return Progress(samples=samples, samples_total=int(account.trainer.work_left), in_place=True)

    def _reassign(self) -> None:
        assigned = self.loop._planner.assigned
        for name, account in self.accounts.items():
            nodes = assigned.get(name, frozenset())
            if account.finished is not None or nodes == account.nodes:
                continue
            if account.nodes:
                account.rescale(nodes)
            else:
                account.start(nodes, self.now, account.trainer.costs.start)
