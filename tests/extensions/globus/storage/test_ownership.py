"""At most one driver owns a training job, whatever is lost, late or killed."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetrain_parsl.extensions.globus.storage.names import LAST_NUMBER, OwnersListing, claim_name
from freetrain_parsl.extensions.globus.storage.ownership import (
    HOLD,
    ListOwners,
    MakeEntry,
    OwnerRequest,
    Ownership,
    RenameEntry,
    RequestOutcome,
)

LEASE = 100.0


@dataclass
class Home:
    """The directory: creating and renaming are atomic."""

    names: set[str] = field(default_factory=set)

    def change(self, request: OwnerRequest) -> RequestOutcome:
        if isinstance(request, MakeEntry):
            if request.name in self.names:
                return RequestOutcome.REFUSED
            self.names.add(request.name)
        elif isinstance(request, RenameEntry):
            if request.name not in self.names or request.to in self.names:
                return RequestOutcome.REFUSED
            self.names.remove(request.name)
            self.names.add(request.to)
        return RequestOutcome.DONE


def turn(home: Home, driver: Ownership, now: float, confirm: float | None = None) -> OwnerRequest | None:
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
    one.on_answer(request, RequestOutcome.UNKNOWN, 0.0)
    settle(home, one, 1.0)
    assert one.generation("net", 1.0) is None
    for now in range(2, 40):
        settle(home, one, float(now))
    assert one.generation("net", 39.0) == 2


def test_a_claim_that_is_confirmed_too_late_is_given_up_as_another_driver_may_be_about_to_follow() -> None:
    home, one, other = Home(), Ownership("a1", LEASE), Ownership("b2", LEASE)
    one.want("net")
    other.want("net")
    while claim_name("net", 1) not in home.names:
        turn(home, one, 0.0)
    claimed = one.next_request(1.0)  # its name, which is sent late
    assert claimed == MakeEntry(claim_name("net", 1, "by-a1"))
    for now in range(1, 60):
        if (request := other.next_request(float(now))) == MakeEntry(claim_name("net", 2)):
            break
        if isinstance(request, ListOwners):
            other.on_listing(home.names, float(now), float(now))
        elif request is not None:
            other.on_answer(request, home.change(request), float(now))
    else:
        raise AssertionError("it never follows")
    one.on_answer(claimed, home.change(claimed), 1.0)  # type: ignore[arg-type]
    one.on_listing(home.names, float(now), float(now))  # it sees its own claim only
    assert one.generation("net", float(now)) is None
    other.on_answer(request, home.change(request), float(now))
    settle(home, other, float(now))
    assert other.generation("net", float(now)) == 2


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


MISHAP = st.sampled_from(["none", "none", "none", "lost", "slow", "late", "kill", "cut"])


class Driver:
    """A driver with a network that delays and loses.

    Parameters
    ----------
    name
        Its identity; it is started again with it after it was killed.
    home
        The directory.
    late
        Requests that take effect later: their time, and what they are.
    """

    def __init__(self, name: str, home: Home, late: list[tuple[float, OwnerRequest]]) -> None:
        self.name, self.home, self.late = name, home, late
        self.start()

    def start(self) -> None:
        self.machine = Ownership(self.name, LEASE)
        self.machine.want("net")
        self.pending: tuple[OwnerRequest, object, float, float] | None = None  # its answer, when asked, when it arrives

    def turn(self, now: float, data: st.DataObject) -> None:
        if self.pending is None:
            if "net" in self.machine.lost(now):
                self.machine.stopped("net")  # its training job stops at once
            request = self.machine.next_request(now)
            if request is not None:
                self.ask(request, now, data.draw(MISHAP))
        if self.pending is not None and self.pending[3] <= now:
            request, answer, asked, _ = self.pending
            self.pending = None
            if isinstance(request, ListOwners):
                self.machine.on_listing(answer, asked, now)  # type: ignore[arg-type]
            else:
                self.machine.on_answer(request, answer, asked)  # type: ignore[arg-type]

    def ask(self, request: OwnerRequest, now: float, mishap: str) -> None:
        if mishap == "kill":
            self.late.append((now + 3.0, request))
            self.start()
        elif mishap in ("none", "slow"):
            answer = set(self.home.names) if isinstance(request, ListOwners) else self.home.change(request)
            self.pending = (request, answer, now, now + (7.0 if mishap == "slow" else 0.0))
        elif not isinstance(request, ListOwners):
            if mishap == "lost":
                self.home.change(request)
            elif mishap == "late":
                self.late.append((now + 30.0, request))
            self.machine.on_answer(request, RequestOutcome.UNKNOWN, now)


@settings(max_examples=60)
@given(data=st.data())
def test_at_most_one_driver_owns_a_training_at_any_time(data: st.DataObject) -> None:
    """Requests take effect, and answers arrive, at any time or never; drivers are killed and started again."""
    home, late = Home(), list[tuple[float, OwnerRequest]]()
    drivers = [Driver(name, home, late) for name in ("a1", "b2", "c3")]
    now, highest = 0.0, 0
    for _ in range(data.draw(st.integers(20, 120))):
        now += data.draw(st.sampled_from([0.5, 2.0, 5.0, 15.0, 40.0]))
        for item in [item for item in late if item[0] <= now]:
            late.remove(item)
            home.change(item[1])
        for driver in drivers:
            driver.turn(now, data)
            held = [number for one in drivers if (number := one.machine.generation("net", now)) is not None]
            assert len(held) <= 1
            assert all(number >= highest for number in held)
            highest = max([highest, *held])


@settings(max_examples=30)
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


def test_a_claim_that_an_earlier_process_has_left_is_released_although_this_one_does_not_want_it() -> None:
    home, one = Home(), Ownership("a1", LEASE)
    for name in ("net", "gone"):
        one.want(name)
    settle(home, one, 0.0)
    again, other = Ownership("a1", LEASE), Ownership("b2", LEASE)
    again.want("net")
    for name in ("gone", "never", "net"):
        again.abandon(name)
    settle(home, again, 1.0)
    assert not again.releasing
    for name in ("net", "gone"):
        other.want(name)
    settle(home, other, 2.0)
    assert (other.generation("gone", 2.0), other.generation("net", 2.0)) == (2, None)
    assert again.generation("net", 2.0) == 2


def owner(home: Home, name: str = "a1") -> Ownership:
    """Return a driver that owns the training job."""
    one = Ownership(name, LEASE)
    one.want("net")
    settle(home, one, 0.0)
    assert one.generation("net", 0.0) == 1
    return one


@pytest.mark.parametrize("left_out", [{"net.gen-0000000001.by-a1"}, {"net.gen-0000000001", "net.gen-0000000001.by-a1"}])
def test_a_listing_that_leaves_out_the_name_of_a_claim_does_not_make_it_free(left_out: set[str]) -> None:
    home, other = Home(), Ownership("b2", LEASE)
    one = owner(home)
    other.want("net")
    for now in range(1, 60):
        settle(home, one, float(now))
        settle(home, other, float(now))
    other.on_listing(home.names - left_out, 60.0, 60.0)
    requests = [other.next_request(60.0) for _ in range(3)]
    assert not any(isinstance(request, MakeEntry) for request in requests)


def test_an_earlier_heartbeat_in_a_listing_is_no_sign_of_life() -> None:
    home, other = Home(), Ownership("b2", LEASE)
    owner(home)  # it is dead from now on
    home.names = {name for name in home.names if "beat" not in name} | {"driver-a1.beat-0000000005"}
    other.want("net")
    earlier = {name for name in home.names if "beat" not in name} | {"driver-a1.beat-0000000004"}
    listings = 0
    for now in range(1, 130):
        for _ in range(3):
            request = other.next_request(float(now))
            if isinstance(request, ListOwners):
                listings += 1
                shown = home.names if listings % 2 else earlier | {name for name in home.names if "b2" in name}
                other.on_listing(shown, float(now), float(now))
            elif request is not None:
                other.on_answer(request, home.change(request), float(now))
    assert other.generation("net", 129.0) == 2


def test_a_claim_that_a_stale_listing_does_not_show_yet_is_looked_for_and_not_given_up() -> None:
    home, one = Home(), Ownership("a1", LEASE)
    one.want("net")
    for tenth in range(200):
        now = tenth / 10
        request = one.next_request(now)
        if isinstance(request, ListOwners):
            one.on_listing(home.names if now > 10.0 else set(), now, now)
        elif request is not None:
            one.on_answer(request, home.change(request), now)
    assert one.generation("net", 19.9) == 1


@pytest.mark.parametrize("hidden", ["net", "driver"])
def test_refusals_that_no_listing_explains_are_followed_by_few_requests(hidden: str) -> None:
    home, one = Home({"net.gen-0000000001", "driver-a1.beat-0000000001"}), Ownership("a1", LEASE)
    one.want("net")
    requests = 0
    for tenth in range(600):
        request = one.next_request(tenth / 10)
        requests += request is not None
        if isinstance(request, ListOwners):
            one.on_listing({name for name in home.names if not name.startswith(hidden)}, tenth / 10, tenth / 10)
        elif request is not None:
            one.on_answer(request, home.change(request), tenth / 10)
    assert 5 < requests < 60


def test_a_heartbeat_goes_on_although_listings_show_another_number() -> None:
    home = Home()
    one = owner(home)
    shown = set(home.names)
    for now in range(1, 300):
        for _ in range(3):
            request = one.next_request(float(now))
            if isinstance(request, ListOwners):
                one.on_listing(shown, float(now), float(now))
            elif request is not None:
                one.on_answer(request, home.change(request), float(now))
        assert one.generation("net", float(now)) == 1


def test_two_drivers_whose_claims_of_one_generation_both_succeeded_end_with_one_owner() -> None:
    home = Home()
    one = owner(home)
    other = Ownership("b2", LEASE)
    other.want("net")
    other.on_listing(set(), 0.0, 0.0)
    while other.generation("net", 0.0) is None:  # creating what exists succeeds, and listings show its own entries
        request = other.next_request(0.0)
        if isinstance(request, ListOwners):
            other.on_listing({name for name in home.names if "a1" not in name}, 0.0, 0.0)
        elif request is not None:
            home.change(request)
            other.on_answer(request, RequestOutcome.DONE, 0.0)
    assert one.generation("net", 0.0) == other.generation("net", 0.0) == 1
    for now in range(1, 300):
        for driver in (one, other):
            settle(home, driver, float(now))
            if driver.lost(float(now)):
                driver.stopped("net")
    held = {driver.generation("net", 299.0) for driver in (one, other)} - {None}
    assert len(held) == 1
    assert held != {1}


def test_only_a_listing_that_shows_the_ownership_confirms_a_result() -> None:
    home = Home()
    one = owner(home)
    one.on_listing(set(), 6.0, 6.0)
    assert not one.confirmed_since("net", 5.0, 6.0)
    one.on_listing(home.names, 7.0, 7.0)
    assert one.confirmed_since("net", 5.0, 7.0)


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        ("net.gen-9999999999", "after which there is none; remove net.gen-9999999999"),
        ("driver-a1.beat-9999999999", "after which there is none; remove driver-a1"),
        ("NET.gen-0000000001", "has NET; rename one of both training jobs"),
    ],
)
def test_entries_after_which_no_claim_is_possible_are_named(entry: str, told: str) -> None:
    home, one = Home({entry}), Ownership("a1", LEASE)
    one.want("net")
    for now in range(60):
        for _ in range(3):
            request = one.next_request(float(now))
            if isinstance(request, ListOwners):
                one.on_listing(home.names, float(now), float(now))
            elif isinstance(request, MakeEntry) and request.name.lower() in {name.lower() for name in home.names}:
                one.on_answer(request, RequestOutcome.REFUSED, float(now))
            elif request is not None:
                one.on_answer(request, home.change(request), float(now))
    assert told in one.reason("net")


def test_a_claim_that_follows_signs_of_a_later_generation_does_so_for_a_lease_only() -> None:
    home = Home()
    one = owner(home)
    one.follow("net", 6, 0.0)
    settle(home, one, 1.0)
    assert one.generation("net", 1.0) == 7
    one.follow("net", LAST_NUMBER, 2.0)
    for now in range(3, 101):
        settle(home, one, float(now))
    assert "after which there is none" in one.reason("net")
    settle(home, one, 103.0)
    assert one.generation("net", 103.0) == 8


def test_a_phantom_of_a_later_claim_is_forgotten_after_a_lease() -> None:
    home = Home()
    one = owner(home)
    one.on_listing({*home.names, "net.gen-0000000007.by-ff"}, 1.0, 1.0)
    assert "generation 7" in one.lost(1.0)["net"]
    one.stopped("net")
    for now in range(2, 120):
        settle(home, one, float(now))
    assert one.generation("net", 119.0) is not None
