"""The third driver of the planner, next to the executor and the replay: a stream of jobs on a simulated cluster."""

from __future__ import annotations

import math
import time as wall_clock
from collections import Counter, deque
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING

from freetrain_parsl.errors import InvalidSettings
from freetrain_parsl.planning import events as ev
from freetrain_parsl.planning.planner import Planner
from freetrain_parsl.planning.settings import PlannerSettings
from freetrain_parsl.planning.sizes import round_up

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from freetrain_parsl.extensions.simulate.description import ClusterShape, JobDescription
    from freetrain_parsl.extensions.simulate.jobs.job import SimulatedJob
    from freetrain_parsl.extensions.simulate.jobs.step_times import Placement
    from freetrain_parsl.extensions.simulate.jobs.workload import JobRequest
    from freetrain_parsl.planning.model import Decision, PlannedJob
    from freetrain_parsl.planning.policies.base import Policy

__all__ = ["DEFAULT_INTERVAL", "ClusterUse", "SimulatedRun", "simulate"]

DEFAULT_INTERVAL = 60.0
"""Seconds between two decisions, as in Pollux' simulator."""

_STUCK = 100  # decisions in a row that leave all GPUs idle while jobs wait


@dataclass(frozen=True)
class ClusterUse:
    """The cluster from `time` to the next tick: GPUs in use, and jobs that run and wait."""

    time: float
    gpus: int
    running: int
    waiting: int


@dataclass
class SimulatedRun:
    """The result of a simulation; the jobs are all done, in order of submission.

    All times are in seconds: `solve_seconds` and `wall_seconds` by the wall clock, `makespan` from the first submission
    to the end of the last job. `refused` counts decisions that violated the contract of policies.
    """

    jobs: list[SimulatedJob]
    interval: float = DEFAULT_INTERVAL
    use: list[ClusterUse] = field(default_factory=list)
    solve_seconds: list[float] = field(default_factory=list)
    refused: int = 0
    makespan: float = 0.0
    wall_seconds: float = 0.0


def simulate(
    requests: Sequence[JobRequest],
    cluster: ClusterShape,
    policy: Policy,
    description: JobDescription,
    on_progress: Callable[[float], None] | None = None,
    *,
    interval: float = DEFAULT_INTERVAL,
) -> SimulatedRun:
    """Run a workload until its last job is done.

    Parameters
    ----------
    requests
        The jobs, in order of submission.
    cluster
        The cluster.
    policy
        Allocates the GPUs.
    description
        What the policy knows of jobs.
    on_progress
        Called from time to time with the share of jobs that are done.
    interval
        Seconds between two decisions.

    Raises
    ------
    InvalidSettings
        The interval is less than 1 s, or the policy leaves all GPUs idle while jobs wait, for ever.
    """
    if not (math.isfinite(interval) and interval >= 1):
        raise InvalidSettings(f"the interval between two decisions must be at least 1 s, got {interval!r}")
    return _Simulation(requests, cluster, policy, description, on_progress, interval).run()


class _Simulation:
    def __init__(
        self,
        requests: Sequence[JobRequest],
        cluster: ClusterShape,
        policy: Policy,
        description: JobDescription,
        on_progress: Callable[[float], None] | None,
        interval: float,
    ) -> None:
        self._description = description
        self._on_progress = on_progress
        self._run = SimulatedRun([description.job(request) for request in requests], interval)
        settings = PlannerSettings(
            closing_margin=timedelta(0), settle=timedelta(0), replan_interval=timedelta(seconds=interval)
        )
        slots = 1 if policy.any_layout else cluster.gpus_per_node
        self._planner = Planner(policy, settings.in_seconds(), self._decided, slots)
        self._hosts = {node.name: node.host for node in cluster.slots()}
        self._waiting = deque(self._run.jobs)
        self._alive: dict[str, SimulatedJob] = {}
        self._planner.advance(ev.NodesJoined(0.0, "cluster", cluster.slots()))

    def _trainer_of(self, job: SimulatedJob) -> PlannedJob:
        """Return the job as the planner sees it: one that no size fits may have the next larger one."""
        trainer, slots = self._description.trainer(job), self._planner.slots_per_node
        return replace(trainer, max_nodes=max(trainer.max_nodes, round_up(trainer.min_nodes, slots)))

    def run(self) -> SimulatedRun:
        began = wall_clock.perf_counter()
        run, tick, now, idle_since = self._run, self._run.interval, 0.0, 0.0
        while self._waiting or self._alive:
            if not self._alive:
                now = max(now, tick * (math.ceil(self._waiting[0].request.time / tick) - 1))
            for job in self._alive.values():
                job.advance(now, tick)
            now += tick
            self._decide(now)
            used = sum(len(job.slots) for job in self._alive.values())
            running = sum(bool(job.slots) for job in self._alive.values())
            run.use.append(ClusterUse(now, used, running, len(self._alive) - running))
            idle_since = idle_since if self._alive and not used else now
            if now - idle_since > _STUCK * tick:
                raise InvalidSettings(
                    f"policy {self._planner.policy.name!r}: all GPUs are idle while {len(self._alive)} jobs wait"
                )
            if self._on_progress is not None:
                self._on_progress(1 - (len(self._waiting) + len(self._alive)) / len(run.jobs))
        run.makespan = max(job.done_at or 0.0 for job in run.jobs) - run.jobs[0].request.time
        run.refused = self._planner.statistics.refused
        run.wall_seconds = wall_clock.perf_counter() - began
        return run

    def _decided(self, _time: float, _purpose: str, decision: Decision) -> None:
        self._run.solve_seconds.append(decision.solve_seconds)

    def _decide(self, now: float) -> None:
        """Tell the planner what has happened, and apply its decision."""
        events: list[ev.Event] = [ev.Tick(now)]
        for job in [job for job in self._alive.values() if job.is_done]:
            del self._alive[job.name]
            events.append(ev.TrainerFinished(now, job.name))
        events += [ev.TrainerLearned(now, self._trainer_of(job)) for job in self._alive.values()]
        while self._waiting and self._waiting[0].request.time <= now:
            job = self._waiting.popleft()
            self._alive[job.name] = job
            events.append(ev.TrainerSubmitted(now, self._trainer_of(job)))
        self._planner.advance(*events)
        assigned = self._planner.assigned
        for name, job in self._alive.items():
            slots = assigned.get(name, frozenset())
            if slots != job.slots:
                job.move(slots, self._placement(slots), now)

    def _placement(self, slots: frozenset[str]) -> Placement:
        return tuple(sorted(Counter(self._hosts[slot] for slot in slots).values(), reverse=True))
