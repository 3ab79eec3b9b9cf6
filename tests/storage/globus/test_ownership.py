"""At most one driver owns a training, whatever is lost, late or killed."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetrain_parsl.storage.globus.names import OwnersListing, claim_name
from freetrain_parsl.storage.globus.ownership import (
    HOLD,
    ListOwners,
    MakeEntry,
    Outcome,
    Ownership,
    RenameEntry,
    Request,
)

LEASE = 100.0


@dataclass
class Home:
    """The directory: creating and renaming are atomic."""

    names: set[str] = field(default_factory=set)

    def change(self, request: Request) -> Outcome:
        if isinstance(request, MakeEntry):
            if request.name in self.names:
                return Outcome.REFUSED
            self.names.add(request.name)
        elif isinstance(request, RenameEntry):
            if request.name not in self.names or request.to in self.names:
                return Outcome.REFUSED
            self.names.remove(request.name)
            self.names.add(request.to)
        return Outcome.DONE


def turn(home: Home, driver: Ownership, now: float, confirm: float | None = None) -> Request | None:
    """Carry out one request, at once."""
    request = driver.next_request(now, confirm=confirm)
    if isinstance(request, ListOwners):
        driver.on_listing(home.names, now, now)
    elif request is not None:
        driver.on_answer(request, home.change(request), now)
    return request


def settle(home: Home, driver: Ownership, now: float) -> int:
    """Carry out all that is due; return the number of requests."""
    count = 0
    while turn(home, driver, now) is not None:
        count += 1
        assert count < 1000
    return count


def test_a_free_training_is_claimed_and_later_ones_wait_until_the_heartbeat_has_stopped_for_a_lease() -> None:
    home, one, other = Home(), Ownership("a1", LEASE), Ownership("b2", LEASE)
    one.want("net")
    settle(home, one, 0.0)
    assert one.generation("net", 0.0) == 1
    other.want("net")
    for now in range(1, 50):
        settle(home, one, float(now))
        settle(home, other, float(now))
    assert other.generation("net", 49.0) is None
    assert "another site owns it (generation 1, driver a1)" in other.reason("net")
    for now in range(50, 160):  # the first driver is dead
        settle(home, other, float(now))
        assert one.generation("net", float(now)) is None or other.generation("net", float(now)) is None
    assert other.generation("net", 159.0) == 2


def test_a_released_training_is_free_at_once() -> None:
    home, one, other = Home(), Ownership("a1", LEASE), Ownership("b2", LEASE)
    one.want("net")
    settle(home, one, 0.0)
    one.release("net")
    assert one.generation("net", 0.0) is None
    settle(home, one, 0.0)
    assert not one.releasing
    other.want("net")
    settle(home, other, 1.0)
    assert other.generation("net", 1.0) == 2


def test_the_next_driver_of_a_run_need_not_wait_and_takes_the_next_generation() -> None:
    home, one = Home(), Ownership("a1", LEASE)
    one.want("net")
    settle(home, one, 0.0)
    again = Ownership("a1", LEASE)
    again.want("net")
    settle(home, again, 1.0)
    assert again.generation("net", 1.0) == 2
    settle(home, one, 30.0)  # the first one was only suspended
    assert one.generation("net", 30.0) is None
    assert "generation 2" in one.lost(30.0)["net"]


def test_a_driver_that_cannot_renew_stops_before_the_lease_is_over_and_returns_with_the_next_generation() -> None:
    home, one = Home(), Ownership("a1", LEASE)
    one.want("net")
    settle(home, one, 0.0)
    assert one.lost(HOLD * LEASE - 1) == {}
    assert "could not be reached for 60 s" in one.lost(HOLD * LEASE)["net"]
    settle(home, one, 80.0)
    assert one.generation("net", 80.0) is None  # it still trains
    one.stopped("net")
    settle(home, one, 90.0)
    assert one.generation("net", 90.0) == 2


def test_a_hundred_trainings_cost_two_requests_each_and_renewals_two_in_all() -> None:
    home, one = Home(), Ownership("a1", LEASE)
    for number in range(100):
        one.want(f"net-{number}")
    assert settle(home, one, 0.0) <= 2 * 100 + 4
    assert settle(home, one, 21.0) == 2


def test_a_lost_answer_looks_like_the_success_of_another_and_the_next_generation_is_taken_later() -> None:
    home, one = Home(), Ownership("a1", LEASE)
    one.want("net")
    for _ in range(20):
        request = one.next_request(0.0)
        assert request is not None
        if request == MakeEntry(claim_name("net", 1)):
            break
        if isinstance(request, ListOwners):
            one.on_listing(home.names, 0.0, 0.0)
        else:
            one.on_answer(request, home.change(request), 0.0)
    home.change(request)
    one.on_answer(request, Outcome.UNKNOWN, 0.0)
    settle(home, one, 1.0)
    assert one.generation("net", 1.0) is None
    for now in range(2, 40):
        settle(home, one, float(now))
    assert one.generation("net", 39.0) == 2


def test_finishing_is_confirmed_by_a_listing_requested_afterwards() -> None:
    home, one = Home(), Ownership("a1", LEASE)
    one.want("net")
    settle(home, one, 0.0)
    assert not one.confirmed_since("net", 5.0, 5.0)
    assert turn(home, one, 6.0, confirm=5.0) == ListOwners()
    assert one.confirmed_since("net", 5.0, 6.0)


@pytest.mark.parametrize("training", ["net", "a.gen-0000000001", "a.gen-0000000001.by-ab", "driver-ab.beat-0000000001"])
def test_names_of_trainings_cannot_be_mistaken(training: str) -> None:
    names = [claim_name(training, 7), claim_name(training, 7, "by-ab"), "x", "driver-ab.beat-0000000003"]
    listing = OwnersListing.parse(names)
    assert set(listing.claims) == {training}
    assert (listing.claims[training].generation, listing.claims[training].drivers) == (7, {"ab"})
    assert listing.beats == {"ab": 3}


@dataclass
class Driver:
    """A driver with a network that delays and loses."""

    machine: Ownership
    pending: tuple[Request, float, float, float, bool] | None = None  # sent, applied, answered, answer lost
    applied: object = None


MISHAP = st.sampled_from(["none", "none", "none", "lost", "slow", "late", "kill", "cut"])


@settings(max_examples=150)
@given(data=st.data())
def test_at_most_one_driver_owns_a_training_at_any_time(data: st.DataObject) -> None:
    """Requests take effect, and answers arrive, at any time or never; drivers are killed and started again."""
    home = Home()
    names = ["a1", "b2", "c3"]
    drivers: dict[str, Driver] = {}
    for name in names:
        drivers[name] = Driver(Ownership(name, LEASE))
        drivers[name].machine.want("net")
    in_flight: list[tuple[float, Request]] = []  # of dead drivers, and those whose answer was given up
    now, owners, highest = 0.0, 0, 0
    for _ in range(data.draw(st.integers(20, 150))):
        now += data.draw(st.sampled_from([0.5, 2.0, 5.0, 15.0, 40.0]))
        for due, request in sorted(in_flight, key=lambda item: item[0]):
            if due <= now:
                in_flight.remove((due, request))
                home.change(request)
        for name, driver in drivers.items():
            if driver.pending is None:
                driver.machine.lost(now)
                if driver.machine.reason("net") and "net" in driver.machine.lost(now):
                    driver.machine.stopped("net")  # its training stops at once
                request = driver.machine.next_request(now)
                if request is None:
                    continue
                mishap = data.draw(MISHAP)
                if mishap == "kill":
                    in_flight.append((now + 3.0, request))
                    drivers[name] = Driver(Ownership(name, LEASE))
                    drivers[name].machine.want("net")
                    continue
                if isinstance(request, ListOwners):
                    if mishap in ("none", "slow"):
                        driver.pending = (request, now, now, now + (7.0 if mishap == "slow" else 0.0), False)
                        driver.applied = set(home.names)
                elif mishap in ("none", "slow"):
                    driver.applied = home.change(request)
                    driver.pending = (request, now, now, now + (7.0 if mishap == "slow" else 0.0), False)
                else:
                    if mishap == "lost":
                        home.change(request)
                    elif mishap == "late":
                        in_flight.append((now + 30.0, request))
                    driver.machine.on_answer(request, Outcome.UNKNOWN, now)
            if driver.pending is not None and driver.pending[3] <= now:
                request, asked = driver.pending[0], driver.pending[1]
                driver.pending = None
                if isinstance(request, ListOwners):
                    driver.machine.on_listing(driver.applied, asked, now)  # type: ignore[arg-type]
                else:
                    driver.machine.on_answer(request, driver.applied, asked)  # type: ignore[arg-type]
            holding = {name: held for name, one in drivers.items() if (held := one.machine.generation("net", now))}
            assert len(holding) <= 1, holding
            for held in holding.values():
                assert held >= highest
                highest, owners = held, owners + 1


@settings(max_examples=60)
@given(data=st.data())
def test_of_two_that_believe_after_stale_listings_the_later_generation_goes_on(data: st.DataObject) -> None:
    home, past = Home(), [set[str]()]
    drivers = {name: Ownership(name, LEASE) for name in ("a1", "b2")}
    for driver in drivers.values():
        driver.want("net")
    now = 0.0
    for _ in range(data.draw(st.integers(10, 60))):
        now += data.draw(st.sampled_from([1.0, 10.0, 30.0]))
        for driver in drivers.values():
            driver.lost(now)
            request = driver.next_request(now)
            if isinstance(request, ListOwners):
                driver.on_listing(past[data.draw(st.integers(max(0, len(past) - 6), len(past) - 1))], now, now)
            elif request is not None:
                driver.on_answer(request, home.change(request), now)
            past.append(set(home.names))
        held = [generation for driver in drivers.values() if (generation := driver.generation("net", now))]
        assert len(held) == len(set(held))
    for driver in drivers.values():  # listings are true again
        driver.next_request(now, confirm=now + 1)
        driver.on_listing(home.names, now + 1, now + 1)
    assert sum(driver.generation("net", now + 1) is not None for driver in drivers.values()) <= 1
