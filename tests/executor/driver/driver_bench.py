"""A real driver, job submitter and control channel; the batch system is a list, slots are only channels."""

from __future__ import annotations

import queue
import time
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from parsl.serialize import serialize

from freetrain_parsl.executor.batch.submitter import JobSubmitter
from freetrain_parsl.executor.driver.loop import ControlLoop
from freetrain_parsl.executor.driver.slot_cycle import SlotTaskEnded
from freetrain_parsl.executor.driver.slot_server import SlotServer
from freetrain_parsl.executor.jobs.request import SharedSettings, Training, TrainingRequest
from freetrain_parsl.executor.journal import Journal, JournalEntry, read_journal
from freetrain_parsl.executor.slot.channel import Channel
from freetrain_parsl.planning.curves.scaling import ScalingCurve
from freetrain_parsl.planning.model import CostsInSeconds, Window, WindowKind
from freetrain_parsl.planning.policies import resolve_policy
from freetrain_parsl.planning.settings import PlannerSettings
from freetrain_parsl.protocol.messages import (
    DriverHeartbeat,
    Hello,
    RunEnded,
    RunReport,
    SlotHeartbeat,
    StartRun,
    ToSlot,
)
from freetrain_parsl.protocol.options import SessionOptions
from freetrain_parsl.protocol.reports import PauseReason, Progress, Report, RunFinished, RunPaused
from freetrain_parsl.windows.base import BlockState, BlockStatus, Survey, WindowSource

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from typing_extensions import Self

    from freetrain_parsl.executor.driver.slot_registry import Block
    from freetrain_parsl.windows.system import BlockSpec

NODES = ("n0", "n1")


def wait_for(condition: Callable[[], Any], what: str, limit: float = 60.0) -> Any:
    """Return the first true value of a condition."""
    end = time.monotonic() + limit
    while not (value := condition()):
        assert time.monotonic() < end, f"{what}: not within {limit:g} s"
        time.sleep(0.01)
    return value


class SteppedClock:
    """A wall clock that can be set."""

    def __init__(self) -> None:
        self.lead = 0.0

    def __call__(self) -> float:
        return time.time() + self.lead


class FakeBatchSystem(WindowSource):
    """Starts every block at once, on its own clock."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.jobs: dict[str, BlockStatus] = {}
        self.blocks: dict[str, str] = {}
        """Block -> job."""

    def survey(self, job_ids=()) -> Survey:
        now = self.clock()
        held = {node for job in self.jobs.values() if not job.state.ended for node in job.nodes}
        free = tuple(node for node in NODES if node not in held)
        windows = (Window(free, now, now + 3600.0, WindowKind.BACKFILL),) if free else ()
        return Survey(now, windows, {job: self.jobs[job] for job in job_ids})

    def launch(self, spec: BlockSpec) -> str:
        job = f"job-{spec.block}"
        nodes = NODES[: spec.nodes] if isinstance(spec.nodes, int) else tuple(spec.nodes)
        self.jobs[job] = BlockStatus(BlockState.RUNNING, nodes, self.clock() + spec.seconds)
        self.blocks[spec.block] = job
        return job

    def cancel(self, job_ids) -> None:
        self.jobs.update(dict.fromkeys(job_ids, BlockStatus(BlockState.CANCELLED)))

    def find_jobs(self, prefix: str) -> dict[str, str]:
        return {}


class FakeSlot:
    """A slot's side of the protocol, controlled by the test; sends heartbeats automatically."""

    def __init__(self, bench: DriverBench, node: str, token: str) -> None:
        self.inbox: queue.Queue[ToSlot] = queue.Queue()
        self.lost = False
        self.run, self.training = 0, ""
        self.node, self.token, self._bench = node, token, bench
        block = next(block for block, job in bench.source.blocks.items() if node in bench.source.jobs[job].nodes)
        self.channel = Channel(
            ("127.0.0.1",), bench.server.port, None, f"{node}/0/{token}",
            handle=self._handle, on_lost=self._lose, heartbeat=self._heartbeat,
            beat=0.2, heartbeat_timeout=bench.heartbeat_timeout,
        )  # fmt: skip
        self.channel.start()
        self.channel.send(Hello(token, node, block, 0))

    def _lose(self) -> None:
        self.lost = True

    def _heartbeat(self) -> SlotHeartbeat:
        return SlotHeartbeat(run=self.run or None)

    def _handle(self, message: ToSlot) -> None:
        if isinstance(message, StartRun):
            self.run, self.training = message.run, message.training
        if not isinstance(message, DriverHeartbeat):
            self.inbox.put(message)

    def report(self, report: Report) -> None:
        self.channel.send(RunReport(self.training, self.run, report))

    def progress(self, step: int, **changes: Any) -> None:
        """Report progress of its training job."""
        self.report(Progress(**{"step": step, "samples": 16 * step, "samples_total": 1000, **changes}))

    def finish(self, value: object) -> None:
        """End the run with a result."""
        run, self.run = self.run, 0
        self.channel.send(RunEnded(self.training, run, RunFinished(Progress()), serialize(value)))

    def pause(self, reason: PauseReason = PauseReason.REQUESTED) -> None:
        """End the run with a saved state."""
        run, self.run = self.run, 0
        self.channel.send(RunEnded(self.training, run, RunPaused(reason)))

    def die(self) -> None:
        """End like a process that was killed, which HTEX reports."""
        self.channel.close()
        self._bench.slots.remove(self)
        self._bench.driver.post(SlotTaskEnded(self.token, RuntimeError("killed")))

    def get(self, kind: type, limit: float = 60.0) -> Any:
        """Return the next message of a class; earlier ones of others are dropped."""
        end = time.monotonic() + limit
        while True:
            message = self.inbox.get(timeout=max(0.0, end - time.monotonic()))
            if isinstance(message, kind):
                return message


def a_driver(
    directory: Path,
    server: Any,
    submitter: JobSubmitter,
    wall: Callable[[], float],
    monotonic: Callable[[], float] = time.monotonic,
    *,
    heartbeat_timeout: float = 3.0,
    submit_slot: Callable[[str], None] = str,
    fail_all: Callable[[Exception], None] = str,
) -> ControlLoop:
    """Create a driver with a journal in `directory`."""
    return ControlLoop(
        policy=resolve_policy("milp"),
        planner_settings=replace(
            PlannerSettings().in_seconds(),
            startup=1,
            min_useful=1,
            closing_margin=1,
            max_walltime=600,
            idle_timeout=2,
            settle=0.2,
        ),
        server=server,
        submitter=submitter,
        journal=Journal(directory / "journal.sqlite"),
        shared_settings=SharedSettings(
            SessionOptions("bench", directory / "checkpoints"), costs=CostsInSeconds(1, 1, 1)
        ),
        slots_per_node=1,
        outdated=5.0,
        heartbeat_timeout=heartbeat_timeout,
        submit_slot=submit_slot,
        fail_all=fail_all,
        clock=wall,
        monotonic=monotonic,
    )


class DriverBench:
    """Context manager that ends everything on exit."""

    def __init__(self, directory: Path, *, heartbeat_timeout: float = 3.0) -> None:
        self.wall = SteppedClock()
        self.heartbeat_timeout = heartbeat_timeout
        self.source = FakeBatchSystem(self.wall)
        self.server = SlotServer(None, (55000, 56000))
        self.tokens: queue.Queue[str] = queue.Queue()
        self.failures: list[Exception] = []
        self.futures: list[Future[Any]] = []
        self.slots: list[FakeSlot] = []
        self.journal_path = directory / "journal.sqlite"
        self.submitter = JobSubmitter(
            self.source, self.source.launch, self._post,
            interval=0.1, submissions_per_minute=1000, max_refusals=5, job_prefix="freetrain.test.",
        )  # fmt: skip
        self.driver = a_driver(
            directory, self.server, self.submitter, self.wall,
            heartbeat_timeout=heartbeat_timeout, submit_slot=self.tokens.put, fail_all=self._fail_all,
        )  # fmt: skip

    def _post(self, item: object) -> None:
        self.driver.post(item)

    def _fail_all(self, error: Exception) -> None:
        self.failures.append(error)
        for future in self.futures:
            if not future.done():
                future.set_exception(error)

    def __enter__(self) -> Self:
        self.driver.start()
        self.submitter.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.driver.stop(10)
        self.submitter.close(10)
        for slot in self.slots:
            slot.channel.close()

    def train(self, name: str, *, min_nodes: int = 1, max_nodes: int = 1) -> Future[Any]:
        """Submit a training job; its function does not matter here."""
        future: Future[Any] = Future()
        self.futures.append(future)
        request = TrainingRequest(SessionOptions(name), min_nodes, max_nodes, ScalingCurve.of(None))
        self.driver.post(Training(request, b"", future))
        return future

    def slot(self, node: str = "") -> FakeSlot:
        """Let a slot join, on the given node or on the first held node without a slot."""
        token = self.tokens.get(timeout=60)
        taken = {slot.node for slot in self.slots}

        def held() -> str | None:
            nodes = [name for job in self.source.jobs.values() if not job.state.ended for name in job.nodes]
            return next((name for name in nodes if (name == node if node else name not in taken)), None)

        self.slots.append(FakeSlot(self, wait_for(held, "a node"), token))
        return self.slots[-1]

    def blocks(self) -> list[Block]:
        """Return the driver's blocks."""
        return list(self.driver._registry.blocks.values())

    def history(self) -> list[JournalEntry]:
        """Return the journal so far."""
        return [entry for _, entry in read_journal(self.journal_path)]

    def entry(self, kind: str, limit: float = 60.0) -> JournalEntry:
        """Wait for an entry of the journal."""
        entry: JournalEntry = wait_for(lambda: next((e for e in self.history() if e.kind == kind), None), kind, limit)
        return entry
