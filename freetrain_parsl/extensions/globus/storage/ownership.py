"""Ownership of training jobs: at most one driver trains a training job at a time, decided on the home collection. Pure.

A driver claims the next *generation* of a training job by creating a directory, which fails where it exists, puts its
name to the claim, and lists to confirm that no later generation exists. It then owns the training job for as long as it
renews its heartbeat. All of this is in one directory (`storage.names` of this extension), so that a driver needs one
renaming and one listing per renewal, whatever the number of its training jobs.

Clocks of different sites are never compared. A driver stops its training jobs `HOLD` leases after it *sent* its last
renewal that succeeded. Another driver takes over after it has *seen* the same heartbeat for a whole lease. An answer
that was lost looks like the success of another driver: a claim without a name belongs to nobody, and may be followed
by the next one once its driver can no longer confirm it (`SETTLE` leases).

A driver never returns to a claim whose lease it has lost, or that an earlier process made: it claims the next one.

A listing may be stale or incomplete. What recent ones have shown counts (`OwnersMemory`), a claim that is not shown
yet is looked for until it is too late, and a refusal that no listing explains is followed by a pause that grows.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from freetrain_parsl.extensions.globus.storage.names import (
    LAST_NUMBER,
    OwnersListing,
    OwnersMemory,
    beat_name,
    claim_name,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from freetrain_parsl.extensions.globus.storage.names import OwnerClaim

__all__ = [
    "HOLD",
    "SETTLE",
    "WATCH",
    "ListOwners",
    "MakeEntry",
    "OwnerRequest",
    "Ownership",
    "RenameEntry",
    "RequestOutcome",
]

HOLD = 0.6
"""Share of a lease for which a driver may train after its last renewal."""
SETTLE = 0.2
"""Share of a lease in which a claim must be confirmed."""
RENEW = 0.2
"""Share of a lease between renewals."""
WATCH = 0.1
"""Share of a lease between listings while waiting for another driver."""
_AGAIN = 0.01
"""Share of a lease before something is asked again that a listing has not explained; twice as long each time."""


class RequestOutcome(Enum):
    """What happened to a request that changes the directory."""

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
    """A training job that this driver owns or wants.

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
        The generation is no longer used, because the training job has ended, or the driver stops.
    lost
        Why it no longer owns `owned`; it may still be training.
    reason
        Why it does not own the training job.
    after, until
        The next claim is of a later generation than this, if it is made before some time: there may be no such one.
    refused, refusals
        The generation whose claim was refused and that no listing has shown, and how often in a row.
    not_before
        When it may be claimed again.
    shown
        When the last listing was requested that showed its ownership.
    """

    claimed: int | None = None
    begun: float = 0.0
    named: bool = False
    owned: int | None = None
    over: bool = False
    lost: str = ""
    reason: str = "home has not said yet who owns it"
    after: int = 0
    until: float = 0.0
    refused: int = 0
    refusals: int = 0
    not_before: float = 0.0
    shown: float = -1.0


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
        self._changed = False  # a request was answered after the listing was
        self._unsure = False  # it must be listed again, to know what a request has done
        self._number: int | None = None  # of its last heartbeat, as far as is known
        self._made = 0  # of its last heartbeat whose success is known
        self._renewed: float | None = None  # when the last successful renewal was requested
        self._sent: tuple[int, float] | None = None  # a renewal whose success is not known: its number and time
        self._memory = OwnersMemory(lease)
        self._twins: dict[str, str] = {}  # lower case -> training that was listed
        self._beat_refused = 0  # renewals that no listing has explained, in a row
        self._list_at = 0.0  # not to be listed again before
        self._fruitless = 0  # listings that have not shown a claim, in a row

    # What the driver asks for.

    def want(self, training: str) -> None:
        """Claim a training job as soon as no other driver owns it."""
        self._abandoned.discard(training)
        if training not in self._wanted:
            self._wanted[training] = _Wanted()
            self._unsure = True  # what listings have shown of other training jobs is not kept

    def abandon(self, training: str) -> None:
        """Release a training job that is not wanted, if an earlier process with this identity has left a claim on it.

        Otherwise the heartbeats of this one would keep that claim alive.
        """
        if training not in self._wanted:
            self._abandoned.add(training)

    def wants(self, training: str) -> bool:
        """Return whether a training job is wanted or owned, or its release is not confirmed yet."""
        return training in self._wanted

    def release(self, training: str) -> None:
        """Give up a training job that no longer runs, so that others need not wait for the lease."""
        if (item := self._wanted.get(training)) is None:
            return
        if item.owned is None or item.lost:
            del self._wanted[training]
        item.over = True

    def stopped(self, training: str) -> None:
        """Note that a training job whose ownership was lost no longer runs; it is wanted again."""
        if training in self._wanted:
            before = self._wanted[training]
            self._wanted[training] = _Wanted(reason=before.lost, after=before.after, until=before.until)

    def follow(self, training: str, generation: int, now: float) -> None:
        """Give up a claim, as there are signs of a later generation; the next claim follows that."""
        if training in self._wanted:
            self._wanted[training] = _Wanted(after=generation, until=now + self._lease)

    # What it is told.

    def generation(self, training: str, now: float) -> int | None:
        """Return the generation in which this driver may train now; ``None`` if it may not."""
        item = self._wanted.get(training)
        if item is None or item.owned is None or item.lost or item.over or not self._holds(now):
            return None
        return item.owned

    def lost(self, now: float) -> dict[str, str]:
        """Return the training jobs that this driver must stop, with the reason."""
        if self._renewed is not None and not self._holds(now):
            for item in self._wanted.values():
                if item.owned is not None and not item.lost and not item.over:
                    item.lost = f"home could not be reached for {now - self._renewed:.0f} s; another site may own it"
        return {name: item.lost for name, item in self._wanted.items() if item.lost and item.owned is not None}

    def reason(self, training: str) -> str:
        """Return why this driver does not own a training job."""
        item = self._wanted.get(training)
        return "" if item is None else item.lost or item.reason

    @property
    def releasing(self) -> bool:
        """Whether releases are still to be sent."""
        return bool(self._abandoned) or any(item.over for item in self._wanted.values())

    def confirmed_since(self, training: str, since: float, now: float) -> bool:
        """Whether a listing requested after `since` showed that this driver owns the training job."""
        item = self._wanted.get(training)
        return item is not None and item.shown >= since and self.generation(training, now) is not None

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
        must_list = self._unsure or (bool(begun) and (self._changed or now >= self._list_at))
        # There is time to confirm several with one listing.
        if not must_list or not begun or now - min(begun) < SETTLE * self._lease / 4:
            if (renewal := self._renewal(now)) is not None:
                return renewal
            for name, item in self._wanted.items():
                if (request := self._step(name, item, now)) is not None:
                    return request
        if must_list:
            return ListOwners()
        if (release := self._release_of_abandoned()) is not None:
            return release
        waits = any(item.owned is None for item in self._wanted.values())
        return ListOwners() if now - self._listed >= self._lease * (WATCH if waits else RENEW) else None

    def on_listing(self, names: Iterable[str], asked: float, now: float) -> None:
        """Take in a listing that was requested at `asked` and has arrived now."""
        shown = OwnersListing.parse(names)
        known = self._listing = self._memory.take_in(shown, now, {*self._wanted, *self._abandoned}, self._driver)
        self._twins = {name.lower(): name for name in shown.claims}
        self._listed, self._unsure, self._changed = asked, False, False
        if self._sent is not None and shown.beats.get(self._driver) == self._sent[0]:
            (self._made, self._renewed), self._beat_refused = self._sent, 0
        self._sent = None
        self._number = max(self._made, known.beats.get(self._driver, 0)) or None
        for name, item in list(self._wanted.items()):
            self._look(name, item, shown.claims.get(name), known.claims.get(name), asked, now)
        missing = any(item.claimed is not None for item in self._wanted.values())
        self._fruitless = self._fruitless + 1 if missing else 0
        self._list_at = now + self._later(self._fruitless)

    def on_answer(self, request: MakeEntry | RenameEntry, outcome: RequestOutcome, asked: float) -> None:
        """Take in the answer to a request of `asked`."""
        done = outcome is RequestOutcome.DONE
        if outcome is not RequestOutcome.UNKNOWN:
            self._abandoned -= {name for name in self._abandoned if request.name == self._release_name(name)}
        self._changed = True
        if self._sent is not None and request in self._renewals(self._sent[0]):
            if done:
                self._number = self._made = self._sent[0]
                self._renewed, self._sent, self._beat_refused = asked, None, 0
            else:
                self._unsure = True
            if outcome is RequestOutcome.REFUSED:
                self._beat_refused += 1
            return
        for name, item in list(self._wanted.items()):
            if item.claimed is not None and request.name == claim_name(name, item.claimed):
                if not done:  # it is somebody's, or nobody's: the listing shows it
                    item.refused, item.claimed, self._unsure = item.claimed, None, True
                    item.refusals += 1
                    item.not_before = asked + self._later(item.refusals)
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
        """Return the request that releases a claim of an earlier process; forget training jobs that have none."""
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
        if self._beat_refused and now < self._listed + self._later(self._beat_refused):
            return None
        number = (self._number or 0) + 1
        if self._beat_refused > 1:  # the number is another one than listings show: a new entry does not need it
            number += self._beat_refused
        if number > LAST_NUMBER:
            for item in self._wanted.values():
                item.reason = f"home lists a heartbeat after which there is none; remove driver-{self._driver}.* there"
            return None
        self._sent = (number, now)
        return self._renewals(number)[0 if self._number is None or self._beat_refused > 1 else 1]

    def _later(self, times: int) -> float:
        """Return the seconds until something is asked again that has failed some times in a row."""
        return self._lease * min(_AGAIN * 2.0 ** min(times, 10), WATCH)

    def _step(self, name: str, item: _Wanted, now: float) -> OwnerRequest | None:
        """Return the next request for one training job."""
        assert self._listing is not None
        if item.owned is not None:
            return MakeEntry(claim_name(name, item.owned, "released")) if item.over else None
        if item.claimed is not None:
            return None if item.named else MakeEntry(self._own_name(name, item.claimed))
        if self._unsure or not self._holds(now) or now < item.not_before:
            return None
        claim = self._listing.claims.get(name)
        newest = max(claim.generation if claim else 0, item.after if now < item.until else 0)
        item.reason = self._obstacle(name, claim, newest)
        if item.reason:
            return None
        item.claimed, item.begun, item.named = newest + 1, now, False
        item.reason = "it is being claimed"
        return MakeEntry(claim_name(name, item.claimed))

    def _obstacle(self, name: str, claim: OwnerClaim | None, newest: int) -> str:
        """Return why the next generation of a training job cannot be claimed; empty if it can."""
        if newest >= LAST_NUMBER:
            return f"home lists generation {newest}, after which there is none; remove {claim_name(name, newest)} there"
        if claim is None or claim.released or self._driver == min(claim.drivers, default=""):
            return ""
        if not claim.drivers:
            unchanged = self._unchanged("claim", name)
            return "" if unchanged >= SETTLE * self._lease else "another site is about to claim it"
        others = claim.drivers - {self._driver}
        waits = min(self._unchanged("driver", driver) for driver in others)
        if waits >= self._lease:
            return ""
        return f"another site owns it (generation {claim.generation}, driver {min(others)})"

    def _unchanged(self, kind: str, name: str) -> float:
        """Return for how long the listings have shown a claim, or a driver's heartbeat, unchanged."""
        return self._listed - self._memory.unchanged_since(kind, name)

    def _look(
        self, name: str, item: _Wanted, shown: OwnerClaim | None, known: OwnerClaim | None, asked: float, now: float
    ) -> None:
        """Confirm a claim, or find out that it was lost; a listing may be older than the claim.

        `shown` is the newest claim in this listing, requested at `asked`, which may leave something out; `known` is the
        newest one of the listings of the last lease.
        """
        newest = 0 if known is None else known.generation
        others = set() if known is None else known.drivers - {self._driver}
        mine = shown is not None and self._driver in shown.drivers and not others
        if item.owned is not None:
            if item.over and (newest > item.owned or (known is not None and newest == item.owned and known.released)):
                del self._wanted[name]
            elif newest > item.owned:
                item.lost = item.lost or f"another site has taken it over (generation {newest})"
            elif newest == item.owned and others:  # home has let two drivers make the same directory
                item.lost = item.lost or f"another site has claimed the same generation ({newest})"
            elif mine and shown is not None and shown.generation == item.owned:
                item.shown = asked
            return
        if newest >= item.refused:  # this explains the refusal
            item.refused, item.refusals, item.not_before = 0, 0, 0.0
        elif (twin := self._twins.get(name.lower(), name)) != name:
            item.reason = f"home does not tell upper from lower case, and has {twin}; rename one of both training jobs"
        if item.claimed is None:
            return
        late = now - item.begun >= SETTLE * self._lease
        if late or newest > item.claimed or (newest == item.claimed and others):
            item.claimed = None
        elif mine and shown is not None and shown.generation == item.claimed and asked >= item.begun:
            item.owned, item.claimed, item.reason, item.shown = item.claimed, None, "", asked
