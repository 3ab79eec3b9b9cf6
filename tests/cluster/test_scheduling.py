"""The pure scheduler: EASY backfill for main jobs, holes for preemptible ones."""

from __future__ import annotations

import heapq
import itertools
import math
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetrain_parsl.cluster.plan import Plan
from freetrain_parsl.cluster.scheduling import Job, PreemptJob, Scheduler, StartJob, simulate
from freetrain_parsl.cluster.workload import MainJob
from freetrain_parsl.errors import InvalidSettings

NODES = 6

main_jobs = st.lists(
    st.builds(
        lambda submit, nodes, walltime, used: MainJob(submit, nodes, max(1, walltime * used // 10), walltime),
        st.integers(0, 40),
        st.integers(1, NODES),
        st.integers(1, 30),
        st.integers(1, 10),
    ),
    max_size=14,
)


@dataclass(frozen=True)
class Filler:
    """A preemptible job for the tests."""

    submit: int
    nodes: int
    run: int
    walltime: int
    nodelist: tuple[str, ...] | None = None


NAMES = tuple(f"n{index:02d}" for index in range(NODES))
fillers = st.lists(
    st.builds(
        lambda submit, nodelist, walltime, used: Filler(
            submit,
            1 + len(nodelist) // 2,
            max(1, walltime * used // 10),
            walltime,
            tuple(sorted(nodelist)) if walltime % 2 else None,
        ),
        st.integers(0, 60),
        st.sets(st.sampled_from(NAMES), min_size=1),
        st.integers(1, 20),
        st.integers(1, 10),
    ),
    max_size=10,
)


@dataclass
class Simulation:
    """Drives a scheduler and checks its invariants at every moment."""

    mains: list[MainJob]
    fillers: list[Filler] = field(default_factory=list)
    vanish: float = 0
    """How long a preempted job's processes take to end."""
    starts: dict[str, float] = field(default_factory=dict)
    log: list[tuple[float, object]] = field(default_factory=list)
    promise: tuple[str, float] | None = None
    """The head job and the start that it was promised first."""

    def run(self) -> Simulation:
        self.scheduler = Scheduler(NODES)
        self.owners: dict[str, str] = {}
        self.holding: dict[str, tuple[str, ...]] = {}
        self.events: list[tuple[float, int, str]] = []
        self.main_queue: list[str] = []
        for index, job in enumerate(self.mains):
            heapq.heappush(self.events, (job.submit, 1, f"m{index:02d}"))
        for index, job in enumerate(self.fillers):
            heapq.heappush(self.events, (job.submit, 1, f"p{index:02d}"))
        while self.events:
            now = self.events[0][0]
            while self.events and self.events[0][0] == now:
                self.happen(*heapq.heappop(self.events))
            self.turn(now)
        return self

    def job(self, job_id: str) -> MainJob | Filler:
        return (self.mains if job_id[0] == "m" else self.fillers)[int(job_id[1:])]

    def happen(self, now: float, submission: int, job_id: str) -> None:
        job = self.job(job_id)
        if submission:
            if isinstance(job, Filler):
                self.scheduler.submit(Job(job_id, job.nodes, job.walltime, True, job.nodelist))
            else:
                self.scheduler.submit(Job(job_id, job.nodes, job.walltime))
                self.main_queue.append(job_id)
        elif job_id in self.holding:
            for node in self.holding.pop(job_id):
                assert self.owners.pop(node) == job_id
            self.scheduler.ended(job_id)

    def turn(self, now: float) -> None:
        while actions := self.scheduler.schedule(now):
            for action in actions:
                self.log.append((now, action))
                if isinstance(action, PreemptJob):
                    assert action.job.preemptible
                    if self.vanish:
                        heapq.heappush(self.events, (now + self.vanish, 0, action.job.id))
                    else:
                        self.happen(now, 0, action.job.id)
                else:
                    self.start(now, action)
        self.check_promise(now)

    def start(self, now: float, action: StartJob) -> None:
        assert len(set(action.nodes)) == action.job.nodes
        for node in action.nodes:
            assert node not in self.owners, "a node in two jobs"
            self.owners[node] = action.job.id
        self.holding[action.job.id] = action.nodes
        self.starts[action.job.id] = now
        heapq.heappush(self.events, (now + self.job(action.job.id).run, 0, action.job.id))
        if action.job.id[0] == "m":
            self.main_queue.remove(action.job.id)

    def check_promise(self, now: float) -> None:
        """EASY: once a job is first in the queue, its expected start never moves back."""
        plan = self.scheduler.expected_starts(now)
        promised = {job_id for job_id, (start, _) in plan.items() if start <= now}
        waiting = [job_id for job_id in self.main_queue if job_id not in promised]
        if not waiting or self.vanish:
            return
        start, _ = plan[waiting[0]]
        if self.promise and self.promise[0] == waiting[0]:
            assert start <= self.promise[1]
        self.promise = (waiting[0], start)


@given(main_jobs, fillers)
@settings(deadline=None, max_examples=150)
def test_preemptible_jobs_change_no_start_of_a_main_job_if_they_vanish_at_once(mains, extra):
    with_them = Simulation(mains, extra).run().starts
    without = Simulation(mains).run().starts
    assert {job: start for job, start in with_them.items() if job[0] == "m"} == without


@given(main_jobs, fillers, st.integers(1, 5))
@settings(deadline=None, max_examples=150)
def test_every_job_runs_once_on_nodes_of_its_own_however_long_preemption_takes(mains, extra, vanish):
    simulation = Simulation(mains, extra, vanish).run()
    assert {job for job in simulation.starts if job[0] == "m"} == {f"m{i:02d}" for i in range(len(mains))}
    assert not simulation.owners
    assert simulation.scheduler.pending == ()


@given(main_jobs)
@settings(deadline=None, max_examples=150)
def test_simulate_equals_the_machine_driven_by_hand(mains):
    assert simulate(mains, NODES) == [start for _, start in sorted(Simulation(mains).run().starts.items())]


@given(main_jobs, fillers)
@settings(deadline=None, max_examples=50)
def test_the_same_jobs_give_the_same_actions(mains, extra):
    assert Simulation(mains, extra).run().log == Simulation(mains, extra).run().log


@given(main_jobs, fillers)
@settings(deadline=None, max_examples=100)
def test_a_preemptible_job_starts_only_where_the_plan_needs_no_node_before_its_end(mains, extra):
    class Checked(Simulation):
        def start(self, now, action):
            if action.job.preemptible:
                # The plan while it runs: its nodes are free until its end at least.
                for start, nodes in self.scheduler.expected_starts(now).values():
                    if set(nodes) & set(action.nodes):
                        assert start >= now + action.job.walltime
                if action.job.nodelist is not None:
                    assert set(action.nodes) <= set(action.job.nodelist)
            super().start(now, action)

    Checked(mains, extra).run()


@given(main_jobs)
@settings(deadline=None, max_examples=100)
def test_no_main_job_waits_that_could_start_without_delaying_the_first(mains):
    class Checked(Simulation):
        def turn(self, now):
            super().turn(now)
            if not self.main_queue:
                return
            free = NODES - len(self.owners)
            head, *others = self.main_queue
            assert self.job(head).nodes > free
            shadow, _ = self.scheduler.expected_starts(now)[head]
            ends = [(max(now, self.starts[job] + self.job(job).walltime), self.job(job).nodes) for job in self.holding]
            extra = free + sum(nodes for end, nodes in ends if end <= shadow) - self.job(head).nodes
            for other in others:
                job = self.job(other)
                assert job.nodes > free or (now + job.walltime > shadow and job.nodes > extra)

    Checked(mains).run()


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 10)), max_size=12), st.integers(1, NODES))
@settings(deadline=None, max_examples=50)
def test_jobs_of_equal_shape_start_in_order_of_submission(times, size):
    jobs = sorted((MainJob(submit, size, run, 10) for submit, run in times), key=lambda job: job.submit)
    starts = simulate(jobs, NODES)
    assert starts == sorted(starts)


@given(main_jobs)
@settings(deadline=None, max_examples=50)
def test_the_plan_reserves_no_node_twice_and_asks_for_no_held_node_before_its_walltime_ends(mains):
    class Checked(Simulation):
        def turn(self, now):
            super().turn(now)
            plan = self.scheduler.expected_starts(now)
            stays = [(start, start + self.job(job).walltime, nodes) for job, (start, nodes) in plan.items()]
            stays += [
                (now, max(now, self.starts[job] + self.job(job).walltime), nodes) for job, nodes in self.holding.items()
            ]
            for (begin, end, nodes), (begin2, end2, nodes2) in itertools.combinations(stays, 2):
                assert begin >= end2 or begin2 >= end or not set(nodes) & set(nodes2)

    Checked(mains).run()


class TestBackfill:
    def test_a_short_job_passes_the_first_one_and_a_long_one_does_not(self):
        jobs = [MainJob(0, 4, 10, 10), MainJob(1, 6, 5, 5), MainJob(2, 2, 9, 9), MainJob(2, 2, 8, 8)]
        assert simulate(jobs, 6) == [0, 10, 15, 2]

    def test_a_long_job_passes_on_nodes_that_the_first_one_will_not_need(self):
        jobs = [MainJob(0, 4, 10, 10), MainJob(1, 5, 5, 5), MainJob(2, 1, 99, 99)]
        assert simulate(jobs, 6) == [0, 10, 2]

    def test_long_jobs_share_the_nodes_that_the_first_one_will_not_need(self):
        jobs = [MainJob(0, 4, 10, 10), MainJob(1, 5, 5, 5), MainJob(2, 1, 99, 99), MainJob(2, 1, 99, 99)]
        assert simulate(jobs, 6) == [0, 10, 2, 15]

    def test_a_job_that_ends_early_lets_the_first_one_start_early(self):
        assert simulate([MainJob(0, 6, 3, 10), MainJob(1, 6, 5, 5)], 6) == [0, 3]

    def test_a_job_past_its_walltime_holds_up_the_first_one_until_it_is_gone(self):
        jobs = [MainJob(0, 4, 20, 10), MainJob(1, 6, 5, 5), MainJob(11, 2, 1, 1)]
        assert simulate(jobs, 6) == [0, 20, 25]

    def test_a_limited_depth_looks_no_further(self):
        jobs = [MainJob(0, 4, 10, 10), MainJob(1, 6, 5, 5), MainJob(2, 3, 1, 1), MainJob(3, 1, 1, 1)]
        assert simulate(jobs, 6)[3] == 3
        assert simulate(jobs, 6, backfill_depth=1)[3] > 3


class TestPreemption:
    def scheduler(self) -> Scheduler:
        scheduler = Scheduler(6)
        for job_id, nodes in (("old", 1), ("wide", 3), ("young", 1)):
            scheduler.submit(Job(job_id, nodes, 100, preemptible=True))
            scheduler.schedule(0)
        return scheduler

    def preempted(self, scheduler: Scheduler, nodes: int) -> list[str]:
        scheduler.submit(Job("main", nodes, 10))
        return [action.job.id for action in scheduler.schedule(1) if isinstance(action, PreemptJob)]

    def test_idle_nodes_are_taken_first(self):
        assert self.preempted(self.scheduler(), 1) == []

    def test_the_youngest_of_the_smallest_goes_first(self):
        assert self.preempted(self.scheduler(), 2) == ["young"]

    def test_one_job_goes_rather_than_several(self):
        assert self.preempted(self.scheduler(), 3) == ["wide"]

    def test_the_main_job_starts_when_the_nodes_that_it_was_promised_are_released(self):
        scheduler = self.scheduler()
        self.preempted(scheduler, 3)
        assert scheduler.expected_starts(1)["main"][0] == 1
        assert scheduler.schedule(2) == []
        scheduler.released("wide", "n01")
        assert scheduler.schedule(3) == []
        scheduler.released("wide", "n02")
        (start,) = scheduler.schedule(4)  # it needs no third node of the preempted job
        assert start == StartJob(Job("main", 3, 10), ("n01", "n02", "n05"))

    def test_nodes_that_are_being_emptied_are_taken_before_anybody_is_driven_out(self):
        scheduler = self.scheduler()
        scheduler.ending("old", 0.5)
        assert self.preempted(scheduler, 2) == []

    def test_a_main_job_that_is_withdrawn_while_it_waits_for_nodes_gives_them_back(self):
        scheduler = self.scheduler()
        self.preempted(scheduler, 2)
        assert scheduler.withdraw("main")
        scheduler.ended("young")
        assert scheduler.idle == ("n04", "n05")


class TestWindows:
    def test_nodes_close_when_the_plan_needs_them(self):
        scheduler = Scheduler(4)
        for job in (Job("runs", 2, 10), Job("waits", 3, 10)):
            scheduler.submit(job)
        scheduler.schedule(0)
        assert scheduler.free_until(1) == {"n02": 10, "n03": None}

    def test_the_plan_takes_the_nodes_that_come_free_last(self):
        scheduler = Scheduler(6)
        for job in (Job("short", 3, 5), Job("long", 3, 10), Job("waits", 4, 10)):
            scheduler.submit(job)
        scheduler.schedule(0)
        assert scheduler.expected_starts(1) == {"waits": (10, ("n00", "n03", "n04", "n05"))}

    def test_the_plan_takes_nodes_that_a_preemptible_job_leaves_in_time_before_others(self):
        scheduler = Scheduler(4)
        for job in (Job("runs", 2, 10), Job("stays", 1, 30, True), Job("goes", 1, 8, True)):
            scheduler.submit(job)
        scheduler.schedule(0)
        scheduler.submit(Job("waits", 3, 10))
        assert scheduler.expected_starts(1) == {"waits": (10, ("n00", "n01", "n03"))}

    def test_a_planned_job_may_end_at_the_moment_that_the_next_one_begins(self):
        plan = Plan(0, 0b0011, [(5, 0b1100)])
        assert plan.reserve("wide", 4, 5).start == 5
        assert plan.reserve("narrow", 2, 5).start == 0

    def test_the_margin_closes_a_window_before(self):
        scheduler = Scheduler(4, margin=2)
        for job in (Job("runs", 2, 10), Job("waits", 4, 10)):
            scheduler.submit(job)
        scheduler.schedule(0)
        assert scheduler.free_until(1) == {"n02": 8, "n03": 8}
        scheduler.submit(Job("long", 1, 8, preemptible=True))
        scheduler.submit(Job("fits", 1, 7, preemptible=True))
        assert [action.job.id for action in scheduler.schedule(1)] == ["fits"]

    def test_a_short_job_takes_the_window_that_closes_first(self):
        scheduler = Scheduler(4)
        for job in (Job("runs", 2, 10), Job("waits", 3, 10), Job("short", 1, 5, preemptible=True)):
            scheduler.submit(job)
        starts = {action.job.id: action.nodes for action in scheduler.schedule(0)}
        assert starts["short"] == ("n02",)

    def test_without_a_queue_nothing_closes(self):
        assert Scheduler(["a", "b"]).free_until(5) == {"a": None, "b": None}

    def test_a_full_cluster_has_no_windows(self):
        scheduler = Scheduler(1)
        scheduler.submit(Job("runs", 1, 10))
        scheduler.schedule(0)
        assert scheduler.free_until(0) == {}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"nodes": 0}, "at least one node"),
        ({"walltime": 0}, "walltime must be positive"),
        ({"walltime": math.inf}, "walltime must be positive"),
        ({"nodelist": ("n00",)}, "only a preemptible job"),
        ({"nodelist": ("n00", "n00"), "preemptible": True, "nodes": 2}, "2 nodes out of a list of 1"),
        ({"nodelist": ("n07",), "preemptible": True}, "no node 'n07'"),
        ({"nodes": 7}, "the cluster has 6"),
    ],
)
def test_a_job_that_can_never_run_is_refused(arguments, text):
    with pytest.raises(InvalidSettings, match=text):
        Scheduler(NODES).submit(Job(**{"id": "1", "nodes": 1, "walltime": 5.0, **arguments}))


def test_a_job_that_does_not_run_cannot_end():
    scheduler = Scheduler(2)
    scheduler.submit(Job("waits", 1, 5))
    with pytest.raises(InvalidSettings, match="is not running"):
        scheduler.ended("waits")


def test_a_waiting_job_is_withdrawn_once():
    scheduler = Scheduler(2)
    scheduler.submit(Job("waits", 1, 5))
    assert scheduler.withdraw("waits")
    assert not scheduler.withdraw("waits")
    assert scheduler.schedule(0) == []


@pytest.mark.parametrize("nodes", [0, [], ["a", "a"]])
def test_a_cluster_needs_nodes_of_different_names(nodes):
    with pytest.raises(InvalidSettings, match="distinct names"):
        Scheduler(nodes)
