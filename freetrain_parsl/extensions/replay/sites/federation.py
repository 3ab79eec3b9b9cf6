"""Several sites driven by their recorded logs: each has its planner, and a planner over sites moves training jobs.

Sites are coupled at looks only: every `SitesSettings.look`, and whenever a training job is submitted. A training job
that is moved pauses, pays for a shrink to zero nodes, and is submitted at the other site when its state has arrived.
Transfers from one collection to the same site follow one another. With one site nothing differs from
`simulation.replay`.
"""

from __future__ import annotations

import math
import time as wall_clock
from bisect import insort
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from freetrain_parsl.extensions.globus.sites.planning.model import Offer, SitesQuestion, SiteTraining, SiteView
from freetrain_parsl.extensions.replay.accounts import Account
from freetrain_parsl.extensions.replay.simulation import Knowledge, Replay
from freetrain_parsl.planning import events as ev

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from freetrain_parsl.extensions.globus.sites.planning.model import SiteChoice, SitePlan, SitesPlanner, TransferRate
    from freetrain_parsl.extensions.replay.holes import Change
    from freetrain_parsl.extensions.replay.ideal import BestRates
    from freetrain_parsl.extensions.replay.simulation import Outcome, ReplaySettings
    from freetrain_parsl.extensions.replay.sites.logs import SiteLog
    from freetrain_parsl.planning.model import PlannedJob
    from freetrain_parsl.planning.policies.base import Policy

__all__ = ["FederationOutcome", "SiteMove", "Stint", "replay_sites"]

_ROUNDING = 1e-9  # of a training job's samples


@dataclass
class Stint:
    """A training job's time at one site, from `came` to `left` (infinite: it is there), seconds after the beginning.

    Its state contained `first` samples when it came. The account's times are on the clock of the site's log; `clock` is
    the beginning on it.
    """

    site: str
    first: float
    account: Account
    clock: float
    came: float
    left: float = math.inf

    @property
    def end(self) -> float:
        """Samples that its state contained when it left."""
        return self.first + self.account.samples


@dataclass(frozen=True)
class SiteMove:
    """State that was transferred to a site, `time` seconds after the beginning; `source` is its collection.

    It took `seconds` from the pause until the state had arrived; `size` is in bytes.
    """

    time: float
    training: str
    source: str
    target: str
    seconds: float
    size: float


@dataclass
class FederationOutcome:
    """The result of a replay of several sites.

    For each training job there are its times at sites, in order, and when it was submitted, seconds after the
    beginning. `plans` are the decisions over sites: (solve seconds, proven optimal).
    """

    sites: dict[str, Outcome] = field(default_factory=dict)
    stints: dict[str, list[Stint]] = field(default_factory=dict)
    moves: list[SiteMove] = field(default_factory=list)
    plans: list[tuple[float, bool]] = field(default_factory=list)
    submitted: dict[str, float] = field(default_factory=dict)
    wall_seconds: float = 0.0

    @property
    def value(self) -> float:
        """Value of the samples processed at all sites, less the cost of changes."""
        return sum(outcome.value for outcome in self.sites.values())

    def times_to_finish(self) -> list[float]:
        """Return the seconds from submission to the end of each training job that is done."""
        return [
            stints[-1].account.finished - stints[-1].clock - self.submitted[name]
            for name, stints in self.stints.items()
            if stints and stints[-1].account.finished is not None
        ]

    def audit(self) -> tuple[float, float]:
        """Return samples lost and samples processed twice: gaps and overlaps between a training job's times at sites.

        What a training job did before it was moved must be exactly what it began with at the next site, and a finished
        training job must have processed its work.
        """
        lost = twice = 0.0
        for stints in self.stints.values():
            if not stints:
                continue
            edges = [0.0, *(stint.end for stint in stints)]
            gaps = [stint.first - end for stint, end in zip(stints, edges, strict=False)]
            account = stints[-1].account
            if account.finished is not None:
                gaps.append(stints[-1].first + account.trainer.work_left - stints[-1].end)
            least = _ROUNDING * max(map(abs, edges))
            lost += sum(gap for gap in gaps if gap > least)
            twice -= sum(gap for gap in gaps if gap < -least)
        return lost, twice


def replay_sites(
    sites: Sequence[SiteLog],
    rates: BestRates,
    make_policy: Callable[[], Policy],
    settings: ReplaySettings,
    planner: SitesPlanner,
    *,
    look: float,
    transfers: Mapping[tuple[str, str], TransferRate],
    state_bytes: Mapping[str, float],
    on_progress: Callable[[float], None] | None = None,
) -> FederationOutcome:
    """Replay the logs of several sites, which have the same length, together.

    `planner` decides every `look` seconds which training job runs where; `make_policy` makes the policy that allocates
    the nodes of one site. `transfers` is (from site, to site) -> rate, `state_bytes` trainer -> size of its state.
    `on_progress` gets the share of the time that is done.
    """
    replays = {site.name: _SiteReplay(site, rates, make_policy(), settings) for site in sites}
    return _Federation(replays, rates.trainers, planner, look, transfers, state_bytes, on_progress).run()


class _SiteReplay(Replay):
    """The replay of one site, to which training jobs come and from which they go."""

    def __init__(self, site: SiteLog, rates: BestRates, policy: Policy, settings: ReplaySettings) -> None:
        super().__init__(site.log, rates, policy, settings, None)
        self.name, self.log = site.name, site.log
        self._waiting.clear()
        self._changes: Iterator[Change] = site.log.changes(forecasts=settings.knowledge is Knowledge.ESTIMATED)
        self._next_change = next(self._changes, None)
        times, counts, idle = [], [], 0
        for change in site.log.changes():
            idle += len(change.opened) - len(change.closed)
            times.append(change.time)
            counts.append(idle)
        self._times, self._counts = np.array(times), np.array(counts)

    def reach(self, until: float) -> None:
        """Process what happens before `until`; the time since the last event is not accounted for yet."""
        while self._next_change is not None and self._next_change.time < until:
            change = self._next_change
            self._advance(change.time)
            self._step(change)
            self._next_change = next(self._changes, None)
        while (time := self._next_event()) < until:
            self._pass_to(time)
            self._step()

    def idle_at(self, time: float) -> int:
        """Return the number of idle nodes after the changes at this instant."""
        index = int(np.searchsorted(self._times, time, side="right"))
        return int(self._counts[index - 1]) if index else 0

    def account_for(self, trainer: PlannedJob, submitted: float) -> Account:
        """Make the account of a trainer that comes, on the log's clock."""
        return Account(trainer, submitted, self._weight(trainer))

    def described(self, trainer: PlannedJob) -> PlannedJob:
        """Return a trainer as the planners see it."""
        return self._described(trainer)

    def admit(self, account: Account) -> None:
        """Submit a trainer at the time of its account."""
        self._accounts[account.trainer.name] = account
        insort(self._waiting, account, key=lambda one: one.submitted)

    def work_left(self, account: Account, now: float) -> float:
        """Return the samples left, with the time that is not accounted for yet."""
        return account.work_left - account.rate * max(0.0, now - self._now)

    def withdraw(self, account: Account, now: float) -> None:
        """Stop a trainer and take it out of the site."""
        name = account.trainer.name
        self._accounts.pop(name)
        if account in self._waiting:
            self._waiting.remove(account)
            return
        self._pass_to(now)
        if account.nodes:
            for node in account.nodes:
                del self._owners[node]
            cost = account.rescale(frozenset())
            self._outcome.losses.rescale += cost
            self._spend(cost)
        del self._alive[name]
        self._profiles.pop(name, None)
        actions = self._planner.advance(ev.TrainerWithheld(now, name))
        self._reassign()
        if self._site is not None:
            self._site.act(actions, now)

    def close(self) -> Outcome:
        """Replay the rest."""
        self.reach(self.log.end)
        return self._close()


@dataclass
class _Placed:
    """Where a training job is."""

    trainer: PlannedJob
    state_bytes: float
    holders: frozenset[str] = frozenset()
    arrives: float = -math.inf
    stints: list[Stint] = field(default_factory=list)

    @property
    def stint(self) -> Stint | None:
        return self.stints[-1] if self.stints and math.isinf(self.stints[-1].left) else None


class _Federation:
    def __init__(
        self,
        sites: Mapping[str, _SiteReplay],
        trainers: Sequence[PlannedJob],
        planner: SitesPlanner,
        look: float,
        transfers: Mapping[tuple[str, str], TransferRate],
        state_bytes: Mapping[str, float],
        on_progress: Callable[[float], None] | None,
    ) -> None:
        self._sites = sites
        self._planner = planner
        self._look = look
        self._transfers = transfers
        self._on_progress = on_progress
        self._placed = {one.name: _Placed(one, state_bytes.get(one.name, 0.0)) for one in trainers}
        self._link_free: dict[tuple[str, str], float] = {}
        self._outcome = FederationOutcome()

    def run(self) -> FederationOutcome:
        began = wall_clock.perf_counter()
        end = min(site.log.end - site.log.start for site in self._sites.values())
        submissions = sorted({placed.trainer.submitted for placed in self._placed.values()})
        now = submissions[0]
        while now < end:
            self._look_at(now)
            if self._on_progress is not None:
                self._on_progress(now / end)
            now = min([now + self._look, *(time for time in submissions if time > now)])
        outcome = self._outcome
        outcome.sites = {name: site.close() for name, site in self._sites.items()}
        outcome.stints = {name: placed.stints for name, placed in self._placed.items()}
        outcome.submitted = {name: placed.trainer.submitted for name, placed in self._placed.items()}
        outcome.wall_seconds = wall_clock.perf_counter() - began
        return outcome

    def _look_at(self, now: float) -> None:
        for site in self._sites.values():
            site.reach(site.log.start + now)
        trainings = tuple(
            self._seen(placed, now)
            for placed in self._placed.values()
            if placed.trainer.submitted <= now and not self._is_done(placed, now)
        )
        if not trainings:
            return
        # Nodes that close are replaced by others: the best forecast was that as many as now stay idle.
        views = tuple(
            SiteView(name, (Offer(site.idle_at(site.log.start + now)),)) for name, site in self._sites.items()
        )
        plan = self._planner(SitesQuestion(now, self._look, views, trainings, self._transfers))
        self._outcome.plans.append((plan.solve_seconds, plan.proven_optimal))
        self._apply(plan, now)

    def _seen(self, placed: _Placed, now: float) -> SiteTraining:
        stint = placed.stint
        site = self._sites[stint.site] if stint is not None else next(iter(self._sites.values()))
        trainer = site.described(placed.trainer)
        # The planner over sites compares training jobs of all sites on the federation's clock.
        trainer = replace(trainer, submitted=placed.trainer.submitted, deadline=placed.trainer.deadline)
        if stint is None:
            return SiteTraining(trainer, placed.state_bytes, placed.holders)
        if stint.account.node_seconds > 0 or stint.account.nodes:
            placed.holders = frozenset((stint.site,))
        elif placed.holders and placed.arrives <= now:
            placed.holders |= {stint.site}
        return SiteTraining(
            replace(trainer, work_left=max(0.0, site.work_left(stint.account, site.log.start + now))),
            placed.state_bytes,
            placed.holders,
            stint.site,
            len(stint.account.nodes),
            math.inf,
            placed.arrives,
        )

    def _apply(self, plan: SitePlan, now: float) -> None:
        choices = {choice.training: choice for choice in plan.choices}
        moves = []
        for name, placed in self._placed.items():  # training jobs of the same instant are submitted in their own order
            choice = choices.get(name)
            stint = placed.stint
            if choice is None or choice.site is None or (stint is not None and stint.site == choice.site):
                continue
            if stint is not None:
                site = self._sites[stint.site]
                site.withdraw(stint.account, site.log.start + now)
                stint.left = now
            moves.append((placed, choice))
        for placed, choice in moves:
            self._bring(placed, choice, now)

    def _bring(self, placed: _Placed, choice: SiteChoice, now: float) -> None:
        """Submit a training job at a site, when its state is there."""
        assert choice.site is not None
        site = self._sites[choice.site]
        arrives = now
        if choice.source is not None:
            link = choice.source, choice.site
            arrives = max(now, self._link_free.get(link, now)) + choice.transfer_seconds
            self._link_free[link] = arrives
            move = SiteMove(now, choice.training, *link, arrives - now, choice.transfer_bytes)
            self._outcome.moves.append(move)
            placed.arrives = arrives
        if placed.stints:
            last = placed.stints[-1]
            first, trainer = last.end, replace(placed.trainer, work_left=last.account.work_left)
            submitted = site.log.start + arrives
        else:
            first, trainer = 0.0, placed.trainer
            submitted = site.log.start + max(placed.trainer.submitted, now)
        account = site.account_for(trainer, submitted)
        site.admit(account)
        placed.stints.append(Stint(choice.site, first, account, site.log.start, now))

    def _is_done(self, placed: _Placed, now: float) -> bool:
        """Return whether a job has no work left; one that ends at this instant is not taken away from its site."""
        stint = placed.stint
        if stint is None:
            return False
        site, work = self._sites[stint.site], placed.trainer.work_left
        return math.isfinite(work) and site.work_left(stint.account, site.log.start + now) <= _ROUNDING * work
