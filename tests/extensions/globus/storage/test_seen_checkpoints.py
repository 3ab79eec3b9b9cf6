"""What home has listed once is looked for, for a lease."""

from __future__ import annotations

import pytest

from freetrain_parsl.extensions.globus.storage.carried_training import CarriedTraining, SeenCheckpoints
from freetrain_parsl.extensions.globus.storage.carrier import Parcel

OLD, NEW = Parcel("net", 1, "step-0000000010"), Parcel("net", 1, "step-0000000020")


@pytest.fixture
def seen() -> SeenCheckpoints:
    return SeenCheckpoints(lease=100.0, longest=20.0)


def item(generation: int = 2, lineage: int = 0) -> CarriedTraining:
    return CarriedTraining("net", generation=generation, lineage=lineage)


def test_the_newest_listed_one_is_a_candidate_although_later_listings_leave_it_out(seen: SeenCheckpoints) -> None:
    one = item()
    assert seen.candidates(one, [OLD, NEW], None, 0.0) == [OLD, NEW]
    assert seen.candidates(one, [OLD], None, 1.0) == [OLD, NEW]
    assert seen.candidates(one, [], None, 50.0) == [NEW]
    assert "does not list it now" in one.reason
    assert 50.0 < one.search_at <= 70.0
    assert seen.candidates(one, [OLD], None, 101.0) == [OLD]
    assert seen.candidates(one, [], (1, 10, 0), 102.0) == []


def test_one_that_is_listed_again_is_looked_for_as_long_again(seen: SeenCheckpoints) -> None:
    one = item()
    for now, listed in ((0.0, [NEW]), (1.0, []), (90.0, [NEW]), (110.0, [])):
        assert seen.candidates(one, listed, None, now) == [NEW]


def test_what_an_earlier_driver_was_sending_is_looked_for(seen: SeenCheckpoints) -> None:
    seen.under_way([NEW, OLD])
    assert seen.candidates(item(lineage=1), [], None, 0.0) == [NEW]


def test_what_is_here_is_not_looked_for(seen: SeenCheckpoints) -> None:
    seen.newest["net"] = OLD
    assert seen.candidates(item(), [], (1, 10, 0), 0.0) == []
    assert seen.candidates(item(), [NEW], (1, 10, 0), 0.0) == [NEW]


@pytest.mark.parametrize(("generation", "lineage", "waits"), [(1, 0, False), (3, 2, False), (2, 0, True), (3, 1, True)])
def test_an_empty_listing_is_repeated_only_if_another_site_has_owned_the_training(
    seen: SeenCheckpoints, generation: int, lineage: int, waits: bool
) -> None:
    one = item(generation, lineage)
    assert seen.candidates(one, [], None, 0.0) == (None if waits else [])
    assert seen.candidates(one, [], None, 10.0) == []
