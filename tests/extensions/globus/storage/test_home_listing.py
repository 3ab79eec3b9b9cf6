"""What listings of home show is not believed where that could do harm."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from freetrain_parsl.extensions.globus.storage.carrier import (
    Carrier,
    CopyJob,
    CopyKind,
    HomeCheckpoints,
    Parcel,
    backoff,
)
from freetrain_parsl.extensions.globus.storage.collections import CollectionPath, TaskState
from freetrain_parsl.extensions.globus.storage.home_search import difference_at_home, list_home, search_home
from freetrain_parsl.extensions.globus.storage.names import LAST_NUMBER, OwnersListing, generation_of

if TYPE_CHECKING:
    from freetrain_parsl.extensions.globus.storage.collections import Collections

HOME = CollectionPath("cccccccc-0000-4000-8000-000000000000", "/ft")
DONE = TaskState("SUCCEEDED")
_OUTSIDE = ["../../x", "/etc/x", "a/b", "..", ".x", "x\ny", "\x1b[31m", "\u0663", "", "n" * 201]


class Tree:
    """Listings from a table; counts them."""

    def __init__(self, listings: dict[str, list[str]]) -> None:
        self.listings = listings
        self.requests: list[str] = []

    def names(self, _collection: str, path: str, *, directories: bool = False) -> list[str] | None:
        assert directories or "step-" in path or path.endswith("owners")
        self.requests.append(path)
        return self.listings.get(path)

    def sizes(self, _collection: str, path: str) -> dict[str, int | None] | None:
        names = self.listings.get(path)
        return None if names is None else dict.fromkeys(names, 5)


def as_collections(tree: Tree) -> Collections:
    return tree  # type: ignore[return-value]


def step(number: int, generation: int = 1) -> Parcel:
    return Parcel("net", generation, f"step-{number:010d}")


@pytest.mark.parametrize("training", _OUTSIDE)
def test_a_claim_of_something_that_is_no_training_is_ignored(training: str) -> None:
    names = [f"{training}.gen-0000000001", f"{training}.gen-0000000001.by-a1"]
    assert OwnersListing.parse(names).claims == {}


def test_digits_of_other_scripts_and_numbers_that_no_driver_writes_are_ignored() -> None:
    arabic = "\u0660" * 9 + "\u0661"
    assert OwnersListing.parse([f"net.gen-{arabic}", f"driver-a1.beat-{arabic}"]) == OwnersListing({}, {})
    assert generation_of(f"gen-{arabic}") is None
    for name in (f"step-{arabic}", "step-00000000001", "step-" + "9" * 5000, "step-0000000001-\u0661", "step-1", ".."):
        assert not Parcel("net", 1, name).is_checkpoint


@pytest.mark.parametrize(
    "document",
    [
        {"training": "../../x", "generation": 1, "name": "step-0000000001"},
        {"training": "net", "generation": -1, "name": "step-0000000001"},
        {"training": "net", "generation": LAST_NUMBER + 1, "name": "step-0000000001"},
    ],
)
def test_a_job_whose_paths_would_leave_the_checkpoints_is_refused(document: dict[str, object]) -> None:
    job = {"kind": "remove", "submission": "", "task": "", "parcels": [document]}
    with pytest.raises(ValueError, match="outside"):
        CopyJob.from_json(job)


def test_a_search_looks_at_the_newest_first_and_ends_when_it_has_enough_whatever_home_lists() -> None:
    names = [f"step-{number:010d}" for number in range(10_000)]
    listings = {"/ft/checkpoints/net": ["gen-0000000002"], "/ft/checkpoints/net/gen-0000000002": [*names, "..", "x/y"]}
    listings |= {f"/ft/checkpoints/net/gen-0000000002/{name}": ["manifest.json"] for name in names}
    tree, found = Tree(listings), HomeCheckpoints()
    steps = sum(1 for _ in search_home(as_collections(tree), HOME, "net", 2, found))
    assert found.ordered[-1] == step(9999, 2)
    assert steps == len(tree.requests) <= 10
    assert len(list_home(as_collections(tree), HOME, "net").whole) == 10_000


def test_each_step_of_a_search_is_one_request_and_few_later_generations_are_looked_at() -> None:
    later = [f"gen-{number:010d}" for number in range(3, 5000)]
    listings = {
        "/ft/checkpoints/net": [*later, "gen-0000000001"],
        "/ft/checkpoints/net/gen-0000000001": ["step-0000000010"],
        "/ft/checkpoints/net/gen-0000000001/step-0000000010": ["manifest.json"],
    }
    tree, found = Tree(listings), HomeCheckpoints()
    for _ in search_home(as_collections(tree), HOME, "net", 2, found):
        pass
    assert found.ordered == [step(10)]
    assert len(tree.requests) < 30


def test_a_checkpoint_that_was_sent_is_at_home_when_its_files_are_listed_with_their_sizes() -> None:
    place = "/ft/checkpoints/net/gen-0000000001/step-0000000010"
    tree = Tree({place: ["state.pt", "manifest.json", "shards"], f"{place}/shards": ["0"]})
    sizes = {"state.pt": 5, "manifest.json": 5, "shards/0": 5}
    assert difference_at_home(as_collections(tree), HOME, step(10), sizes) == ""
    fault = difference_at_home(as_collections(tree), HOME, step(10), {**sizes, "state.pt": 7})
    assert fault == "home lists state.pt of step-0000000010 with 5 bytes instead of 7"
    assert "does not list 1" in difference_at_home(as_collections(tree), HOME, step(10), {**sizes, "shards/1": 5})
    assert "does not list state.pt" in difference_at_home(as_collections(Tree({})), HOME, step(10), sizes)


def removed(carrier: Carrier) -> set[Parcel]:
    """Carry out all removals that are due; return what is removed."""
    gone: set[Parcel] = set()
    while (job := carrier.next_job(0.0)) is not None:
        assert job.kind is CopyKind.REMOVE
        carrier.on_state(job, DONE, 0.0)
        gone |= set(job.parcels)
    return gone


def sent(carrier: Carrier, parcel: Parcel, fault: str = "") -> None:
    """Send a checkpoint; its tasks succeed."""
    carrier.offer(parcel)
    for _ in range(2):
        carrier.next_job(0.0)
        (job,) = (job for job in carrier.jobs if job.kind in (CopyKind.DATA, CopyKind.MANIFEST))
        carrier.on_state(job, DONE, 0.0)
    carrier.shown(parcel, fault, 0.0)


def test_what_listings_show_removes_nothing_only_what_was_sent_or_fetched_does() -> None:
    """A listing without a manifest made a whole checkpoint look partial, and one with phantoms made it look old."""
    carrier = Carrier(retry=5.0, longest=60.0)
    phantoms = [step(90, 7), step(91, 7)]
    carrier.found("net", [step(10), step(20), *phantoms], partial=[step(30)])
    assert removed(carrier) == set()
    sent(carrier, step(40, 2))
    assert removed(carrier) == set()
    carrier.prove(step(30))
    sent(carrier, step(50, 2))
    assert removed(carrier) == {step(10), step(20), step(30)}
    sent(carrier, step(60, 2))
    assert removed(carrier) == {step(40, 2)}


def test_a_task_that_succeeds_without_a_file_does_not_remove_the_checkpoints_before() -> None:
    carrier = Carrier(retry=5.0, longest=60.0, patience=100.0)
    for number in (10, 20):
        sent(carrier, step(number))
    sent(carrier, step(30), "home does not list state.pt")
    assert carrier.busy("net")
    assert not carrier.wants("net", step(30).name, 1)
    assert removed(carrier) == set()
    assert carrier.to_look_for(1.0) == []
    assert carrier.to_look_for(6.0) == [step(30)]
    carrier.shown(step(30), "home does not list state.pt", 100.0)
    assert "home does not list state.pt" in carrier.trouble("net", 100.0)
    again = carrier.next_job(200.0)
    assert again is not None
    assert (again.kind, again.parcels) == (CopyKind.DATA, (step(30),))


def test_the_pause_after_any_number_of_failures_is_limited() -> None:
    """``2.0 ** 1024`` ended the mover's thread after 34 hours without home."""
    assert backoff(100_000, 5.0, 60.0) == 60.0
    carrier = Carrier(retry=5.0, longest=60.0)
    for _ in range(2000):
        carrier.delayed("net", "down", 0.0)
    assert "next attempt in 60 s" in carrier.trouble("net", 0.0)
