"""Which site is asked what, and which job is assigned where. Pure: `run` owns the calls, the clock and the files.

At every look, all sites are asked for their state and for what they offer. Once each has answered, or is silent, the
planner over sites decides, and each site whose training jobs have changed gets an *order*: the numbered list of all
training jobs that are assigned to it. An order is repeated in every call until the site has taken it in.

A training job is added to an order only when no other site may still have it: each site that had it has taken in an
order without it, or is silent and its lease has ended. From then on, the home on Globus guarantees that one site at a
time trains it (`freetrain_parsl.extensions.globus.storage.ownership`): the new site waits until the old one has
released it.

Times are seconds since the epoch, so that leases are known after a restart on another machine. A clock that is stepped
makes a decision early or late, not wrong: leases are enforced by the home.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from freetrain_parsl.errors import InvalidInput
from freetrain_parsl.extensions.globus.sites.planning.model import (
    HOME,
    SitesQuestion,
    SiteTraining,
    SiteView,
    rates_between,
)
from freetrain_parsl.extensions.globus.sites.state import (
    Ask,
    CallPace,
    SiteCall,
    SiteFacts,
    SiteState,
    TrainingAtSite,
    TrainingPlace,
)
from freetrain_parsl.extensions.globus.storage.carrier import backoff

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from freetrain_parsl.extensions.globus.sites.planning.model import SiteChoice, SiteRates, SitesPlanner
    from freetrain_parsl.extensions.globus.sites.state import SiteAnswer
    from freetrain_parsl.planning.model import PlannedJob

__all__ = ["Coordinator"]

_FORMAT = 2
_KEPT_OF_SITES = ("order", "wanted", "confirmed", "seen", "starts")
_KEPT_OF_TRAININGS = ("site", "reason", "size", "samples_left", "moves", "arrives", "starting", "attempt", "ended_at")
_FIRST_RETRY = 5.0  # seconds until a silent site is asked again; doubled each time, up to the status period
_STOP_ATTEMPTS = 3
_LONGEST_START = 900.0  # seconds; what takes longer waits for nodes
_STARTS_AHEAD = 4.0  # a decision looks this many starts ahead, if these are longer than the time to the next look
_EARLY = 0.25  # of a look: the least time between two decisions, if something has changed


class Coordinator:
    """The coordinator of a campaign at several sites.

    Parameters
    ----------
    trainers
        All training jobs.
    rates
        Site -> its stated rates.
    pace
        How often sites are asked.
    planner
        Question -> plan.
    """

    def __init__(
        self,
        trainers: Sequence[PlannedJob],
        rates: Mapping[str, SiteRates],
        pace: CallPace,
        planner: SitesPlanner,
    ) -> None:
        self.sites = {name: SiteState(name, stated) for name, stated in rates.items()}
        self.trainings = {trainer.name: TrainingPlace(trainer) for trainer in trainers}
        self.stopping = False
        self._pace = pace
        self._planner = planner
        self._looked = 0.0
        self._next_look = 0.0
        self._deciding = False
        self._now = -math.inf

    # What is to be done.

    @property
    def is_done(self) -> bool:
        """Whether all training jobs have ended, or all sites that answer have stopped."""
        if self.stopping:
            return all(site.stopped for site in self.sites.values())
        return not self._open() and not any(self._keeps_withdrawn(site) for site in self.sites.values())

    def _keeps_withdrawn(self, site: SiteState) -> bool:
        """Whether a site may still train what was cancelled, and could be told so."""
        return site.facts is not None and site.confirmed < site.order and site.failures < _STOP_ATTEMPTS

    def due(self, now: float) -> list[SiteCall]:
        """Return the calls to make now; one of `on_prepared`, `on_answer`, `on_stopped`, `on_silence` ends each."""
        self._follow_clock(now)
        if not self.stopping:
            self._begin_look(now)
        calls = [call for site in self.sites.values() if (call := self._call(site, now)) is not None]
        for call in calls:
            self.sites[call.site].asking = call.ask
        return calls

    def _follow_clock(self, now: float) -> None:
        """Shift all times if the clock was set back: otherwise nothing would be due for as long."""
        if (step := self._now - now) > 0:
            self._looked, self._next_look = self._looked - step, self._next_look - step
            for site in self.sites.values():
                site.next_call, site.next_stop = site.next_call - step, site.next_stop - step
                site.seen = None if site.seen is None else site.seen - step
            for training in self.trainings.values():
                training.arrives -= step
                training.starting = None
        self._now = now

    def _begin_look(self, now: float) -> None:
        ending = [
            site.lease_until() for site in self.sites.values() if site.silent and site.facts and self._at(site.name)
        ]
        if self._deciding:
            return
        if now >= self._next_look or any(self._looked < end <= now for end in ending):
            self._looked, self._next_look, self._deciding = now, now + self._pace.look, True
            for site in self.sites.values():
                site.owes_look = True

    def _call(self, site: SiteState, now: float) -> SiteCall | None:
        if site.asking is not None:
            return None
        if self.stopping:
            return None if site.stopped or now < site.next_stop else SiteCall(site.name, Ask.STOP)
        if site.facts is None:
            return SiteCall(site.name, Ask.PREPARE) if now >= site.next_call else None
        unconfirmed = site.confirmed < site.order
        if site.owes_look and (not site.silent or now >= site.next_call):
            return SiteCall(site.name, Ask.LOOK, site.order, site.wanted, start=True)
        if now >= site.next_call or (unconfirmed and not site.silent):
            return SiteCall(site.name, Ask.STATUS, site.order, site.wanted, start=unconfirmed)
        return None

    # What sites say.

    def on_prepared(self, name: str, facts: SiteFacts, now: float) -> None:
        """Take in that a site has unpacked the campaign.

        Raises
        ------
        InvalidInput
            Its home is not that of the others.
        """
        site = self.sites[name]
        for other in self.sites.values():
            if other.facts is not None and other.facts != facts:
                raise InvalidInput(
                    f"site {name}: its home is {facts.home} with a lease of {facts.lease:.0f} s, that of {other.name} "
                    f"is {other.facts.home} with {other.facts.lease:.0f} s; all sites need the same"
                )
        site.facts, site.seen, site.asking, site.owes_look = facts, now, None, True
        self._heard(site)
        site.next_call = now

    def on_answer(self, name: str, answer: SiteAnswer, now: float) -> None:
        """Take in the answer to a look or a status."""
        site = self.sites[name]
        if site.asking is Ask.LOOK:
            site.owes_look = False
        had, was_silent = site.held, bool(site.silent)
        site.asking, site.seen, site.answer, site.facts = None, now, answer, answer.facts
        site.trainings = answer.trainings
        self._heard(site)
        site.next_call = now + self._pace.status
        if answer.planned is not None:
            site.offers = answer.planned
            site.slots_per_node, site.units_per_node = answer.slots_per_node, answer.units_per_node
        elif answer.plan_error:
            site.offers = ()
        if answer.order > site.order:
            # Of a later coordinator, if this run directory is an older copy: the site would ignore our order.
            site.order, site.possible = answer.order + 1, site.possible | answer.trainings.keys()
        elif answer.order == site.order:
            site.confirmed, site.possible = site.order, set(site.wanted)
        if self._driver_failed(site):
            site.offers = ()  # its training jobs go elsewhere at the next look
        for at_site in answer.trainings.values():
            self._note(name, at_site, answer)
            self._measure_start(site, at_site, now)
        if not site.held + site.idle:  # what was assigned to idle nodes waits for others
            for training in self._open().values():
                training.starting = None if training.site == name else training.starting
        if was_silent or (had and not site.held):
            self._next_look = min(self._next_look, max(now, self._looked + _EARLY * self._pace.look))
        self._settle(now)

    def _driver_failed(self, site: SiteState) -> bool:
        """Whether a site has training jobs that its driver does not train, as it ended with an error.

        Before the site has confirmed their order, no driver was started for them.
        """
        failed = site.answer is not None and site.answer.state == "failed" and site.confirmed == site.order
        return failed and any(map(self._open().get, site.wanted))

    def on_stopped(self, name: str, *, over: bool, now: float) -> None:
        """Take in the answer to a stop: whether its driver has ended."""
        site = self.sites[name]
        site.asking, site.stopped, site.next_stop = None, over, now + _FIRST_RETRY

    def on_silence(self, name: str, reason: str, now: float) -> None:
        """Take in that a site has not answered."""
        site = self.sites[name]
        stopping, site.asking = site.asking is Ask.STOP, None
        site.silent, site.failures, site.owes_look = reason, site.failures + 1, False
        if stopping:
            site.stopped, site.next_stop = site.failures >= _STOP_ATTEMPTS, now + _FIRST_RETRY
        site.next_call = now + backoff(site.failures - 1, _FIRST_RETRY, self._pace.status)
        self._settle(now)

    def _heard(self, site: SiteState) -> None:
        site.silent, site.failures = "", 0

    def _note(self, name: str, at_site: TrainingAtSite, answer: SiteAnswer) -> None:
        training = self.trainings.get(at_site.name)
        if training is None or training.ended is not None:
            return
        earlier = at_site.state != "finished" and answer.retried.get(at_site.name, 0) < training.attempt
        if at_site.ended and not earlier:
            training.ended, training.ended_at = at_site, name
        if training.site == name:
            training.size = answer.sizes.get(at_site.name, training.size)
            training.samples_left = answer.samples_left.get(at_site.name, training.samples_left)

    def _measure_start(self, site: SiteState, at_site: TrainingAtSite, now: float) -> None:
        training = self.trainings.get(at_site.name)
        if training is None or training.site != site.name or training.starting is None or not at_site.nodes:
            return
        if (took := now - training.starting) < _LONGEST_START:
            site.measured(took)
        training.starting, training.arrives = None, min(training.arrives, now)

    def cancel(self, training: str) -> None:
        """Cancel a training job at the user's request: it is in no order from now on."""
        item = self.trainings[training]
        if item.ended is not None:
            return
        item.ended = TrainingAtSite(training, "cancelled", None, ())
        self._withdraw(training)

    def retry(self, training: str) -> None:
        """Train a failed or cancelled training job again at the user's request, from its last checkpoint."""
        item = self.trainings[training]
        self._withdraw(training)
        item.ended, item.ended_at, item.site, item.attempt = None, "", None, item.attempt + 1

    @property
    def attempts(self) -> dict[str, int]:
        """Training -> number of its last retry, of those that were retried."""
        return {name: item.attempt for name, item in self.trainings.items() if item.attempt}

    def _withdraw(self, training: str) -> None:
        for site in self.sites.values():
            if training in site.wanted:
                site.order += 1
                site.wanted = tuple(name for name in site.wanted if name != training)

    def stop(self) -> None:
        """Stop all sites: training jobs save their work, drivers end."""
        self.stopping = True
        for site in self.sites.values():
            site.stopped = site.facts is None

    # Decisions.

    def _settle(self, now: float) -> None:
        """Decide, if all sites have answered the look or are silent."""
        waited = [site for site in self.sites.values() if site.owes_look and not site.silent]
        if self._deciding and not waited and not self.stopping:
            self._deciding = False
            self._decide(now)
        self._order(now)

    def _decide(self, now: float) -> None:
        open_trainings = self._open()
        # What is moved must have time to gain what it costs.
        starts = [site.start for site in self.sites.values() if site.answers]
        question = SitesQuestion(
            now,
            max(self._pace.look, _STARTS_AHEAD * max(starts, default=0.0)),
            tuple(self._view(site) for site in self.sites.values()),
            tuple(self._question(training) for training in open_trainings.values()),
            rates_between({name: site.rates() for name, site in self.sites.items()}),
        )
        choices = self._planner(question).choices
        for choice in choices:
            if choice.site is not None:
                self._place(open_trainings[choice.training], choice)
        for choice in choices:
            if choice.site is None and (queue := self._shortest_queue()) is not None:
                queued = replace(choice, site=queue, reason=f"{choice.reason}; queued at {queue}")
                self._place(open_trainings[choice.training], queued)
            elif choice.site is None:
                open_trainings[choice.training].reason = choice.reason

    def _view(self, site: SiteState) -> SiteView:
        held = () if site.answer is None else site.answer.held
        offers = (*held, *site.offers)
        return SiteView(site.name, offers, site.answers, site.start, site.slots_per_node, site.units_per_node)

    def _question(self, training: TrainingPlace) -> SiteTraining:
        trainer = training.trainer
        if training.samples_left is not None:
            trainer = replace(trainer, work_left=training.samples_left)
        if training.site is None:
            return SiteTraining(trainer, training.size, frozenset({HOME}) if training.size else frozenset())
        site = self.sites[training.site]
        at_site = site.trainings.get(trainer.name)
        places = {HOME, *((site.name,) if site.answers else ())} if training.size else set()
        return SiteTraining(
            trainer,
            training.size,
            frozenset(places),
            site.name,
            0 if at_site is None else len(at_site.nodes),
            site.lease_until(),
            training.arrives,
        )

    def _place(self, training: TrainingPlace, choice: SiteChoice) -> None:
        training.reason = choice.reason
        if choice.site is not None and choice.site != training.site:
            state_there = self._now + choice.transfer_seconds
            training.moves += training.site is not None
            training.site, training.arrives = choice.site, state_there + self.sites[choice.site].start
            training.starting = state_there if choice.nodes else None

    def _shortest_queue(self) -> str | None:
        """Return the answering site with the most nodes per training job; ``None`` if none answers.

        A training job that waits at no site gets no nodes before the next look. There it does, and its state is fetched
        in the meantime.
        """
        trainings = Counter(training.site for training in self._open().values())
        nodes = {site.name: site.held + site.idle for site in self.sites.values()}
        answering = [site.name for site in self.sites.values() if site.answers]
        return max(answering, key=lambda name: (nodes[name] / (1 + trainings[name]), -trainings[name]), default=None)

    def _order(self, now: float) -> None:
        """Make a new order for each site whose training jobs have changed."""
        if self.stopping:
            return
        for site in self.sites.values():
            if site.facts is None:
                continue
            wanted = tuple(
                name
                for name, training in self._open().items()
                if training.site == site.name and (name in site.wanted or not self._others_may_have(name, site, now))
            )
            if wanted != tuple(name for name in site.wanted if self.trainings[name].ended is None):
                site.order, site.wanted = site.order + 1, wanted
                site.possible |= set(wanted)

    def _others_may_have(self, training: str, site: SiteState, now: float) -> bool:
        return any(
            training in other.possible and now < other.lease_until()
            for other in self.sites.values()
            if other is not site
        )

    def _open(self) -> dict[str, TrainingPlace]:
        return {name: training for name, training in self.trainings.items() if training.ended is None}

    def _at(self, site: str) -> bool:
        return any(training.site == site for training in self._open().values())

    # State that survives the process.

    def as_json(self) -> dict[str, Any]:
        """Return what a later coordinator must know."""
        return {
            "format": _FORMAT,
            "sites": {
                site.name: {
                    **{key: getattr(site, key) for key in _KEPT_OF_SITES},
                    "possible": sorted(site.possible),
                    "facts": None if site.facts is None else vars(site.facts),
                }
                for site in self.sites.values()
            },
            "trainings": {
                name: {
                    **{key: getattr(item, key) for key in _KEPT_OF_TRAININGS},
                    "ended": None if item.ended is None else item.ended.state,
                }
                for name, item in self.trainings.items()
            },
        }

    def restore(self, document: Mapping[str, Any], ended: Mapping[str, TrainingAtSite]) -> None:
        """Take over what `as_json` of an earlier coordinator returned, and the jobs that have ended, with results.

        Raises
        ------
        ValueError, LookupError, TypeError
            It is damaged, or of another version.
        """
        if document["format"] != _FORMAT:
            raise ValueError(f"it has format {document['format']!r}, not {_FORMAT}")
        for name, item in document["sites"].items():
            site = self.sites[name]
            for key in _KEPT_OF_SITES:
                setattr(site, key, item[key])
            site.wanted, site.starts, site.possible = tuple(site.wanted), tuple(site.starts), set(item["possible"])
            site.facts = None if item["facts"] is None else SiteFacts(**item["facts"])
        for name, item in document["trainings"].items():
            if item["site"] is not None and item["site"] not in self.sites:
                raise ValueError(f"unknown site {item['site']!r}")
            for key in _KEPT_OF_TRAININGS:
                setattr(self.trainings[name], key, item[key])
        for name, at_site in ended.items():
            self.trainings[name].ended = at_site
            if at_site.state == "cancelled":  # perhaps while there was no coordinator
                self._withdraw(name)

    def lines(self, now: float) -> Iterator[str]:
        """Describe the sites, one line each."""
        for site in self.sites.values():
            if site.silent:
                left = site.lease_until() - now
                kept = f"; it keeps its training jobs for {left:.0f} s" if left > 0 and self._at(site.name) else ""
                yield f"site {site.name} does not answer: {site.silent}{kept}"
            elif site.answer is None:
                yield f"site {site.name}: {'ready' if site.facts else 'not ready yet'}"
            else:
                error = f"; no plan: {site.answer.plan_error}" if site.answer.plan_error else ""
                failed = f"; its driver failed: {site.answer.message}" if self._driver_failed(site) else ""
                yield f"site {site.name}: {site.held:g} nodes held, {site.idle:g} more available{error}{failed}"
