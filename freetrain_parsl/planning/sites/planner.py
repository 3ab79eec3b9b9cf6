"""The planner over sites: which training runs at which site until the next look. Pure, like the planner of one site.

::

    max  sum_jsn v_jsn x_jsn    subject to    sum_sn x_jsn <= 1  for every training j,
                                              sum_jn n x_jsn <= N_s  for every site s,      x binary

N_s is the mean number of nodes that site s offers until the next look, T seconds from now. With O_j(n) the value per
second of training j on n nodes, C_j its nodes now, and all seconds cut off when the work of j ends::

    stay             v = T O(n) - [n > C] R_up O(C) - [n < C] R_down O(C)        C > 0
    stay, start      v = (T - R_start) O(n)                                      C = 0
    move             v = (T - m) O(n) - h m O(n) - R_down O(C)                   m = transfer time + R_start

h is the hysteresis: a move must gain (1 + h) times what it costs. A site's own planner decides the nodes; the counts
here are what it is expected to decide. This is a multiple-choice knapsack with a resource per site, solved exactly.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from freetrain_parsl.planning.objectives.base import OBJECTIVES, Objective
from freetrain_parsl.planning.sites.model import SiteChoice, SitePlan, SitesSettings, Verb
from freetrain_parsl.planning.solvers.multiple_choice import NOTHING, maximise_choices

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from freetrain_parsl.planning.sites.model import SitesQuestion, SiteTraining

__all__ = ["plan_sites"]

_PROVEN = 1e-9  # relative distance from the bound that counts as zero
_LEAST_MOVE = 1.0  # seconds charged for any move: equal values are no reason for one


def plan_sites(
    question: SitesQuestion, settings: SitesSettings | None = None, objective: Objective = OBJECTIVES["speedup"]
) -> SitePlan:
    """Decide which training runs where until the next look.

    - A site that does not answer keeps its trainings until their leases end. Then they may go elsewhere, from their
      newest whole checkpoint.
    - A training whose state is being transferred goes where it is transferred to.
    - A training without a checkpoint that gets no nodes is queued at the site with the most nodes per training: it
      may get some that become idle before the next look, and costs nothing to move.

    The decision is deterministic unless the time limit is reached, and does not depend on the order of arguments.

    Parameters
    ----------
    question
        The situation.
    settings
        Hysteresis and time limit; `SitesQuestion.horizon` is the time until the next look.
    objective
        O, value per second of a trainer on a number of nodes.

    Raises
    ------
    PlanningError
        The solver failed.
    """
    return _Problem(question, settings or SitesSettings(), objective).solve()


@dataclass(frozen=True)
class _Option:
    """A training at a site on a number of nodes."""

    site: str
    nodes: int
    gain: float  # value, less the cost of the change
    charged: float  # the same, with the hysteresis, compared to getting no nodes
    source: str | None = None  # of the state, if it has to be transferred
    transfer: float = 0.0  # seconds


class _Problem:
    """One decision; the parameters are those of `plan_sites`."""

    def __init__(self, question: SitesQuestion, settings: SitesSettings, objective: Objective) -> None:
        self._began = time.perf_counter()
        self._question = question
        self._settings = settings
        self._objective = objective
        self._sites = {site.name: site for site in sorted(question.sites, key=lambda site: site.name)}
        self._nodes = {name: site.mean_nodes(question.horizon) for name, site in self._sites.items()}
        self._trainings = sorted(question.trainings, key=lambda one: (one.trainer.submitted, one.name))

    def solve(self) -> SitePlan:
        free = [training for training in self._trainings if not self._is_leased(training)]
        options = [self._options(training) for training in free]
        names = list(self._sites)
        capacity = np.array([self._nodes[name] for name in names])
        solution = maximise_choices(
            [np.array([option.charged for option in row]) for row in options],
            [_demands(row, names) for row in options],
            capacity,
            incumbent=self._as_it_is(free, options),
            time_limit=self._settings.time_limit.total_seconds(),
        )
        chosen: dict[str, _Option | None] = {
            training.name: None if choice == NOTHING else row[choice]
            for training, row, choice in zip(free, options, solution.choices.tolist(), strict=True)
        }
        return SitePlan(
            self._choices(chosen),
            solution.objective,
            solution.bound,
            solution.bound - solution.objective <= _PROVEN * abs(solution.bound),
            time.perf_counter() - self._began,
        )

    # The situation of one training.

    def _is_leased(self, training: SiteTraining) -> bool:
        """Return whether a site that does not answer still owns it."""
        if training.site is None or self._sites[training.site].answers:
            return False
        return training.lease_until > self._question.now

    def _home(self, training: SiteTraining) -> str | None:
        """Return the answering site that owns it."""
        return training.site if training.site is not None and self._sites[training.site].answers else None

    def _transfer(self, training: SiteTraining, site: str) -> tuple[str | None, float]:
        """Return from where its state gets to a site fastest, and the seconds; infinity if it cannot get there."""
        home = self._home(training)
        sources = {home} if home is not None and training.nodes else training.checkpoints
        if not sources or site in sources:
            return None, 0.0
        rates = ((source, self._question.transfers.get((source, site))) for source in sorted(filter(None, sources)))
        ways = [(rate.seconds(training.state_bytes), source) for source, rate in rates if rate is not None]
        seconds, source = min(ways, default=(math.inf, None))
        return source, seconds

    # Values.

    def _options(self, training: SiteTraining) -> list[_Option]:
        home = self._home(training)
        in_transit = home is not None and training.arrives > self._question.now
        return [
            option
            for site in self._sites
            if self._nodes[site] and (site == home or not in_transit)
            for option in (self._at_home(training, site) if site == home else self._elsewhere(training, site))
        ]

    def _at_home(self, training: SiteTraining, site: str) -> list[_Option]:
        """List the numbers of nodes at the site where it is."""
        costs, horizon, held = training.trainer.costs, self._question.horizon, training.nodes
        if not held:
            pause = max(0.0, training.arrives - self._question.now) + costs.start
            return [
                _Option(site, nodes, gain, gain)
                for nodes in self._counts(training, site)
                if (gain := self._gain(training, nodes, horizon - pause)) > 0
            ]
        before = self._value_now(training)
        options = []
        for nodes in self._counts(training, site):
            change = costs.up if nodes > held else costs.down if nodes < held else 0.0
            gain = self._gain(training, nodes, horizon) - change * before
            options.append(_Option(site, nodes, gain, gain + costs.down * before))
        return options

    def _elsewhere(self, training: SiteTraining, site: str) -> list[_Option]:
        """List the numbers of nodes at another site."""
        source, transfer = self._transfer(training, site)
        pause = transfer + training.trainer.costs.start
        if not pause < self._question.horizon:
            return []
        stop = training.trainer.costs.down * self._value_now(training)
        owned = self._home(training) is not None
        extra = max(_LEAST_MOVE, self._settings.hysteresis * pause) if owned else 0.0
        options = []
        for nodes in self._counts(training, site):
            gain = self._gain(training, nodes, self._question.horizon - pause)
            charged = gain - extra * self._objective(training.trainer, nodes)
            options.append(_Option(site, nodes, gain - stop, charged, source, transfer))
        return options

    def _counts(self, training: SiteTraining, site: str) -> range:
        most = min(training.trainer.max_nodes, math.floor(self._nodes[site] + _PROVEN))
        return range(training.trainer.min_nodes, most + 1)

    def _gain(self, training: SiteTraining, nodes: int, seconds: float) -> float:
        """Return the value of training for so many seconds, or until its work is done."""
        trainer = training.trainer
        rate = trainer.rate(nodes)
        if not trainer.curve.relative and rate > 0:
            seconds = min(seconds, trainer.work_left / rate)
        return max(0.0, seconds) * self._objective(trainer, nodes)

    def _value_now(self, training: SiteTraining) -> float:
        """Return its value per second now; nothing if it does not run at an answering site."""
        if not training.nodes or self._home(training) is None:
            return 0.0
        trainer = training.trainer
        return self._objective(trainer, min(max(training.nodes, trainer.min_nodes), trainer.max_nodes))

    def _as_it_is(self, trainings: Sequence[SiteTraining], options: Sequence[Sequence[_Option]]) -> npt.NDArray[np.int64]:
        """Return the choices that keep trainings where they are, on as many nodes as now while these suffice."""
        left = dict(self._nodes)
        choices = np.full(len(trainings), NOTHING, dtype=np.int64)
        for row, (training, row_options) in enumerate(zip(trainings, options, strict=True)):
            for column, option in enumerate(row_options):
                same = option.site == training.site and option.nodes == training.nodes
                if same and option.charged > 0 and option.nodes <= left[option.site]:
                    choices[row] = column
                    left[option.site] -= option.nodes
        return choices

    # The plan.

    def _choices(self, chosen: Mapping[str, _Option | None]) -> tuple[SiteChoice, ...]:
        queues = Counter(option.site for option in chosen.values() if option is not None)
        queues.update(one.site for one in self._trainings if one.site is not None and not chosen.get(one.name))
        choices = []
        for training in self._trainings:
            if training.name not in chosen:
                choices.append(self._leased(training))
            elif (option := chosen[training.name]) is not None:
                choices.append(self._placed(training, option))
            else:
                waits = self._waiting(training, queues)
                if waits.site is not None and waits.site != training.site:
                    queues[waits.site] += 1
                choices.append(waits)
        return tuple(choices)

    def _leased(self, training: SiteTraining) -> SiteChoice:
        left = training.lease_until - self._question.now
        nodes = training.nodes if training.trainer.min_nodes <= training.nodes <= training.trainer.max_nodes else 0
        value = self._gain(training, nodes, min(left, self._question.horizon)) if nodes else 0.0
        reason = f"{training.site} does not answer; it keeps the training until its lease ends, in {left:.0f} s"
        return SiteChoice(training.name, Verb.STAY, training.site, nodes, value, reason)

    def _placed(self, training: SiteTraining, option: _Option) -> SiteChoice:
        expected = f"{option.nodes} of {self._nodes[option.site]:.1f} nodes expected at {option.site}"
        home = self._home(training)
        if option.site == home:
            left = training.arrives - self._question.now
            reason = expected if left <= 0 else f"{expected}, where its state arrives in {left:.0f} s"
            return SiteChoice(training.name, Verb.STAY, option.site, option.nodes, option.gain, reason)
        size = 0.0 if option.source is None else training.state_bytes
        cost = f"{size / 1e6:.0f} MB take {option.transfer:.0f} s" if size else "nothing has to be transferred"
        if home is not None:
            verb, reason = Verb.MOVE, f"{expected}, now {training.nodes} at {home}; {cost}"
        elif training.site is not None:
            verb = Verb.MOVE if training.checkpoints else Verb.START
            reason = f"{expected}; {training.site} does not answer and its lease has ended; {cost}"
        else:
            verb, reason = Verb.START, f"{expected}; {cost}"
        return SiteChoice(
            training.name,
            verb,
            option.site,
            option.nodes,
            option.gain,
            reason,
            option.source,
            option.transfer,
            size,
        )

    def _waiting(self, training: SiteTraining, queues: Mapping[str, int]) -> SiteChoice:
        value = -training.trainer.costs.down * self._value_now(training)
        home = self._home(training)
        if home is not None:
            return SiteChoice(training.name, Verb.WAIT, home, 0, value, f"no nodes expected at {home}, none worth a move")
        answering = [name for name, site in self._sites.items() if site.answers]
        if not answering:
            return SiteChoice(training.name, Verb.WAIT, None, 0, 0.0, "no site answers")
        if training.checkpoints:
            reason = "no site has nodes that are worth the transfer of its state"
            if all(math.isinf(self._transfer(training, site)[1]) for site in answering):
                reason = f"no transfer rate is known from {', '.join(sorted(training.checkpoints))} to a site that answers"
            return SiteChoice(training.name, Verb.WAIT, None, 0, 0.0, reason)
        site = max(answering, key=lambda name: (self._nodes[name] / (1 + queues[name]), -answering.index(name)))
        return SiteChoice(training.name, Verb.WAIT, site, 0, 0.0, f"no nodes expected; queued at {site}")


def _demands(options: Sequence[_Option], sites: Sequence[str]) -> npt.NDArray[np.float64]:
    """Return the nodes of each option at each site, shape (options, sites)."""
    demands = np.zeros((len(options), len(sites)))
    for row, option in enumerate(options):
        demands[row, sites.index(option.site)] = option.nodes
    return demands
