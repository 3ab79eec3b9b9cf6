"""Ownership of trainings: at most one driver trains a training at a time, decided on the home collection. Pure.

A driver claims the next *generation* of a training by creating a directory, which fails where it exists, puts its name
to the claim, and lists to confirm that no later generation exists. It then owns the training for as long as it renews
its heartbeat. All of this is in one directory (`freetrain_parsl.storage.globus.names`), so that a driver needs one
renaming and one listing per renewal, whatever the number of its trainings.

Clocks of different sites are never compared. A driver stops its trainings `HOLD` leases after it *sent* its last
renewal that succeeded. Another driver takes over after it has *seen* the same heartbeat for a whole lease. An answer
that was lost looks like the success of another driver: a claim without a name belongs to nobody, and may be followed
by the next one once its driver can no longer confirm it (`SETTLE` leases).

A driver never returns to a claim whose lease it has lost, or that an earlier process made: it claims the next one.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from freetrain_parsl.storage.globus.names import OwnersListing, beat_name, claim_name

if TYPE_CHECKING:
    from collections.abc import Iterable

    from freetrain_parsl.storage.globus.names import OwnerClaim

__all__ = ["HOLD", "SETTLE", "ListOwners", "MakeEntry", "OwnerRequest", "Ownership", "RenameEntry", "RequestOutcome"]

HOLD = 0.6
"""Share of a lease for which a driver may train after its last renewal."""
SETTLE = 0.2
"""Share of a lease in which a claim must be confirmed."""
RENEW = 0.2
"""Share of a lease between renewals."""
WATCH = 0.1
"""Share of a lease between listings while waiting for another driver."""


class RequestOutcome(Enum):
    """What became of a request that changes the directory."""

    DONE = "done"
    REFUSED = "refused"  # it exists already; the entry to be renamed does not exist
    UNKNOWN = "unknown"  # no answer: it may have been carried out, or may still be


@dataclass(frozen=True)
class ListOwners:
    """List the directory."""


@dataclass(frozen=True)
class MakeEntry:
    """Create a directory in it."""

    name: str


@dataclass(frozen=True)
class RenameEntry:
    """Rename one of its entries."""

    name: str
    to: str


OwnerRequest = ListOwners | MakeEntry | RenameEntry


@dataclass
class _Wanted:
    """A training that this driver owns or wants.

    Parameters
    ----------
    claimed
        Generation of its own claim that is not confirmed yet.
    begun
        When this claim was requested.
    named
        Whether its name is on the claim.
    owned
        Generation that it owns.
    over
        The generation is no longer used, because the training has ended, or the driver stops.
    lost
        Why it no longer owns `owned`; it may still be training.
    reason
        Why it does not own the training.
    """

    claimed: int | None = None
    begun: float = 0.0
    named: bool = False
    owned: int | None = None
    over: bool = False
    lost: str = ""
    reason: str = "home has not said yet who owns it"


class Ownership:
    """The claims of one driver. Requests are carried out one at a time, each followed by its answer.

    Parameters
    ----------
    driver
        Identity of the run directory, hexadecimal. At most one of its drivers lives at a time.
    lease
        Seconds; the same for all drivers.
    """

    def __init__(self, driver: str, lease: float) -> None:
        self._driver = driver
        self._lease = lease
        self._wanted: dict[str, _Wanted] = {}
        self._abandoned: set[str] = set()  # not wanted, but perhaps claimed by an earlier process
        self._listing: OwnersListing | None = None
        self._listed = 0.0  # when the listing was requested
        self._unsure = False  # it must be listed again, to know what a request has done
        self._number: int | None = None  # of its last heartbeat
        self._renewed: float | None = None  # when the last successful renewal was requested
        self._sent: tuple[int, float] | None = None  # a renewal whose success is not known: its number and time
        self._seen: dict[object, tuple[object, float]] = {}  # what has not changed since when

    # What the driver asks for.

    def want(self, training: str) -> None:
        """Claim a training as soon as no other driver owns it."""
        self._abandoned.discard(training)
        self._wanted.setdefault(training, _Wanted())

    def abandon(self, training: str) -> None:
        """Release a training that is not wanted, if an earlier process with this identity has left a claim on it.

        Otherwise the heartbeats of this one would keep that claim alive.
        """
        if training not in self._wanted:
            self._abandoned.add(training)

    def wants(self, training: str) -> bool:
        """Return whether a training is wanted or owned, or its release is not confirmed yet."""
        return training in self._wanted

    def release(self, training: str) -> None:
        """Give up a training that no longer runs, so that others need not wait for the lease."""
        if (item := self._wanted.get(training)) is None:
            return
        if item.owned is None or item.lost:
            del self._wanted[training]
        item.over = True

    def stopped(self, training: str) -> None:
        """Note that a training whose ownership was lost no longer runs; it is wanted again."""
        if training in self._wanted:
            self._wanted[training] = _Wanted(reason=self._wanted[training].lost)

    # What it is told.

    def generation(self, training: str, now: float) -> int | None:
        """Return the generation in which this driver may train now; ``None`` if it may not."""
        item = self._wanted.get(training)
        if item is None or item.owned is None or item.lost or item.over or not self._holds(now):
            return None
        return item.owned

    def lost(self, now: float) -> dict[str, str]:
        """Return the trainings that this driver must stop, with the reason."""
        if self._renewed is not None and not self._holds(now):
            for item in self._wanted.values():
                if item.owned is not None and not item.lost and not item.over:
                    item.lost = f"home could not be reached for {now - self._renewed:.0f} s; another site may own it"
        return {name: item.lost for name, item in self._wanted.items() if item.lost and item.owned is not None}

    def reason(self, training: str) -> str:
        """Return why this driver does not own a training."""
        item = self._wanted.get(training)
        return "" if item is None else item.lost or item.reason

    @property
    def releasing(self) -> bool:
        """Whether releases are still to be sent."""
        return bool(self._abandoned) or any(item.over for item in self._wanted.values())

    def confirmed_since(self, training: str, since: float, now: float) -> bool:
        """Whether a listing requested after `since` showed that this driver owns the training."""
        return self._listing is not None and self._listed >= since and self.generation(training, now) is not None

    # Requests and answers.

    def next_request(self, now: float, *, confirm: float | None = None) -> OwnerRequest | None:
        """Return the next request, if one is due.

        Parameters
        ----------
        now
            Seconds, on a clock that is never stepped.
        confirm
            List again unless the last listing was requested after this time.
        """
        if not (self._wanted or self._abandoned):
            return None
        if self._listing is None or (confirm is not None and self._listed < confirm):
            return ListOwners()
        begun = [item.begun for item in self._wanted.values() if item.claimed is not None]
        if (
            not begun or now - min(begun) < SETTLE * self._lease / 4
        ):  # there is time to confirm several with one listing
            if (renewal := self._renewal(now)) is not None:
                return renewal
            for name, item in self._wanted.items():
                if (request := self._step(name, item, now)) is not None:
                    return request
        if self._unsure or any(item.claimed is not None for item in self._wanted.values()):
            return ListOwners()
        if (release := self._release_of_abandoned()) is not None:
            return release
        waits = any(item.owned is None for item in self._wanted.values())
        return ListOwners() if now - self._listed >= self._lease * (WATCH if waits else RENEW) else None

    def on_listing(self, names: Iterable[str], asked: float, now: float) -> None:
        """Take in a listing that was requested at `asked` and has arrived now."""
        listing = self._listing = OwnersListing.parse(names)
        self._listed, self._unsure = asked, False
        current: dict[object, object] = {("driver", name): number for name, number in listing.beats.items()}
        current |= {("claim", name): claim.generation for name, claim in listing.claims.items()}
        for claim in listing.claims.values():  # of drivers without a heartbeat, too
            current = {("driver", driver): None for driver in claim.drivers} | current
        self._seen = {
            key: self._seen[key] if key in self._seen and self._seen[key][0] == value else (value, now)
            for key, value in current.items()
        }
        self._number = listing.beats.get(self._driver)
        if self._sent is not None and self._number == self._sent[0]:
            self._renewed = self._sent[1]
        self._sent = None
        for name, item in list(self._wanted.items()):
            self._look(name, item, listing.claims.get(name), asked, now)

    def on_answer(self, request: MakeEntry | RenameEntry, outcome: RequestOutcome, asked: float) -> None:
        """Take in the answer to a request of `asked`."""
        done = outcome is RequestOutcome.DONE
        if outcome is not RequestOutcome.UNKNOWN:
            self._abandoned -= {name for name in self._abandoned if request.name == self._release_name(name)}
        if self._sent is not None and request in self._renewals(self._sent[0]):
            if done:
                self._number, self._renewed, self._sent = self._sent[0], asked, None
            else:
                self._unsure = True
            return
        for name, item in list(self._wanted.items()):
            if item.claimed is not None and request.name == claim_name(name, item.claimed):
                if not done:  # it is somebody's, or nobody's: the listing shows it
                    item.claimed, self._unsure = None, True
            elif item.claimed is not None and request.name == self._own_name(name, item.claimed):
                item.named = True
                self._unsure |= not done
            elif (
                item.over
                and outcome is not RequestOutcome.UNKNOWN
                and request.name == claim_name(name, item.owned or 0, "released")
            ):
                del self._wanted[name]

    def _holds(self, now: float) -> bool:
        return self._renewed is not None and now - self._renewed < HOLD * self._lease

    def _release_of_abandoned(self) -> MakeEntry | None:
        """Return the request that releases a claim of an earlier process; forget trainings that have none."""
        assert self._listing is not None
        claims = self._listing.claims
        self._abandoned = {
            name
            for name in self._abandoned
            if name in claims and not claims[name].released and claims[name].drivers == {self._driver}
        }
        return MakeEntry(self._release_name(min(self._abandoned))) if self._abandoned else None

    def _release_name(self, training: str) -> str:
        claim = None if self._listing is None else self._listing.claims.get(training)
        return claim_name(training, 0 if claim is None else claim.generation, "released")

    def _own_name(self, training: str, generation: int) -> str:
        return claim_name(training, generation, f"by-{self._driver}")

    def _renewals(self, number: int) -> tuple[OwnerRequest, OwnerRequest]:
        """Return the requests that make a heartbeat: the driver's first one ever, and all later ones."""
        name = beat_name(self._driver, number)
        return MakeEntry(name), RenameEntry(beat_name(self._driver, number - 1), name)

    def _renewal(self, now: float) -> OwnerRequest | None:
        if self._renewed is not None and now - self._renewed < RENEW * self._lease:
            return None
        if self._unsure:
            return None  # the number of the last one may have changed
        number = (self._number or 0) + 1
        self._sent = (number, now)
        return self._renewals(number)[0 if self._number is None else 1]

    def _step(self, name: str, item: _Wanted, now: float) -> OwnerRequest | None:
        """Return the next request for one training."""
        assert self._listing is not None
        if item.owned is not None:
            return MakeEntry(claim_name(name, item.owned, "released")) if item.over else None
        if item.claimed is not None:
            return None if item.named else MakeEntry(self._own_name(name, item.claimed))
        if self._unsure or not self._holds(now):
            return None
        claim = self._listing.claims.get(name)
        item.reason = self._obstacle(name, claim)
        if item.reason:
            return None
        item.claimed, item.begun, item.named = (claim.generation if claim else 0) + 1, now, False
        item.reason = "it is being claimed"
        return MakeEntry(claim_name(name, item.claimed))

    def _obstacle(self, name: str, claim: OwnerClaim | None) -> str:
        """Return why the next generation of a training cannot be claimed; empty if it can."""
        if claim is None or claim.released or self._driver in claim.drivers:
            return ""
        if not claim.drivers:
            unchanged = self._unchanged("claim", name)
            return "" if unchanged >= SETTLE * self._lease else "another site is about to claim it"
        waits = min(self._unchanged("driver", driver) for driver in claim.drivers)
        if waits >= self._lease:
            return ""
        return f"another site owns it (generation {claim.generation}, driver {min(claim.drivers)})"

    def _unchanged(self, kind: str, name: str) -> float:
        """Return for how long the listings have shown a claim, or a driver's heartbeat, unchanged."""
        return self._listed - self._seen[kind, name][1]

    def _look(self, name: str, item: _Wanted, claim: OwnerClaim | None, asked: float, now: float) -> None:
        """Confirm a claim, or find out that it was lost; a listing may be older than the claim."""
        shown = 0 if claim is None else claim.generation
        if item.owned is not None:
            if item.over and (shown > item.owned or (claim is not None and shown == item.owned and claim.released)):
                del self._wanted[name]
            elif shown > item.owned:
                item.lost = item.lost or f"another site has taken it over (generation {shown})"
        elif item.claimed is not None:
            confirmed = claim is not None and shown == item.claimed and claim.drivers == {self._driver}
            if confirmed and asked >= item.begun and now - item.begun < SETTLE * self._lease:
                item.owned, item.claimed, item.reason = item.claimed, None, ""
            else:
                item.claimed = None
