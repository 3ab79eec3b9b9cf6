"""The planner over sites: which job runs at which site until the next look. Pure, like the planner of one site.

::

    max  sum_jsn v_jsn x_jsn    subject to    sum_sn x_jsn <= 1  for every training job j,
                                              sum_jn n x_jsn <= N_s  for every site s,      x binary

N_s is the mean number of nodes that site s offers until the next look, T seconds from now. With O_j(n) the value per
second of training j on n nodes, C_j its nodes now, and all seconds cut off when the work of j ends::

    stay             v = T O(n) - [n > C] R_up O(C) - [n < C] R_down O(C)        C > 0
    stay             v = (T - R_start) O(n)                                      C = 0
    start            v = (T - m) O(n)
    move             v = (T - m) O(n) - h m O(n) - R_down O(C)                   m = transfer time + B_s + R_start

B_s is the time that site s takes to begin with a training job that is new there. h is the hysteresis: a move must gain
(1 + h) times what it costs. A site's own planner decides the nodes; the counts here are what it is expected to decide.
`solvers.site_assignment` solves this exactly.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from freetrain_parsl.extensions.globus.sites.planning.assignment_solver import NOWHERE, assign_sites
from freetrain_parsl.extensions.globus.sites.planning.model import SiteChoice, SitePlan, SitesSettings, Verb
from freetrain_parsl.planning.objectives.base import SPEEDUP, Objective, objective_table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from freetrain_parsl.extensions.globus.sites.planning.model import SitesQuestion, SiteTraining
    from freetrain_parsl.planning.model import PlannedJob
    from freetrain_parsl.planning.solvers.highs import Counts, Table

__all__ = ["plan_sites"]

_PROVEN = 1e-7  # relative distance from the solver's bound that counts as zero
_ROUNDING = 1e-9  # nodes
_LEAST_MOVE = 1.0  # seconds charged for any move: equal values are no reason for one


def plan_sites(
    question: SitesQuestion, settings: SitesSettings | None = None, objective: Objective = SPEEDUP
) -> SitePlan:
    """Decide which training job runs where until the next look.

    - A site that does not answer keeps its training jobs until their leases end. Then they may go elsewhere, from their
      newest whole checkpoint.
    - A training job whose state is being transferred goes where it is transferred to.
    - A training job without a checkpoint that gets no nodes is queued at the site with the most nodes per training job:
      it may get some that become idle before the next look, and costs nothing to move.

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
    """A training job at a site, by its number of nodes.

    Parameters
    ----------
    gains
        Value less the cost of the change, from 0 to N_s or the trainer's most; minus infinity for
        counts not allowed.
    charged
        The same with the hysteresis, compared to getting no nodes.
    source, transfer
        From where its state has to be transferred, if from anywhere, and for how many seconds.
    """

    gains: Table
    charged: Table
    source: str | None = None
    transfer: float = 0.0


@dataclass(frozen=True)
class _Chosen:
    """An option, its site and the number of nodes."""

    option: _Option
    site: str
    nodes: int

    @property
    def gain(self) -> float:
        return float(self.option.gains[self.nodes])


class _Problem:
    """One decision; the parameters are those of `plan_sites`."""

    def __init__(self, question: SitesQuestion, settings: SitesSettings, objective: Objective) -> None:
        self._began = time.perf_counter()
        self._question = question
        self._settings = settings
        self._objective = objective
        self._sites = {site.name: site for site in sorted(question.sites, key=lambda site: site.name)}
        self._mean = {name: site.mean_nodes(question.horizon) for name, site in self._sites.items()}
        self._nodes = {name: math.floor(mean + _ROUNDING) for name, mean in self._mean.items()}
        self._trainings = sorted(question.trainings, key=lambda one: (one.trainer.submitted, one.name))
        self._tables: dict[tuple[str, int], Table] = {}

    def solve(self) -> SitePlan:
        free = [training for training in self._trainings if not self._is_leased(training)]
        names = list(self._sites)
        options = [[self._option(training, site) for site in names] for training in free]
        solution = assign_sites(
            [[option.charged for option in row] for row in options],
            list(self._nodes.values()),
            self._as_it_is(free, options),
            time_limit=self._settings.time_limit.total_seconds(),
        )
        chosen = {
            training.name: None if site == NOWHERE else _Chosen(row[site], names[site], nodes)
            for training, row, site, nodes in zip(
                free, options, solution.sites.tolist(), solution.counts.tolist(), strict=True
            )
        }
        return SitePlan(
            self._choices(chosen),
            solution.objective,
            solution.bound,
            solution.bound - solution.objective <= _PROVEN * abs(solution.bound),
            time.perf_counter() - self._began,
        )

    # The situation of one training job.

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

    def _option(self, training: SiteTraining, site: str) -> _Option:
        """Tabulate the value of a training job at a site."""
        home = self._home(training)
        left = training.arrives - self._question.now
        if site == home:
            return self._running(training, site) if training.nodes else self._starting(training, site, max(0.0, left))
        if home is not None and left > 0:  # its state is on the way
            return _impossible(self._most(training, site))
        return self._elsewhere(training, site)

    def _running(self, training: SiteTraining, site: str) -> _Option:
        costs, before = training.trainer.costs, self._value_now(training)
        gains = self._gains(training, self._most(training, site), self._question.horizon)
        gains -= costs.changes(training.nodes, len(gains) - 1) * before
        return _Option(gains, gains + costs.down * before)

    def _starting(self, training: SiteTraining, site: str, wait: float) -> _Option:
        seconds = self._question.horizon - wait - training.trainer.costs.start
        gains = self._gains(training, self._most(training, site), seconds)
        return _Option(gains, gains)

    def _elsewhere(self, training: SiteTraining, site: str) -> _Option:
        source, transfer = self._transfer(training, site)
        pause = transfer + self._sites[site].start + training.trainer.costs.start
        if not pause < self._question.horizon:
            return _impossible(self._most(training, site))
        gains = self._gains(training, self._most(training, site), self._question.horizon - pause)
        if self._home(training) is None:
            return _Option(gains, gains, source, transfer)
        extra = max(_LEAST_MOVE, self._settings.hysteresis * pause)
        charged = gains - extra * self._values(training.trainer, self._most(training, site))
        stop = training.trainer.costs.down * self._value_now(training)
        return _Option(gains - stop, charged, source, transfer)

    def _most(self, training: SiteTraining, site: str) -> int:
        return min(training.trainer.max_nodes, self._nodes[site])

    def _gains(self, training: SiteTraining, nodes: int, seconds: float) -> Table:
        """Tabulate the value of training for so many seconds, or until its work is done."""
        trainer = training.trainer
        values = self._values(trainer, nodes)
        lasts = np.full(nodes + 1, seconds)
        if not trainer.curve.relative and math.isfinite(trainer.work_left):
            rates = trainer.curve.rates(nodes)
            lasts = np.minimum(lasts, np.divide(trainer.work_left, rates, out=lasts.copy(), where=rates > 0))
        gains: Table = np.maximum(lasts, 0.0) * values
        return np.where(np.isnan(gains), -np.inf, gains)

    def _values(self, trainer: PlannedJob, nodes: int) -> Table:
        """Tabulate the value per second; NaN for counts not allowed."""
        if (trainer.name, nodes) not in self._tables:
            self._tables[trainer.name, nodes] = objective_table(self._objective, trainer, nodes)
        return self._tables[trainer.name, nodes]

    def _value_now(self, training: SiteTraining) -> float:
        """Return its value per second now; nothing if it does not run at an answering site."""
        if not training.nodes or self._home(training) is None:
            return 0.0
        trainer = training.trainer
        return self._objective(trainer, min(max(training.nodes, trainer.min_nodes), trainer.max_nodes))

    def _as_it_is(
        self, trainings: Sequence[SiteTraining], options: Sequence[Sequence[_Option]]
    ) -> tuple[Counts, Counts]:
        """Return the sites and counts as they are now, as far as they are still possible."""
        left = list(self._nodes.values())
        names = list(self._sites)
        sites, counts = np.full(len(trainings), NOWHERE, dtype=np.int64), np.zeros(len(trainings), dtype=np.int64)
        for row, (training, of_training) in enumerate(zip(trainings, options, strict=True)):
            home = self._home(training)
            if home is None or not training.nodes:
                continue
            site = names.index(home)
            charged = of_training[site].charged
            if training.nodes < len(charged) and training.nodes <= left[site] and charged[training.nodes] > 0:
                sites[row], counts[row] = site, training.nodes
                left[site] -= training.nodes
        return sites, counts

    # The plan.

    def _choices(self, chosen: Mapping[str, _Chosen | None]) -> tuple[SiteChoice, ...]:
        queues = Counter(way.site for way in chosen.values() if way is not None)
        queues.update(one.site for one in self._trainings if one.site is not None and not chosen.get(one.name))
        choices = []
        for training in self._trainings:
            if training.name not in chosen:
                choices.append(self._leased(training))
            elif (way := chosen[training.name]) is not None:
                choices.append(self._placed(training, way))
            else:
                waits = self._waiting(training, queues)
                if waits.site is not None and waits.site != training.site:
                    queues[waits.site] += 1
                choices.append(waits)
        return tuple(choices)

    def _leased(self, training: SiteTraining) -> SiteChoice:
        left = training.lease_until - self._question.now
        gains = self._gains(training, training.nodes, min(left, self._question.horizon))
        value = float(gains[-1]) if training.nodes and math.isfinite(gains[-1]) else 0.0
        reason = f"{training.site} does not answer; it keeps the training job until its lease ends, in {left:.0f} s"
        return SiteChoice(training.name, Verb.STAY, training.site, training.nodes, value, reason)

    def _placed(self, training: SiteTraining, way: _Chosen) -> SiteChoice:
        site, option, home = way.site, way.option, self._home(training)
        reason = f"{way.nodes} of {self._mean[site]:.1f} {self._question.unit} expected at {site}"
        if site == home:
            if (left := training.arrives - self._question.now) > 0:
                reason += f", where its state arrives in {left:.0f} s"
            return SiteChoice(training.name, Verb.STAY, site, way.nodes, way.gain, reason)
        size = 0.0 if option.source is None else training.state_bytes
        if home is not None:
            verb, reason = Verb.MOVE, f"{reason}, now {training.nodes} at {home}"
        elif training.site is not None:
            verb, reason = Verb.MOVE, f"{reason}; {training.site} does not answer and its lease has ended"
        else:
            verb = Verb.START
        if option.source is not None:
            reason += f"; {size / 1e6:,.0f} MB from {option.source} take {option.transfer:.0f} s"
        if verb is Verb.MOVE and (start := self._sites[site].start):
            reason += f"; a start there takes {start:.0f} s"
        return SiteChoice(training.name, verb, site, way.nodes, way.gain, reason, option.source, option.transfer, size)

    def _waiting(self, training: SiteTraining, queues: Mapping[str, int]) -> SiteChoice:
        value = -training.trainer.costs.down * self._value_now(training)
        home = self._home(training)
        if home is not None:
            return SiteChoice(
                training.name, Verb.WAIT, home, 0, value, f"no nodes expected at {home}, none worth a move"
            )
        answering = [name for name, site in self._sites.items() if site.answers]
        if not answering:
            return SiteChoice(training.name, Verb.WAIT, None, 0, 0.0, "no site answers")
        if training.checkpoints:
            reason = "no site has nodes that are worth the transfer of its state"
            if all(math.isinf(self._transfer(training, site)[1]) for site in answering):
                reason = (
                    f"no transfer rate is known from {', '.join(sorted(training.checkpoints))} to a site that answers"
                )
            return SiteChoice(training.name, Verb.WAIT, None, 0, 0.0, reason)
        site = max(answering, key=lambda name: (self._mean[name] / (1 + queues[name]), -queues[name]))
        return SiteChoice(training.name, Verb.WAIT, site, 0, 0.0, f"no nodes expected; queued at {site}")


def _impossible(nodes: int) -> _Option:
    nothing = np.full(nodes + 1, -np.inf)
    return _Option(nothing, nothing)
