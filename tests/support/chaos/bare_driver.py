"""The driver's process of a bare episode: the real driver, job submitter and channel over a batch system in the parent.

It communicates with the parent over a pipe.

- To the parent: ``("listening", port, certificates)``, ``("job", id, block, nodes, seconds)``, ``("slot", token)``,
  ``("cancel", id)``, ``("broken", reason)``, ``("over",)``.
- From the parent: ``("job_ended", id, state)``, ``("slot_ended", token)``, ``("taken", nodes, seconds)``,
  ``("clock", seconds)``.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import count
from typing import TYPE_CHECKING, Any

from parsl import curvezmq

from freetrain_parsl.executor.batch.submitter import JobSubmitter
from freetrain_parsl.executor.driver.loop import ControlLoop
from freetrain_parsl.executor.driver.slot_cycle import SlotTaskEnded
from freetrain_parsl.executor.driver.slot_server import SlotServer
from freetrain_parsl.executor.jobs.request import Limits, SharedSettings, Training, TrainingRequest
from freetrain_parsl.executor.journal import Journal
from freetrain_parsl.executor.payloads.payloads import pack_training
from freetrain_parsl.planning.curves.scaling import ScalingCurve
from freetrain_parsl.planning.model import CostsInSeconds, Window, WindowKind
from freetrain_parsl.planning.policies import resolve_policy
from freetrain_parsl.planning.settings import PlannerSettings
from freetrain_parsl.protocol.options import SessionOptions
from freetrain_parsl.windows.base import BlockState, BlockStatus, Survey, WindowSource
from tests.support.chaos.trainings import train

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.connection import Connection
    from pathlib import Path

    from freetrain_parsl.windows.system import BlockSpec
    from tests.support.chaos.bare_plan import BarePlan

__all__ = ["drive"]

_PORTS = (55000, 60000)
_PLANNER = replace(
    PlannerSettings().in_seconds(),
    startup=2,
    min_useful=2,
    closing_margin=1,
    max_walltime=600,
    idle_timeout=3,
    settle=0.5,
    replan_interval=5,
)
_BUSY = 4.0  # seconds for which other users have the nodes that are idle part of the time
_TAKES = 10.0  # time limit for the driver to stop, seconds


@dataclass
class _Job:
    nodes: tuple[str, ...]
    ends: float
    state: BlockState = BlockState.RUNNING


class _ParentsNodes(WindowSource):
    """The parent's nodes as windows, most of them without known closings; jobs start at once."""

    def __init__(self, plan: BarePlan, clock: Callable[[], float], send: Callable[..., None]) -> None:
        self._plan = plan
        self._clock = clock
        self._send = send
        self._jobs: dict[str, _Job] = {}
        self._taken: dict[str, float] = {}  # node -> time when it becomes idle, by time.monotonic()
        self._numbers = count(1)
        self._lock = threading.Lock()

    def launch(self, spec: BlockSpec) -> str:
        """Start a block."""
        with self._lock:
            if not set(spec.nodes) <= set(self._free()):
                raise RuntimeError("the nodes are not idle")  # as a provider does if its submit command fails
            job = f"{os.getpid()}.{next(self._numbers)}"
            self._jobs[job] = _Job(spec.nodes, self._clock() + spec.seconds)
        self._send("job", job, spec.block, spec.nodes, spec.seconds)
        return job

    def end(self, job: str, state: str) -> None:
        """Record that the parent has ended a job."""
        with self._lock:
            if job in self._jobs:
                self._jobs[job].state = BlockState[state]

    def take(self, nodes: Sequence[str], seconds: float) -> None:
        """Record that another user's job holds nodes."""
        with self._lock:
            self._taken.update(dict.fromkeys(nodes, time.monotonic() + seconds))

    def survey(self, job_ids: Sequence[str] = ()) -> Survey:
        with self._lock:
            now, free = self._clock(), self._free()
            always = tuple(node for node in free if node not in self._plan.part_time)
            windows = tuple(
                Window(nodes, now, closes, WindowKind.BACKFILL)
                for nodes, closes in ((always, None), (tuple(set(free) - set(always)), now + self._idle_for()))
                if nodes
            )
            blocks = {job: self._status(job) for job in job_ids}
        return Survey(now, windows, blocks)

    def cancel(self, job_ids: Sequence[str]) -> None:
        for job in job_ids:
            self._send("cancel", job)

    def find_jobs(self, prefix: str) -> dict[str, str]:
        return {}

    def _status(self, job: str) -> BlockStatus:
        known = self._jobs[job]
        return BlockStatus(known.state, known.nodes, known.ends)

    def _free(self) -> tuple[str, ...]:
        now = time.monotonic()
        held = {node for job in self._jobs.values() if not job.state.ended for node in job.nodes}
        busy = {*held, *self._plan.part_time} if self._idle_for() <= 0 else held
        return tuple(node for node in self._plan.nodes if node not in busy and self._taken.get(node, 0.0) <= now)

    def _idle_for(self) -> float:
        """Return how long the nodes that are idle part of the time still are; other users have them in between."""
        return self._plan.idle - time.monotonic() % (self._plan.idle + _BUSY)


def drive(plan: BarePlan, link: Connection) -> None:
    """Run a driver until all training jobs of the plan have ended, then end this process."""
    directory = plan.directory
    logging.basicConfig(
        filename=directory / "driver.log",
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(threadName)s %(message)s",
    )
    lock = threading.Lock()

    def send(*message: object) -> None:
        with lock:
            link.send(message)

    step = [0.0]  # offset of the wall clock from the real one

    def clock() -> float:
        return time.time() + step[0]

    source = _ParentsNodes(plan, clock, send)
    certificates = directory / f"certificates-{os.getpid()}"
    certificates.mkdir(mode=0o700)
    certificate_directory = str(curvezmq.create_certificates(str(certificates)))
    server = SlotServer(certificate_directory, _PORTS)
    futures: dict[str, Future[Any]] = {}

    def fail_all(error: Exception) -> None:
        for future in futures.values():
            if not future.done():
                future.set_exception(error)

    submitter = JobSubmitter(
        source,
        launch=source.launch,
        post=lambda item: driver.post(item),  # noqa: PLW0108 - the driver does not exist yet
        interval=0.5,
        submissions_per_minute=200,
        max_refusals=1000,
        job_prefix="freetrain.chaos.",
    )
    driver = ControlLoop(
        policy=resolve_policy("milp"),
        planner_settings=_PLANNER,
        server=server,
        submitter=submitter,
        journal=Journal(directory / f"journal-{os.getpid()}.sqlite"),
        shared_settings=SharedSettings(
            SessionOptions(
                "chaos", checkpoint_root=plan.checkpoints, checkpoint_interval=timedelta(seconds=0.7), threads=1
            ),
            costs=CostsInSeconds(1, 1, 1),
            limits=Limits(peer_timeout=plan.peer_timeout, max_restarts=20),
        ),
        slots_per_node=plan.slots_per_node,
        share_nodes=True,
        outdated=3.0,
        heartbeat_timeout=plan.heartbeat_timeout,
        submit_slot=lambda token: send("slot", token),
        fail_all=fail_all,
        clock=clock,
    )
    send("listening", server.port, certificate_directory)
    driver.start()
    submitter.start()
    for subject in plan.subjects:
        if not plan.outcome_of(subject.name).exists():
            future: Future[Any] = Future()
            futures[subject.name] = future
            files = {"out": str(plan.result_of(subject.name)), "claims": str(plan.claims)}
            arguments = {**subject.arguments(plan.epochs, plan.samples), **files}
            options = SessionOptions(subject.name, seed=subject.seed, **subject.options)
            request = TrainingRequest(options, subject.least, subject.most, ScalingCurve.of(None))
            driver.post(Training(request, pack_training(train.func, (), arguments), future))
    broken = False
    while not all(future.done() for future in futures.values()):
        if link.poll(0.1):
            _obey(link.recv(), source, driver, step)
        if not broken and not (driver.is_alive() and submitter.is_alive()):
            broken = True
            send("broken", f"a thread has ended: driver {driver.is_alive()}, submitter {submitter.is_alive()}")
        _keep_outcomes(plan, futures)
    _keep_outcomes(plan, futures)
    driver.stop(_TAKES)
    submitter.close(_TAKES)
    if driver.is_alive():
        send("broken", f"the driver did not stop within {_TAKES:g} s")
    send("over")
    link.close()


def _obey(message: tuple[Any, ...], source: _ParentsNodes, driver: ControlLoop, step: list[float]) -> None:
    match message:
        case ("job_ended", job, state):
            source.end(job, state)
        case ("slot_ended", token):
            driver.post(SlotTaskEnded(token, RuntimeError("the worker has failed")))
        case ("taken", nodes, seconds):
            source.take(nodes, seconds)
        case ("clock", seconds):
            step[0] += seconds
        case _:
            raise ValueError(f"unknown message {message!r}")


def _keep_outcomes(plan: BarePlan, futures: dict[str, Future[Any]]) -> None:
    """Record the outcomes of training jobs for the parent and the next driver."""
    for name, future in futures.items():
        outcome = plan.outcome_of(name)
        if future.done() and not outcome.exists():
            error = future.exception()
            _write(outcome, {"error": None if error is None else f"{type(error).__name__}: {error}"})


def _write(path: Path, content: dict[str, Any]) -> None:
    aside = path.with_suffix(".new")
    aside.write_text(json.dumps(content), encoding="utf-8")
    aside.replace(path)
