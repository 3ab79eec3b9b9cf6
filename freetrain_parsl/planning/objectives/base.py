"""What a policy maximises: value per second of a trainer on a number of nodes, and the value of a change.

Most objectives depend on one trainer and its number of nodes. Those that need the time or the other trainers are
`Contextual`: once per decision, a policy obtains from them the objective for that moment (`at_moment`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from freetrain_parsl.entry_points import EntryPoints
from freetrain_parsl.errors import InvalidSettings
from freetrain_parsl.planning.model import PlannedJob
from freetrain_parsl.planning.objectives.deadlines import DueWork, rates_now
from freetrain_parsl.planning.objectives.fairness import Claim, fair_levels, seated

__all__ = [
    "OBJECTIVES",
    "PRIORITY",
    "SPEEDUP",
    "THROUGHPUT",
    "Contextual",
    "Deadline",
    "MaxMin",
    "Moment",
    "NetOfChanges",
    "Objective",
    "ObjectiveLike",
    "Tabulated",
    "WeightedRate",
    "WithBonus",
    "at_moment",
    "charged",
    "objective_table",
    "resolve_objective",
    "value_table",
    "without_own_costs",
]

Objective = Callable[[PlannedJob, int], float]
"""(trainer, nodes) -> value per second, finite and not negative; called only within the trainer's bounds."""

Table = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Moment:
    """The situation in which a decision is made.

    Parameters
    ----------
    trainers
        All trainers in the decision.
    held
        PlannedJob -> number of its current nodes that are still in the pool; absent trainers have none.
    nodes
        Size of the pool.
    now
        Seconds, on the same clock as the trainers' times.
    """

    trainers: Sequence[PlannedJob]
    held: Mapping[str, int]
    nodes: int
    now: float


class Contextual(ABC):
    """An objective that depends on the time or on all trainers together."""

    @abstractmethod
    def at_moment(self, moment: Moment) -> Objective:
        """Make the objective for the decision of this moment; it is called for its trainers only."""


ObjectiveLike = str | Objective | Contextual


class Tabulated(ABC):
    """An objective that computes a trainer's values on all numbers of nodes at once."""

    @abstractmethod
    def table(self, trainer: PlannedJob, last: int) -> Table:
        """Tabulate values per second on 0, 1, …, `last` nodes, shape (last + 1,); undefined outside the bounds."""

    def __call__(self, trainer: PlannedJob, nodes: int) -> float:
        """Return the value per second of a trainer on `nodes` nodes."""
        return float(self.table(trainer, nodes)[nodes])


@dataclass(frozen=True)
class WeightedRate(Tabulated):
    """Throughput times a weight of the trainer."""

    weight: Callable[[PlannedJob], float]

    def table(self, trainer: PlannedJob, last: int) -> Table:
        """Tabulate; see `Tabulated.table`."""
        return _checked(self.weight(trainer), trainer, None) * trainer.curve.rates(last)


@dataclass(frozen=True)
class WithBonus(Tabulated):
    """An objective plus a bonus that takes precedence over it; changes are charged without the bonus.

    A bonus expresses that something matters more than the objective. A rescale costs a trainer's lost time at the
    objective; if the bonus were charged too, a trainer that has it could never be made to release a node.

    Parameters
    ----------
    base
        The objective.
    bonus
        PlannedJob -> value per second on 0, 1, …, N nodes, shape (N + 1,), zero on zero nodes; absent trainers have
        none.
    """

    base: Objective
    bonus: Mapping[str, Table]

    def table(self, trainer: PlannedJob, last: int) -> Table:
        """Tabulate; see `Tabulated.table`."""
        table = objective_table(self.base, trainer, last)
        bonus = self.bonus.get(trainer.name)
        # No trainer can exceed the pool, but a larger table may be requested for a previous count.
        return table if bonus is None else table + bonus[np.minimum(np.arange(last + 1), len(bonus) - 1)]


@dataclass(frozen=True)
class NetOfChanges(Tabulated):
    """An objective that contains the costs of changes already: policies charge nothing on top.

    Parameters
    ----------
    gross
        The objective without these costs, for policies whose model of costs is their own.
    net
        The objective with them, for the current numbers of nodes.
    """

    gross: Objective
    net: Tabulated

    def table(self, trainer: PlannedJob, last: int) -> Table:
        """Tabulate; see `Tabulated.table`."""
        return self.net.table(trainer, last)


def _one(trainer: PlannedJob) -> float:  # noqa: ARG001 - signature of a weight
    return 1.0


def _per_smallest_rate(trainer: PlannedJob) -> float:
    if trainer.unit is not None:
        return 1.0 / trainer.unit
    rate = trainer.rate(trainer.min_nodes)
    if rate > 0:
        return 1.0 / rate
    # If the rate at min_nodes is zero, the first point with a positive rate is the unit instead.
    rates = (r for nodes, r in trainer.curve.points if nodes > trainer.min_nodes and r > 0)
    unit = next(rates, 0.0)
    return 1.0 / unit if unit else 0.0


def _priority(trainer: PlannedJob) -> float:
    return trainer.priority * _per_smallest_rate(trainer)


THROUGHPUT: Final[Objective] = WeightedRate(_one)
"""Samples per second."""

SPEEDUP: Final = WeightedRate(_per_smallest_rate)
"""Throughput in units of the trainer's rate on its ``min_nodes``."""

PRIORITY: Final[Objective] = WeightedRate(_priority)
"""Speedup times the trainer's priority."""


@dataclass(frozen=True)
class Deadline(Contextual):
    """Meet all feasible deadlines first, then maximise another objective.

    A trainer with a deadline gets, in addition to that objective, a bonus for training fast enough: work left over
    time left, less the seconds that the change to that number of nodes takes. Deadlines that can be met together are
    found by `freetrain_parsl.planning.objectives.deadlines.rates_now`, assuming a constant pool; they come first,
    weighted by priority, then those that need more than that, as fast as possible. Bonuses are larger than the
    maximum value of the objective on the pool. Deadlines that not even ``max_nodes`` can meet, and those of trainers
    with unknown work, are ignored.

    Parameters
    ----------
    objective
        Secondary objective: a function of trainer and nodes, such as `SPEEDUP`.
    """

    objective: Objective = THROUGHPUT

    def __post_init__(self) -> None:
        if not callable(self.objective):
            raise InvalidSettings(
                f"objective 'deadline': the secondary objective must be a function (trainer, nodes) -> float, "
                f"got {self.objective!r}"
            )

    def at_moment(self, moment: Moment) -> Objective:
        """Make the objective; see `Contextual.at_moment`."""
        base = self.objective
        pressed = {t.name: pressure for t in moment.trainers if (pressure := _pressure(t, moment)) is not None}
        if not pressed:
            return base
        rates = {t.name: _allowed_rates(t, moment.nodes) for t in moment.trainers if t.name in pressed}
        jobs = [
            DueWork(t.name, t.work_left, left, rates[t.name], t.priority)
            for t in moment.trainers
            if t.name in pressed and (left := _training_time(t, moment)) > 0
        ]
        needed = rates_now(jobs, moment.nodes)
        # In each second of the decision, a deadline being met outweighs all gains and costs of changes elsewhere.
        peaks = [(t, float(np.nanmax(objective_table(base, t, moment.nodes)))) for t in moment.trainers]
        on_its_way = sum(peak * (1 + t.costs.start + max(t.costs.up, t.costs.down)) for t, peak in peaks) or 1.0
        least = min(t.priority for t in moment.trainers if t.name in pressed)
        weights = {t.name: t.priority / least for t in moment.trainers if t.name in pressed}
        admitted = on_its_way * (1 + 2 * sum(weights.values()))
        bonus: dict[str, Table] = {}
        for name, share in pressed.items():
            reached = np.minimum(share, 1)
            extra = on_its_way * (reached / reached.max() + (share >= 1))
            if needed.get(name, 0.0) > 0:
                extra += admitted * (rates[name] >= needed[name])
            bonus[name] = weights[name] * extra
        return WithBonus(base, bonus)


def _allowed_rates(trainer: PlannedJob, nodes: int) -> Table:
    """Tabulate samples per second on 0, 1, …, `nodes` nodes; zero where the count is not allowed."""
    rates = trainer.curve.rates(nodes)
    return np.where(trainer.may_have_each(nodes), rates, 0.0)


def _training_time(trainer: PlannedJob, moment: Moment) -> float:
    """Return the seconds until the deadline, less those of a change unless the current nodes are sufficient."""
    assert trainer.deadline is not None, "called only for trainers that have one"
    left = trainer.deadline - moment.now
    current = moment.held.get(trainer.name, 0)
    if not current:
        return left - trainer.costs.start
    enough = _allowed_rates(trainer, moment.nodes)[current] * left >= trainer.work_left
    return left if enough else left - trainer.costs.up


def _pressure(trainer: PlannedJob, moment: Moment) -> Table | None:
    """Tabulate the share of the work left that is done by the deadline on a constant 0, 1, …, N nodes.

    ``None`` if there is no deadline, no work left, no rate in samples per second, no allowed count in the pool, or no
    sufficient count even beyond the pool.
    """
    if trainer.deadline is None or trainer.curve.relative or not 0 < trainer.work_left < math.inf:
        return None
    current = moment.held.get(trainer.name, 0)
    rates = _allowed_rates(trainer, max(moment.nodes, trainer.max_nodes))
    counts = np.arange(len(rates))
    change = trainer.costs.changes(current, len(rates) - 1) if current else np.where(counts, trainer.costs.start, 0.0)
    share: Table = rates * np.maximum(trainer.deadline - moment.now - change, 0.0) / trainer.work_left
    here: Table = share[: moment.nodes + 1]
    return here if share.max() >= 1 and here.any() else None


@dataclass(frozen=True)
class _FairShare(Tabulated):
    """A trainer's speed-up as a share of its fair level; zero without a level."""

    levels: Mapping[str, float]

    def table(self, trainer: PlannedJob, last: int) -> Table:
        """Tabulate; see `Tabulated.table`."""
        level = self.levels.get(trainer.name, 0.0)
        speedups = SPEEDUP.table(trainer, last)
        return np.minimum(speedups / level, 1.0) if level > 0 else np.zeros_like(speedups)


@dataclass(frozen=True)
class MaxMin(Contextual):
    """Maximise the smallest speed-up, then the next; with too few nodes, trainers take turns.

    `planning.objectives.fairness` finds each trainer's fair level in this pool. A trainer's value is its share of that
    level, so the optimum without costs is that allocation, and a rescale must gain more of such shares over the
    horizon than it costs. A trainer whose turn begins gets a bonus that outweighs the costs of changing others, so that
    the bound on waiting there holds for every policy that finds the optimum, with a horizon of at least one second.

    Parameters
    ----------
    turn
        How long a trainer that has started keeps its place while others wait. It should be long compared to the costs
        of starting and stopping.
    """

    turn: timedelta = timedelta(minutes=10)

    def __post_init__(self) -> None:
        if self.turn <= timedelta(0):
            raise InvalidSettings(f"objective 'max-min': turn must be positive, got {self.turn}")

    def at_moment(self, moment: Moment) -> Objective:
        """Make the objective; see `Contextual.at_moment`."""
        ranked = sorted(moment.trainers, key=lambda trainer: (trainer.submitted, trainer.name))
        speedups = {t.name: np.nan_to_num(objective_table(SPEEDUP, t, moment.nodes)) for t in ranked}
        claims = [
            Claim(
                t.name,
                int(np.argmax(speedups[t.name] > 0)),
                t.submitted if t.since is None else t.since,
                running=bool(moment.held.get(t.name)),
            )
            for t in ranked
            if speedups[t.name].any()
        ]
        chosen = seated(claims, moment.nodes, moment.now, self.turn.total_seconds())
        served = [t.name for t in ranked if t.name in chosen]
        levels = fair_levels([speedups[name] for name in served], moment.nodes)
        begin = 1.0 + sum(1 + t.costs.start + max(t.costs.up, t.costs.down) for t in ranked)
        bonus = {name: np.where(speedups[name] > 0, begin, 0.0) for name in served if not moment.held.get(name)}
        return WithBonus(_FairShare(dict(zip(served, levels, strict=True))), bonus)


def _read(found: Any) -> Objective | Contextual:
    """Return the objective of an entry point, which names an object, or a class that is created with its defaults."""
    objective: Objective | Contextual = found() if isinstance(found, type) else found
    return resolve_objective(objective)


OBJECTIVES: Final = EntryPoints[Objective | Contextual]("freetrain.objectives", "objective", _read)
"""Name -> objective."""


def resolve_objective(objective: ObjectiveLike) -> Objective | Contextual:
    """Return the objective of this name; a callable or a `Contextual` is returned as it is.

    Raises
    ------
    InvalidSettings
        There is no objective of this name, or it is not callable.
    """
    if isinstance(objective, str):
        return OBJECTIVES.find(objective)
    if not (callable(objective) or isinstance(objective, Contextual)):
        raise InvalidSettings(f"an objective must be a name or a function (trainer, nodes) -> float, got {objective!r}")
    return objective


def at_moment(objective: Objective | Contextual, moment: Moment) -> Objective:
    """Return the objective for one decision: the same one, unless it depends on the moment."""
    return objective.at_moment(moment) if isinstance(objective, Contextual) else objective


def charged(objective: Objective) -> Objective:
    """Return the objective at which changes are charged: the same one, without its bonus if it has one."""
    return objective.base if isinstance(objective, WithBonus) else objective


def without_own_costs(objective: Objective) -> Objective:
    """Return the objective for a policy that charges changes in its own way, even if it is `NetOfChanges`."""
    return objective.gross if isinstance(objective, NetOfChanges) else objective


def objective_table(objective: Objective, trainer: PlannedJob, max_nodes: int) -> Table:
    """Tabulate O_j(0), …, O_j(max_nodes), shape (max_nodes + 1,), value per second.

    Zero on zero nodes; NaN where the trainer may not have a number of nodes: an objective is never called there.

    Raises
    ------
    InvalidSettings
        The objective did not return a finite number of at least zero.
    """
    table = np.full(max_nodes + 1, np.nan)
    allowed = np.flatnonzero(trainer.may_have_each(min(trainer.max_nodes, max_nodes)))
    if not len(allowed):
        pass
    elif isinstance(objective, Tabulated):
        table[allowed] = objective.table(trainer, int(allowed[-1]))[allowed]
    else:
        for nodes in allowed.tolist():
            table[nodes] = _checked(objective(trainer, nodes), trainer, nodes)
    table[0] = 0.0
    return table


def value_table(objective: Objective, trainer: PlannedJob, current: int, max_nodes: int, horizon: float) -> Table:
    """Tabulate v_j(0), …, v_j(max_nodes): the value of counts over the horizon, less the cost of the change.

    ::

        v(n) = T O(n) - [n > C] R_up O(C) - [n < C] R_down O(C) - [C = 0 < n] R_start O(n)

    where R_up and R_down are those of `CostsInSeconds.changes`, which depend on C and n if the state is sharded.

    A trainer that may not have its `current` count C (some of its nodes are gone) cannot continue: it stops, at the
    cost of a shrink, or changes to an allowed count, at the cost of a grow or a shrink. O(C) is then taken at the
    nearest allowed one. An objective that is `NetOfChanges` is charged nothing: v(n) = T O(n).

    Parameters
    ----------
    objective
        O, value per second; if it is `WithBonus`, T O is with the bonus and the costs are without.
    trainer
        The trainer.
    current
        C, number of its current nodes that are still in the pool.
    max_nodes
        The largest count.
    horizon
        T, seconds that a decision is expected to last.

    Returns
    -------
    numpy.ndarray
        Shape (max_nodes + 1,), in units of the objective times seconds; minus infinity for counts not allowed.
    """
    if isinstance(objective, NetOfChanges):
        values = horizon * objective_table(objective, trainer, max_nodes)
        return np.where(np.isnan(values), -np.inf, values)
    nearest = trainer.nearest(current)
    rates = objective_table(charged(objective), trainer, max(max_nodes, nearest if current else 0))
    before = rates[nearest] if current else 0.0
    rates = rates[: max_nodes + 1]
    values = horizon * (objective_table(objective, trainer, max_nodes) if isinstance(objective, WithBonus) else rates)
    if current:
        values -= trainer.costs.changes(current, max_nodes) * before
    else:
        values -= trainer.costs.start * rates
    return np.where(np.isnan(values), -np.inf, values)


def _checked(value: Any, trainer: PlannedJob, nodes: int | None) -> float:
    try:
        number = math.nan if isinstance(value, (str, bool)) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not (math.isfinite(number) and number >= 0):
        where = "" if nodes is None else f" on {nodes} nodes"
        raise InvalidSettings(
            f"the objective must return a finite number of at least zero, got {value!r} "
            f"for trainer {trainer.name!r}{where}"
        )
    return number
