"""The availability profile: free nodes close at the first planned start; without a plan, the worst case counts."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from freetrain_parsl.errors import InvalidSettings
from freetrain_parsl.planning.model import WindowKind
from freetrain_parsl.windows.availability_profile import NodeNeeds, Staircase, find_windows
from freetrain_parsl.windows.state import (
    BatchState,
    Node,
    Partition,
    PendingJob,
    Reservation,
    RunningJob,
    Scheduling,
)

NOW = 1000.0


def cluster(
    count: int,
    running: dict[str, tuple[str, float | None]] | None = None,
    pending: tuple[PendingJob, ...] = (),
    reservations: tuple[Reservation, ...] = (),
    nodes: dict[str, Node] | None = None,
    partition: dict[str, Any] | None = None,
    plan_jobs: int | None = None,
) -> BatchState:
    """Make nodes n1..n<count> in partition main; `running` is job -> (its nodes, its end)."""
    names = tuple(f"n{index + 1}" for index in range(count))
    jobs = tuple(
        RunningJob(job, job, "ada", "main", tuple(held.split()), ends) for job, (held, ends) in (running or {}).items()
    )
    busy = {name for job in jobs for name in job.nodes}
    every = {name: Node(name, name not in busy, partitions=("main",), cpus=4, cpus_free=4) for name in names}
    main = Partition("main", names, **(partition or {}))
    return BatchState(
        NOW,
        Scheduling("test", plan_jobs=plan_jobs),
        {**every, **(nodes or {})},
        jobs,
        pending,
        reservations,
        {"main": main, "urgent": Partition("urgent", names, tier=9)},
    )


def job(name: str, node_count: int, **more: Any) -> PendingJob:
    """Make another user's pending job."""
    more.setdefault("walltime", 600.0)
    return PendingJob(name, name, "bob", more.pop("partition", "main"), node_count, **more)


def steps(staircase: Staircase) -> dict[str, float | None]:
    """Return node -> when its window closes."""
    return {name: window.closes for window in staircase.windows for name in window.nodes}


def find(state: BatchState, *ours: str, **needs: Any) -> Staircase:
    """Find the windows of main."""
    return find_windows(state, NodeNeeds("main", **needs), ours)


class TestPlan:
    """The batch system's plan is used as it is."""

    def test_nodes_that_nobody_plans_for_stay_open(self) -> None:
        """Without a plan there is no end; nodes with the same end are one window."""
        (window,) = find(cluster(3)).windows
        assert window.nodes == ("n1", "n2", "n3")
        assert window.closes is None
        assert window.kind is WindowKind.BACKFILL
        assert window.partition == "main"

    def test_planned_start_closes_the_planned_nodes(self) -> None:
        """The largest window comes first."""
        state = cluster(4, {"1": ("n4", 1600.0)}, (job("2", 2, start=1600.0, planned_nodes=("n1", "n4")),))
        assert [(window.nodes, window.closes) for window in find(state).windows] == [
            (("n2", "n3"), None),
            (("n1",), 1600.0),
        ]

    def test_first_of_several_plans_counts(self) -> None:
        """A node closes at the earliest start planned on it."""
        plans = tuple(job(str(start), 1, start=float(start), planned_nodes=("n1",)) for start in (1900, 1300, 1500))
        assert steps(find(cluster(1, pending=plans))) == {"n1": 1300.0}

    def test_planned_start_of_a_job_that_is_not_eligible_counts_too(self) -> None:
        """A job with a begin time has a plan before it is eligible."""
        begin = job("1", 1, eligible=False, start=1500.0, planned_nodes=("n1",))
        assert steps(find(cluster(1, pending=(begin,)))) == {"n1": 1500.0}

    @pytest.mark.parametrize("start", [NOW, NOW - 50])
    def test_node_whose_job_is_due_is_not_free(self, start: float) -> None:
        """A start that is planned for now or overdue takes the node."""
        staircase = find(cluster(2, pending=(job("7", 1, start=start, planned_nodes=("n1",)),)))
        assert steps(staircase) == {"n2": None}
        assert staircase.unused == {"n1": "job 7 of bob is about to start on it"}

    def test_our_own_pending_jobs_are_as_if_absent(self) -> None:
        """Their planned nodes are free for their own blocks."""
        mine = job("5", 1, start=NOW, planned_nodes=("n1",))
        assert steps(find(cluster(1, pending=(mine,)), "5")) == {"n1": None}

    def test_reservation_closes_its_nodes(self) -> None:
        """Before it begins they are free until then, while it lasts they are not, and afterwards they are again."""
        reservations = (
            Reservation("maint", ("n1",), 2000.0, 3000.0),
            Reservation("class", ("n2",), 500.0, 3000.0),
            Reservation("past", ("n3",), 100.0, 900.0),
        )
        staircase = find(cluster(3, reservations=reservations))
        assert steps(staircase) == {"n1": 2000.0, "n3": None}
        assert staircase.unused["n2"].startswith("in reservation class until ")

    def test_preemptible_partition_gives_preemptible_windows(self) -> None:
        """They close at the planned time, if known; there are no yield requests, because jobs are preempted."""
        state = cluster(
            3,
            {"9": ("n3", 2000.0)},
            (job("1", 1, start=1500.0, planned_nodes=("n1",)), job("2", 1)),
            partition={"preemptible": True, "tier": 20},
        )
        staircase = find(state, "9")
        assert {window.kind for window in staircase.windows} == {WindowKind.PREEMPTIBLE}
        assert steps(staircase) == {"n1": 1500.0}
        assert staircase.wanted == {}

    def test_unplanned_job_of_a_larger_tier_closes_nothing_preemptible(self) -> None:
        """It preempts when it starts; waiting for it would leave the nodes idle."""
        pending = (job("1", 1, partition="urgent"),)
        assert steps(find(cluster(1, pending=pending, partition={"preemptible": True}))) == {"n1": None}
        assert steps(find(cluster(1, pending=pending))) == {}

    def test_partition_that_is_down_has_no_windows(self) -> None:
        """It is the reason of every node."""
        staircase = find(cluster(2, partition={"up": False}))
        assert staircase.windows == ()
        assert set(staircase.unused) == {"n1", "n2"}

    def test_unknown_partition_is_refused_with_the_nearest(self) -> None:
        """A settings error, one line."""
        with pytest.raises(InvalidSettings, match=r"no partition or queue 'mian'.*did you mean 'main'"):
            find_windows(cluster(1), NodeNeeds("mian"))


class TestUnplanned:
    """If the plan is incomplete, the worst case is assumed and noted."""

    def test_job_that_fits_now_takes_the_nodes_that_are_free_longest(self) -> None:
        """It could start on any; it is certain to fit on these."""
        pending = (
            job("1", 1, priority=9, start=1900.0, planned_nodes=("n1",)),
            job("2", 1, priority=5, walltime=60),
        )
        staircase = find(cluster(3, pending=pending))
        assert steps(staircase) == {"n1": 1900.0, "n3": None}
        assert staircase.notes == (
            "job 2: eligible without a planned start: assumed to start at once, on the nodes that are free longest",
        )

    def test_job_too_long_for_the_hole_takes_nothing(self) -> None:
        """A planned job that starts earlier keeps it from starting."""
        head = job("1", 2, priority=9, start=1900.0, planned_nodes=("n1", "n2"))
        for walltime, left in ((3600.0, {"n1": 1900.0, "n2": 1900.0}), (900.0, {"n2": 1900.0})):
            staircase = find(cluster(2, pending=(head, job("2", 1, priority=5, walltime=walltime))))
            assert steps(staircase) == left
            assert bool(staircase.notes) is (walltime == 900)

    def test_job_of_a_higher_priority_goes_before_the_plan(self) -> None:
        """The plan was made without it."""
        head = job("1", 1, priority=5, start=1900.0, planned_nodes=("n1",))
        assert steps(find(cluster(1, pending=(head, job("2", 1, priority=9, walltime=math.inf))))) == {}

    def test_job_that_fits_later_closes_nodes_then(self) -> None:
        """As soon as enough nodes are free, if all other jobs leave theirs to it."""
        state = cluster(4, {"1": ("n3", 1300.0), "2": ("n4", 1700.0)}, (job("3", 3),))
        staircase = find(state)
        assert steps(staircase) == {"n1": 1300.0, "n2": 1300.0}
        assert "as soon as enough nodes are free" in staircase.notes[0]

    def test_job_larger_than_the_machine_is_left_aside(self) -> None:
        """It never starts."""
        assert steps(find(cluster(2, pending=(job("1", 3),)))) == {"n1": None, "n2": None}

    def test_job_on_other_nodes_is_left_aside(self) -> None:
        """Features and partitions that ours do not have."""
        pending = (job("1", 1, features=frozenset({"v100"})), job("2", 1, partition="elsewhere"))
        assert steps(find(cluster(1, pending=pending))) == {"n1": None}

    def test_held_and_dependent_jobs_are_left_aside(self) -> None:
        """It is unknown when they could start."""
        assert steps(find(cluster(1, pending=(job("1", 1, eligible=False),)))) == {"n1": None}

    def test_job_deeper_than_the_plan_is_left_aside_and_noted(self) -> None:
        """The scheduler does not consider it."""
        planned = job("1", 1, priority=9, start=1500.0, planned_nodes=("n1",))
        staircase = find(cluster(2, pending=(planned, job("2", 1)), plan_jobs=1))
        assert steps(staircase) == {"n1": 1500.0, "n2": None}
        assert "deeper in the queue than the 1 jobs" in staircase.notes[0]

    def test_plan_without_names_takes_the_nodes_that_are_free_longest(self) -> None:
        """They close at the planned start."""
        pending = (
            job("1", 1, priority=9, start=1200.0, planned_nodes=("n1",)),
            job("2", 1, priority=5, start=1500.0),
        )
        staircase = find(cluster(3, pending=pending))
        assert steps(staircase) == {"n1": 1200.0, "n2": 1500.0, "n3": None}
        assert "without planned nodes" in staircase.notes[0]

    def test_job_that_insists_on_nodes_closes_these(self) -> None:
        """When the last of them is free; never, if one is down."""
        wish = job("3", 2, named_nodes=("n1", "n3"))
        state = cluster(3, {"1": ("n3", 1400.0)}, (wish,))
        assert steps(find(state)) == {"n1": 1400.0, "n2": None}
        down = cluster(3, {}, (wish,), nodes={"n3": Node("n3", idle=True, unusable="drained")})
        assert steps(find(down)) == {"n1": None, "n2": None}

    def test_many_jobs_make_one_note(self) -> None:
        """The first few are listed."""
        (note,) = find(cluster(9, pending=tuple(job(str(n), 1) for n in range(1, 9)))).notes
        assert note.startswith("8 jobs (1, 2, 3, 4, 5, …): eligible")


class TestUnused:
    """Every node of the partition is in a window or has a reason."""

    def test_reasons_are_plain_english(self) -> None:
        """One for each node."""
        nodes = {
            "n1": Node("n1", idle=True, unusable="drained: bad disk"),
            "n2": Node("n2", idle=False),
            "n3": Node("n3", idle=True, cpus=4, gpus=1, features=frozenset({"v100"})),
            "n4": Node("n4", idle=True, cpus=4, gpus=2),
            "n7": Node("n7", idle=True, cpus=4, gpus=2, features=frozenset({"v100"})),
        }
        state = cluster(8, {"12": ("n5", None), "13": ("n6", 2000.0)}, nodes=nodes)
        state.nodes.pop("n8")  # type: ignore[attr-defined]  # as if missing from the output
        staircase = find(state, "13", gpus=2, features=frozenset({"v100"}))
        assert staircase.unused == {
            "n1": "drained: bad disk",
            "n2": "does not have feature v100",
            "n3": "has 1 GPUs, 2 required",
            "n4": "does not have feature v100",
            "n5": "does not have feature v100",
            "n6": "does not have feature v100",
            "n8": "not reported by the batch system",
        }
        assert steps(staircase) == {"n7": None}

    def test_busy_nodes_name_their_job(self) -> None:
        """Our own jobs are marked as ours."""
        unused = find(
            cluster(3, {"1": ("n1", None), "2": ("n2", None)}, nodes={"n3": Node("n3", idle=False, cpus=4)}), "2"
        )
        assert unused.unused == {
            "n1": "runs job 1 of ada",
            "n2": "runs our job 2",
            "n3": "busy with a job that is not visible",
        }

    def test_shared_nodes_count_with_what_is_left(self) -> None:
        """Only if blocks do not take whole nodes."""
        nodes = {
            "n1": Node("n1", idle=False, cpus=8, cpus_free=4, gpus=4, gpus_free=2),
            "n2": Node("n2", idle=False, cpus=8, cpus_free=2, gpus=4, gpus_free=4),
            "n3": Node("n3", idle=False, cpus=8, cpus_free=8, gpus=4, gpus_free=1),
        }
        state = cluster(3, {"1": ("n1 n2 n3", 5000.0)}, nodes=nodes)
        shared = find(state, exclusive=False, cpus=4, gpus=2)
        assert steps(shared) == {"n1": None}
        assert shared.unused == {"n2": "only 2 of 8 CPUs free", "n3": "only 1 of 4 GPUs free"}
        assert steps(find(state, cpus=4, gpus=2)) == {}


class TestWanted:
    """Which of our nodes other jobs wait for."""

    def test_job_that_would_start_without_us_names_our_nodes(self) -> None:
        """Free nodes first, then ours, only as many as it needs."""
        state = cluster(4, {"1": ("n3 n4", 9000.0)}, (job("2", 3),))
        assert find(state, "1").wanted == {"n3": NOW}

    def test_freetrain_of_another_user_wants_none_of_ours(self) -> None:
        """Otherwise they would yield to each other forever."""
        other = replace(job("2", 3), name="freetrain.theirs.ab12.block-0")
        found = find(cluster(4, {"1": ("n3 n4", 9000.0)}, (other,)), "1")
        assert found.wanted == {}

    def test_job_that_starts_on_free_nodes_wants_none_of_ours(self) -> None:
        """Releasing nodes would gain nothing."""
        assert find(cluster(3, {"1": ("n3", 9000.0)}, (job("2", 2),)), "1").wanted == {}

    def test_planned_job_wants_ours_when_the_others_are_free(self) -> None:
        """From then on, we delay it."""
        state = cluster(
            3,
            {"1": ("n1", 9000.0), "2": ("n2 n3", 1500.0)},
            (job("3", 3, start=9000.0, planned_nodes=("n1", "n2", "n3")),),
        )
        assert find(state, "1").wanted == {"n1": 1500.0}

    def test_planned_job_that_waits_for_others_wants_nothing(self) -> None:
        """We end before they do."""
        state = cluster(
            2,
            {"1": ("n1", 1400.0), "2": ("n2", 1500.0)},
            (job("3", 2, start=1500.0, planned_nodes=("n1", "n2")),),
        )
        assert find(state, "1").wanted == {}

    def test_nobody_is_let_past_a_job_that_waits(self) -> None:
        """Our nodes do not help a job that would delay the one before it."""
        state = cluster(
            2, {"1": ("n1", 9000.0), "2": ("n2", 1500.0)}, (job("3", 2, priority=9), job("4", 1, priority=1))
        )
        assert find(state, "1").wanted == {}
        short = cluster(
            2,
            {"1": ("n1", 9000.0), "2": ("n2", 1500.0)},
            (job("3", 2, priority=9), job("4", 1, priority=1, walltime=400)),
        )
        assert find(short, "1").wanted == {"n1": NOW}

    @pytest.mark.parametrize(("tier", "wanted"), [(0.5, {"n1": NOW}), (9.0, {})])
    def test_jobs_that_yield_are_not_in_the_way(self, tier: float, wanted: dict[str, float]) -> None:
        """A job that could preempt the others is delayed only by us."""
        state = cluster(2, {"1": ("n1", 9000.0)}, (job("3", 2, start=9000.0, planned_nodes=("n1", "n2")),))
        low = Partition("low", ("n1", "n2"), tier=tier, preemptible=True)
        more = (*state.running, RunningJob("2", "2", "eve", "low", ("n2",), 9500.0))
        state = replace(state, running=more, partitions={**state.partitions, "low": low})
        assert find(state, "1").wanted == wanted

    def test_node_that_somebody_else_shares_is_not_wanted(self) -> None:
        """Without us it would not be free."""
        state = cluster(1, {"1": ("n1", 9000.0), "2": ("n1", 9000.0)}, (job("3", 1),))
        assert find(state, "1").wanted == {}

    def test_long_job_does_not_want_nodes_of_a_coming_reservation(self) -> None:
        """It would not start on them."""
        maint = (Reservation("maint", ("n1",), 1300.0, 9000.0),)
        state = cluster(1, {"1": ("n1", 1250.0)}, (job("2", 1),), maint)
        assert find(state, "1").wanted == {}


small_jobs = st.lists(
    st.tuples(st.integers(1, 4), st.sampled_from([100.0, 500.0, math.inf]), st.booleans()), min_size=0, max_size=4
)
holders = st.lists(st.sampled_from(["free", "ours", "other", "down"]), min_size=1, max_size=5)


def _state(held: list[str], queue: list[tuple[int, float, bool]]) -> BatchState:
    names = [f"n{index + 1}" for index in range(len(held))]
    running = {
        f"{who}-{name}": (name, 1300.0 if who == "other" else 5000.0)
        for name, who in zip(names, held, strict=True)
        if who in ("ours", "other")
    }
    nodes = {n: Node(n, idle=True, unusable="down") for n, who in zip(names, held, strict=True) if who == "down"}
    pending = tuple(
        job(str(index), count, walltime=walltime, eligible=eligible, priority=float(-index))
        for index, (count, walltime, eligible) in enumerate(queue)
    )
    return cluster(len(held), running, pending, nodes=nodes)


def _starts_now(free: int, others: int, queue: list[tuple[int, float, bool]]) -> list[int]:
    """EASY by brute force over start times: a job starts now if this delays no job before it.

    `others` nodes become free at 1300; only which jobs start now is returned.
    """
    started: list[tuple[int, float]] = []  # nodes, end
    waiting: list[tuple[int, float]] = []  # nodes, when it could start at the earliest

    def free_at(time: float, more: tuple[int, float] | None = None) -> int:
        busy = [*started, *([more] if more else [])]
        return free + (others if time >= 1300.0 else 0) - sum(count for count, end in busy if end > time)

    def earliest(count: int, more: tuple[int, float] | None = None) -> float:
        times = sorted({NOW, 1300.0, *(end for _, end in started), *([more[1]] if more else [])})
        return next((time for time in times if time < math.inf and free_at(time, more) >= count), math.inf)

    begun = []
    for index, (count, walltime, eligible) in enumerate(queue):
        if not eligible:
            continue
        this = (count, NOW + walltime)
        if free_at(NOW) >= count and all(earliest(n, this) <= time for n, time in waiting):
            started.append(this)
            begun.append(index)
        elif free_at(NOW) < count:  # otherwise it only waits for those before it
            waiting.append((count, earliest(count)))
    return begun


class TestWantedAgainstBruteForce:
    """Random small states."""

    @given(holders, small_jobs)
    def test_nothing_is_wanted_that_nobody_could_use(
        self, held: list[str], queue: list[tuple[int, float, bool]]
    ) -> None:
        """If the same jobs start with us as would without us, none of our nodes is wanted now."""
        state = _state(held, queue)
        ours = [running.job for running in state.running if running.job.startswith("ours")]
        wanted = find(state, *ours).wanted
        assert set(wanted) <= {name for name, who in zip(state.nodes, held, strict=True) if who == "ours"}
        able = [count for count, _, eligible in queue if eligible]
        assert not wanted or any(count <= held.count("free") + held.count("ours") for count in able)
        assert len(wanted) <= sum(able)

    @given(holders, small_jobs.filter(lambda queue: len(queue) > 0))
    def test_first_job_in_the_queue_always_gets_its_nodes(
        self, held: list[str], queue: list[tuple[int, float, bool]]
    ) -> None:
        """If it would start immediately without us, exactly the nodes that it lacks are returned."""
        count = queue[0][0]
        first = [(count, queue[0][1], True)]
        state = _state(held, first)
        ours = [running.job for running in state.running if running.job.startswith("ours")]
        free, mine = held.count("free"), held.count("ours")
        expected = max(0, count - free) if count <= free + mine else 0
        assert len(find(state, *ours).wanted) == expected

    # Which nodes are kept for the first job decides whether the later ones need ours.
    @example(["free", "free", "ours", "other", "other"], [(4, 100.0, True), (1, 500.0, True)])
    @example(["free", "free", "ours", "other", "other"], [(4, 100.0, True), (1, 500.0, True), (2, 100.0, True)])
    @example(
        ["free", "free", "ours", "ours", "free", "free"],
        [(3, 100.0, True), (4, 500.0, True), (3, 500.0, True), (1, 100.0, True), (2, 500.0, True)],
    )
    @given(holders, small_jobs)
    def test_claims_are_what_the_started_jobs_lack(self, held: list[str], queue: list[tuple[int, float, bool]]) -> None:
        """All jobs that EASY would start without us get their nodes, and no other jobs."""
        state = _state(held, queue)
        ours = [running.job for running in state.running if running.job.startswith("ours")]
        free, mine = held.count("free"), held.count("ours")
        begun = _starts_now(free + mine, held.count("other"), queue)
        lacking = max(0, sum(queue[index][0] for index in begun) - free)
        assert len(find(state, *ours).wanted) == lacking


class TestWindowsAgainstBruteForce:
    """Random small states with one unplanned job."""

    @given(holders, st.integers(1, 5), st.sampled_from([100.0, 500.0]))
    def test_unplanned_job_always_has_room(self, held: list[str], count: int, walltime: float) -> None:
        """Whatever nodes we use until they close, the job starts as early as without us."""
        state = _state(held, [(count, walltime, True)])
        closes = {name: math.inf if time is None else time for name, time in steps(find(state)).items()}
        ends = {"free": NOW, "other": 1300.0, "ours": 5000.0, "down": math.inf}

        def earliest(ends: list[float]) -> float:
            return sorted(ends)[count - 1] if count <= len(ends) else math.inf

        alone = [ends[who] for who in held]
        with_us = [
            closes.get(f"n{index + 1}", ends[who]) if who == "free" else ends[who] for index, who in enumerate(held)
        ]
        assert earliest(with_us) == earliest(alone)

    @given(holders, small_jobs)
    def test_answer_does_not_depend_on_the_order_of_jobs(
        self, held: list[str], queue: list[tuple[int, float, bool]]
    ) -> None:
        """Only priority counts."""
        state = _state(held, queue)
        for pending in itertools.islice(itertools.permutations(state.pending), 6):
            again = BatchState(state.time, state.scheduling, state.nodes, state.running, pending, (), state.partitions)
            assert find(again) == find(state)
