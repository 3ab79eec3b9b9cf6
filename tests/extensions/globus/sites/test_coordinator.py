"""The coordinator: no training job is given to two sites or lost, whatever sites and the coordinator itself do."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetrain_parsl.errors import InvalidInput
from freetrain_parsl.extensions.globus.sites.coordinator import Coordinator
from freetrain_parsl.extensions.globus.sites.planning.model import (
    Offer,
    SiteChoice,
    SitePlan,
    SiteRates,
    SitesQuestion,
    SitesSettings,
    Verb,
)
from freetrain_parsl.extensions.globus.sites.planning.planner import plan_sites
from freetrain_parsl.extensions.globus.sites.state import Ask, CallPace, SiteAnswer, SiteCall, SiteFacts, TrainingAtSite
from freetrain_parsl.planning.curves.scaling import ScalingCurve
from freetrain_parsl.planning.model import CostsInSeconds, PlannedJob

LEASE, LOOK, STATUS = 100.0, 60.0, 20.0
FACTS = SiteFacts("home", LEASE)
WORK = 30.0  # seconds on one node


def trainers(number: int) -> list[PlannedJob]:
    curve = ScalingCurve({1: 1.0})
    return [PlannedJob(f"t{index}", 1, 1, curve, CostsInSeconds(), submitted=float(index)) for index in range(number)]


def make(planner, number: int = 3, sites: tuple[str, ...] = ("a", "b")) -> Coordinator:
    return Coordinator(trainers(number), {name: SiteRates() for name in sites}, CallPace(LOOK, STATUS), planner)


def planner(question: SitesQuestion) -> SitePlan:
    return plan_sites(question, SitesSettings())


@dataclass
class Site:
    """A site that keeps the last order, and trains what is assigned to it while it owns it at `Home`."""

    name: str
    nodes: int
    order: int = 0
    assigned: tuple[str, ...] = ()
    running: dict[str, float] = field(default_factory=dict)  # training -> seconds done
    finished: set[str] = field(default_factory=set)
    contact: float = 0.0  # with home
    cut: bool = False
    dead: bool = False

    def take(self, call: SiteCall) -> SiteAnswer:
        if call.order > self.order:
            self.order, self.assigned = call.order, call.trainings
        return self.answer(call.ask is Ask.LOOK)

    def answer(self, looked: bool) -> SiteAnswer:
        states = dict.fromkeys(self.running, "running") | dict.fromkeys(self.finished, "finished")
        return SiteAnswer(
            facts=FACTS,
            order=self.order,
            state="running",
            trainings={
                name: TrainingAtSite(name, state, 0.5, ("n0",) if state == "running" else ())
                for name, state in states.items()
            },
            held=(Offer(len(self.running), 1000.0),),
            planned=(Offer(max(0, self.nodes - len(self.running)), 1000.0),) if looked else None,
            sizes=dict.fromkeys(states, 1000000.0),
        )


@dataclass
class World:
    """Sites, the home with its owners and its work done, and a coordinator that may be killed at any time."""

    coordinator: Coordinator
    sites: dict[str, Site]
    now: float = 1000.0
    owners: dict[str, str] = field(default_factory=dict)
    done: dict[str, float] = field(default_factory=dict)
    waiting: list[tuple[SiteCall, SiteAnswer | None]] = field(default_factory=list)
    saved: str = ""

    def send(self) -> None:
        calls = self.coordinator.due(self.now)
        self.saved = json.dumps(self.coordinator.as_json())  # before anything is sent
        for call in calls:
            site = self.sites[call.site]
            lost = site.cut or site.dead
            self.waiting.append((call, None if lost or call.ask is Ask.PREPARE else site.take(call)))

    def deliver(self, number: int, lose: bool) -> None:
        call, answer = self.waiting.pop(number)
        site = self.sites[call.site]
        if site.cut or site.dead or lose or (answer is None and call.ask is not Ask.PREPARE):
            self.coordinator.on_silence(call.site, "no answer", self.now)
        elif answer is None:
            self.coordinator.on_prepared(call.site, FACTS, self.now)
        else:
            self.coordinator.on_answer(call.site, answer, self.now)

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for site in self.sites.values():
            if not (site.cut or site.dead):
                site.contact = self.now
            for name in list(site.running):  # a site that cannot reach home stops within its lease
                gone = site.dead or name not in site.assigned or self.now - site.contact >= 0.6 * LEASE
                if gone:
                    del site.running[name]
                    if not (site.cut or site.dead):
                        self.owners.pop(name, None)
            if site.dead or site.cut:
                continue
            for name in site.assigned:
                owner = self.owners.get(name)
                stale = owner is not None and self.now - self.sites[owner].contact >= LEASE
                free = owner in (None, site.name) or stale
                if name not in site.finished and free and len(site.running) < site.nodes:
                    self.owners[name] = site.name
                    site.running.setdefault(name, 0.0)
            for name in list(site.running):
                self.done[name] = self.done.get(name, 0.0) + seconds
                if self.done[name] >= WORK:
                    site.finished.add(name)
                    del site.running[name]
                    del self.owners[name]

    def restart(self) -> None:
        """Kill the coordinator and start another one, with what was saved."""
        fresh = make(planner, len(self.coordinator.trainings), tuple(self.sites))
        ended = {name: item.ended for name, item in self.coordinator.trainings.items() if item.ended is not None}
        if self.saved:
            fresh.restore(json.loads(self.saved), ended)
        self.coordinator, self.waiting = fresh, []

    def check(self) -> None:
        """No training job is assigned to two sites whose leases have not ended."""
        for name in self.coordinator.trainings:
            given = [
                site.name
                for site in self.sites.values()
                if name in site.assigned and name not in site.finished and self.now - site.contact < LEASE
                and not site.dead
            ]  # fmt: skip
            cut = [site for site in given if self.sites[site].cut]
            assert len(given) - len(cut) <= 1, (name, given)
            trains = [site.name for site in self.sites.values() if name in site.running and not site.dead]
            assert len(trains) <= 1, (name, trains)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["time", "deliver", "lose", "cut", "mend", "restart", "nodes", "die"]),
        st.integers(0, 7),
        st.floats(1.0, 40.0),
    ),
    max_size=60,
)


@settings(max_examples=100)
@given(STEPS, st.integers(0, 1000))
def test_no_training_is_given_to_two_sites_and_none_is_lost(steps, seed) -> None:
    chance = random.Random(seed)
    world = World(make(planner), {name: Site(name, 2) for name in ("a", "b")})
    for what, number, seconds in steps:
        site = world.sites["ab"[number % 2]]
        match what:
            case "time":
                world.pass_time(seconds)
            case "deliver" | "lose" if world.waiting:
                world.deliver(number % len(world.waiting), what == "lose")
            case "cut" | "mend":
                site.cut = what == "cut"
            case "restart":
                world.restart()
            case "nodes":
                site.nodes = number % 3
            case "die":
                world.sites["a"].dead = True  # at most one
        world.send()
        world.check()
    # Whatever has happened: once one site works again, all is trained.
    world.sites["b"].cut, world.sites["b"].nodes = False, 2
    for _ in range(400):
        world.pass_time(5.0)
        while world.waiting:
            world.deliver(chance.randrange(len(world.waiting)), False)
        world.send()
        world.check()
        if world.coordinator.is_done:
            break
    assert {item.ended.state for item in world.coordinator.trainings.values() if item.ended} == {"finished"}
    assert world.coordinator.is_done


def put(site: str | None):
    """Return a planner that puts all training jobs at one site."""

    def plan(question: SitesQuestion) -> SitePlan:
        choices = tuple(SiteChoice(one.name, Verb.START, site, 1, 1.0, "because") for one in question.trainings)
        return SitePlan(choices, 0.0, 0.0, True)

    return plan


def settle(coordinator: Coordinator, sites: dict[str, Site], now: float) -> list[SiteCall]:
    """Answer all calls at once."""
    made = []
    for _ in range(20):
        calls = coordinator.due(now)
        made += calls
        for call in calls:
            if sites[call.site].dead:
                coordinator.on_silence(call.site, "is offline", now)
            elif call.ask is Ask.PREPARE:
                coordinator.on_prepared(call.site, FACTS, now)
            else:
                coordinator.on_answer(call.site, sites[call.site].take(call), now)
    return made


def test_a_training_is_given_to_the_next_site_only_when_the_first_has_taken_in_that_it_is_not_its_own() -> None:
    target = {"site": "a"}

    def moving(question: SitesQuestion) -> SitePlan:
        return put(target["site"])(question)

    coordinator = make(moving, 1)
    sites = {"a": Site("a", 1), "b": Site("b", 1)}
    settle(coordinator, sites, 0.0)
    assert (sites["a"].assigned, sites["b"].assigned) == (("t0",), ())
    target["site"] = "b"
    for call in coordinator.due(LOOK):
        coordinator.on_answer(call.site, sites[call.site].take(call), LOOK)
    (call,) = coordinator.due(LOOK)  # the order to the first site, and none to the second one
    assert (call.site, call.trainings) == ("a", ())
    coordinator.on_answer("a", sites["a"].take(call), LOOK)
    (call,) = coordinator.due(LOOK)
    assert (call.site, call.trainings, call.start) == ("b", ("t0",), True)


def test_a_silent_site_keeps_its_trainings_until_its_lease_ends_and_they_go_on_elsewhere_then() -> None:
    coordinator, sites = make(planner, 1), {"a": Site("a", 2), "b": Site("b", 0)}
    settle(coordinator, sites, 0.0)
    assert sites["a"].assigned == ("t0",)
    sites["a"].dead, sites["b"].nodes = True, 2
    settle(coordinator, sites, LOOK)
    assert any("keeps its training jobs for 40 s" in line for line in coordinator.lines(LOOK))
    assert sites["b"].assigned == ()
    settle(coordinator, sites, LEASE + 0.5)  # not only at the next look
    assert sites["b"].assigned == ("t0",)
    sites["a"].dead = False  # it was only cut off
    settle(coordinator, sites, LEASE + 30.0)
    assert sites["a"].assigned == ()


def test_a_site_that_never_got_ready_does_not_delay_the_others() -> None:
    coordinator, sites = make(planner, 2), {"a": Site("a", 2), "b": Site("b", 2, dead=True)}
    settle(coordinator, sites, 0.0)
    assert sites["a"].assigned == ("t0", "t1")


def test_calls_are_bounded_by_the_periods() -> None:
    coordinator, sites = make(put("a"), 2), {"a": Site("a", 2), "b": Site("b", 2, dead=True)}
    settle(coordinator, sites, 0.0)
    hour = [call for second in range(1, 3601) for call in settle(coordinator, sites, float(second))]
    for site in "ab":
        assert sum(call.site == site for call in hour) <= 3600 / LOOK + 3600 / STATUS + 2


def test_a_site_that_is_silent_for_days_is_asked_once_in_a_period() -> None:
    coordinator = make(planner)
    for _ in range(1100):  # 2.0 ** 1024 is an error
        coordinator.on_silence("a", "is offline", 0.0)
    assert coordinator.sites["a"].next_call == STATUS


def test_a_cancelled_training_is_withdrawn() -> None:
    coordinator, sites = make(put("a"), 2), {"a": Site("a", 2), "b": Site("b", 2)}
    settle(coordinator, sites, 0.0)
    coordinator.cancel("t0")
    settle(coordinator, sites, 1.0)
    assert sites["a"].assigned == ("t1",)


def test_another_home_is_refused() -> None:
    coordinator = make(put("a"))
    coordinator.due(0.0)
    coordinator.on_prepared("a", FACTS, 0.0)
    with pytest.raises(InvalidInput, match=r"its home is elsewhere .* all sites need the same"):
        coordinator.on_prepared("b", SiteFacts("elsewhere", LEASE), 0.0)


def test_all_sites_that_are_ready_are_stopped_and_one_that_does_not_answer_is_tried_three_times() -> None:
    coordinator, sites = make(put("a"), sites=("a", "b", "c")), {"a": Site("a", 2), "b": Site("b", 2)}
    for call in coordinator.due(0.0):
        if call.site in sites:
            coordinator.on_prepared(call.site, FACTS, 0.0)
    coordinator.on_silence("c", "is offline", 0.0)
    coordinator.stop()
    calls = coordinator.due(1.0)
    assert {(call.site, call.ask) for call in calls} == {("a", Ask.STOP), ("b", Ask.STOP)}
    coordinator.on_stopped("a", over=True, now=1.0)
    for attempt in range(3):
        assert not coordinator.is_done
        coordinator.on_silence("b", "is offline", 10.0 * attempt)
        coordinator.due(10.0 * attempt + 9.0)
    assert coordinator.is_done


def test_a_training_whose_site_is_gone_is_queued_at_another_one_although_all_nodes_there_are_taken() -> None:
    coordinator, sites = make(planner, 4), {"a": Site("a", 2), "b": Site("b", 2)}
    settle(coordinator, sites, 0.0)
    for site in sites.values():
        site.running = dict.fromkeys(site.assigned, 0.0)
    settle(coordinator, sites, STATUS)
    sites["a"].dead = True
    settle(coordinator, sites, STATUS + LEASE + 1.0)
    assert sorted(sites["b"].assigned) == ["t0", "t1", "t2", "t3"]
    assert "queued at b" in coordinator.trainings[sites["a"].assigned[0]].reason


def test_a_training_that_was_cancelled_without_a_coordinator_is_withdrawn_by_the_next_one() -> None:
    coordinator, sites = make(put("a"), 2), {"a": Site("a", 2), "b": Site("b", 2)}
    settle(coordinator, sites, 0.0)
    again = make(put("a"), 2)
    again.restore(coordinator.as_json(), {"t1": TrainingAtSite("t1", "cancelled", None, ())})
    settle(again, sites, 1.0)
    assert sites["a"].assigned == ("t0",)


def test_a_clock_that_is_set_back_stops_nothing() -> None:
    coordinator, sites = make(planner, 1), {"a": Site("a", 2), "b": Site("b", 2)}
    settle(coordinator, sites, 1e9)
    assert settle(coordinator, sites, 1e6) == []
    assert {call.ask for call in settle(coordinator, sites, 1e6 + LOOK)} == {Ask.LOOK}


def test_a_training_that_is_on_its_way_is_not_sent_elsewhere_before_it_can_have_nodes() -> None:
    coordinator = Coordinator(trainers(1), {"a": SiteRates(), "b": SiteRates()}, CallPace(10.0, 5.0), planner)
    sites = {"a": Site("a", 2), "b": Site("b", 0)}
    settle(coordinator, sites, 0.0)
    assert sites["a"].assigned == ("t0",)
    sites["a"].nodes, sites["b"].nodes = 0, 2
    for now in range(10, 60, 10):
        settle(coordinator, sites, float(now))
        assert sites["a"].assigned == ("t0",)
    settle(coordinator, sites, 70.0)
    assert sites["b"].assigned == ("t0",)


def test_the_last_training_is_cancelled_only_once_its_site_knows() -> None:
    world = World(make(planner, 1), {"a": Site("a", 2), "b": Site("b", 2)})
    while not world.sites["a"].assigned:
        world.send()
        while world.waiting:
            world.deliver(0, lose=False)
        world.pass_time(1.0)
    world.coordinator.cancel("t0")
    assert not world.coordinator.is_done
    world.send()
    while world.waiting:
        world.deliver(0, lose=False)
    assert world.coordinator.is_done
    assert world.sites["a"].assigned == ()


def test_a_cancelled_training_at_a_silent_site_does_not_keep_the_coordinator_forever() -> None:
    world = World(make(planner, 1), {"a": Site("a", 2), "b": Site("b", 2)})
    while not world.sites["a"].assigned:
        world.send()
        while world.waiting:
            world.deliver(0, lose=False)
        world.pass_time(1.0)
    world.sites["a"].cut = True
    world.coordinator.cancel("t0")
    for _ in range(100):
        world.send()
        while world.waiting:
            world.deliver(0, lose=False)
        world.pass_time(1.0)
    assert world.coordinator.is_done


def test_an_older_copy_of_the_state_takes_over_from_later_orders() -> None:
    world = World(make(planner, 2), {"a": Site("a", 2, order=7, assigned=("t9",)), "b": Site("b", 2)})
    for _ in range(30):
        world.send()
        while world.waiting:
            world.deliver(0, lose=False)
        world.pass_time(1.0)
    assert world.sites["a"].order > 7
    assert world.sites["a"].assigned == world.coordinator.sites["a"].wanted
    assert world.coordinator.sites["a"].confirmed == world.sites["a"].order


def test_trainings_of_a_site_whose_driver_does_not_start_go_elsewhere_and_the_reason_is_shown() -> None:
    @dataclass
    class Failing(Site):
        def answer(self, looked: bool) -> SiteAnswer:
            answer = super().answer(looked)
            return replace(answer, trainings={}, held=(), state="failed", message="0 MB are free")

    shown: set[str] = set()
    world = World(make(planner, 4), {"a": Failing("a", 2), "b": Site("b", 2)})
    for _ in range(40):
        world.send()
        while world.waiting:
            world.deliver(0, lose=False)
        world.pass_time(5.0)
        shown.update(world.coordinator.lines(world.now))
    assert any("its driver failed: 0 MB are free" in line for line in shown)
    assert {training.ended_at or training.site for training in world.coordinator.trainings.values()} == {"b"}


def questions_of(asked: list[SitesQuestion]):
    def plan(question: SitesQuestion) -> SitePlan:
        asked.append(question)
        return planner(question)

    return plan


def test_the_time_of_a_start_is_measured_charged_and_survives_the_coordinator() -> None:
    """The planner counts it for moves, looks far enough ahead to gain it, and says so."""
    asked: list[SitesQuestion] = []
    coordinator = Coordinator(
        trainers(1), {"a": SiteRates(), "b": SiteRates()}, CallPace(10.0, 5.0), questions_of(asked)
    )
    sites = {"a": Site("a", 2), "b": Site("b", 0)}
    settle(coordinator, sites, 0.0)
    assert {view.start for view in asked[-1].sites} == {60.0}, "assumed"
    for now in range(5, 30, 5):
        settle(coordinator, sites, float(now))
    sites["a"].running["t0"] = 1.0  # it has nodes from now on
    settle(coordinator, sites, 30.0)
    settle(coordinator, sites, 35.0)
    assert coordinator.sites["a"].starts == (30.0,)
    again = Coordinator(trainers(1), {"a": SiteRates(), "b": SiteRates()}, CallPace(10.0, 5.0), questions_of(asked))
    again.restore(json.loads(json.dumps(coordinator.as_json())), {})
    settle(again, sites, 45.0)
    assert [view.start for view in asked[-1].sites] == [30.0, 60.0]
    assert asked[-1].horizon == 240.0


def test_the_wait_for_nodes_is_no_start() -> None:
    coordinator, sites = make(planner, 1), {"a": Site("a", 2), "b": Site("b", 0)}
    settle(coordinator, sites, 0.0)
    sites["a"].nodes = 0
    settle(coordinator, sites, LOOK)
    sites["a"].running["t0"] = 1.0
    settle(coordinator, sites, 10 * LOOK)
    assert coordinator.sites["a"].starts == ()


def test_a_driver_that_is_not_started_yet_has_not_failed() -> None:
    """A site without a run answers that its driver was not started, and keeps what it offers."""

    @dataclass
    class New(Site):
        def answer(self, looked: bool) -> SiteAnswer:
            state = "running" if self.assigned else "failed"
            return replace(super().answer(looked), state=state, message="it was not started")

    world = World(make(planner, 1), {"a": New("a", 2), "b": New("b", 0)})
    for _ in range(10):
        world.send()
        assert not any("failed" in line for line in world.coordinator.lines(world.now))
        while world.waiting:
            world.deliver(0, lose=False)
            assert not any("failed" in line for line in world.coordinator.lines(world.now))
    assert world.sites["a"].assigned == ("t0",)


def test_the_failure_of_an_earlier_attempt_does_not_end_a_training_that_is_retried() -> None:
    coordinator, sites = make(put("a"), 1), {"a": Site("a", 1), "b": Site("b", 1)}
    settle(coordinator, sites, 0.0)
    failed = {"t0": TrainingAtSite("t0", "failed", None, (), error="ValueError: no")}
    before = replace(sites["a"].answer(looked=False), trainings=failed)
    coordinator.on_answer("a", before, 1.0)
    assert coordinator.trainings["t0"].ended is not None
    coordinator.retry("t0")
    assert coordinator.attempts == {"t0": 1}
    coordinator.on_answer("a", before, 2.0)
    assert coordinator.trainings["t0"].ended is None
    coordinator.on_answer("a", replace(before, retried={"t0": 1}), 3.0)
    assert coordinator.trainings["t0"].ended is not None
