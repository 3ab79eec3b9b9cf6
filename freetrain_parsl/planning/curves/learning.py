"""Online scaling curves: measured at the sizes and on the kinds of nodes that were visited, and estimated elsewhere.

With a prior, the ratio of measured to expected rates scales the prior at the sizes that have not been visited: a stated
curve keeps its shape, and the default curve becomes one in samples per second.

Without a prior, sizes are searched: an unknown trainer begins on its ``min_nodes``. It may then have up to twice the
largest number of nodes measured, where its efficiency is estimated to be that of its best rate so far. If efficiency
falls with size, this is an upper bound: a size that the policy does not choose at that estimate is not worthwhile, and
one that it chooses is then measured. The estimate is therefore wrong for at most log2(max_nodes / min_nodes) doublings.
Two doublings without a gain end the search; a single one may be due to a node boundary, which can halve a rate before
the next doubling recovers it. Where a trainer may not have twice its number of nodes, the next larger one that it may
have takes its place.

On a kind where it has not been measured, a trainer with other measurements is assumed to have their curve times the
ratio of the kinds' speeds. That ratio is the median over the trainers that were measured on both, else the ratio of
the speeds that the site states. The estimate decides whether a kind is tried; the first measurement there replaces it.
"""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING

from freetrain_parsl.errors import PlanningError
from freetrain_parsl.planning.curves.scaling import ScalingCurve

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from freetrain_parsl.planning.model import PlannedJob

__all__ = ["Profile", "as_learned", "best_rate_per_node", "learned", "learned_on_kinds", "relative_speeds"]


class Profile:
    """Measurements of a trainer, or of several identical ones.

    Parameters
    ----------
    prior
        The user's curve; its shape is used where nothing has been measured. A relative curve is only a shape, which the
        first measurement scales. ``None``, or an unknown curve: larger sizes are searched by doubling.
    """

    def __init__(self, prior: ScalingCurve | None = None) -> None:
        self._prior = None if prior is None or prior.unknown else prior
        self._samples: dict[int, float] = {}
        self._seconds: dict[int, float] = {}
        self._curve: ScalingCurve | None = None

    def observe(self, nodes: int, samples: float, seconds: float) -> None:
        """Add a period of training on a constant number of nodes, from the end of one step to the end of another.

        It must exclude rescaling and aborted steps, which would appear as a low rate.

        Parameters
        ----------
        nodes
            Number of nodes.
        samples, seconds
            Samples processed, and the time that it took. Longer periods have more weight.

        Raises
        ------
        PlanningError
            Zero nodes, zero time, or a number of samples that is negative or not finite.
        """
        if nodes < 1 or not 0 < seconds < math.inf or not 0 <= samples < math.inf:
            raise PlanningError(f"not a measurement: {samples!r} samples in {seconds!r} s on {nodes!r} nodes")
        self._samples[nodes] = self._samples.get(nodes, 0.0) + samples
        self._seconds[nodes] = self._seconds.get(nodes, 0.0) + seconds
        self._curve = None

    @property
    def measured(self) -> dict[int, float]:
        """Number of nodes -> samples per second, in order of the number of nodes."""
        return {nodes: self._samples[nodes] / self._seconds[nodes] for nodes in sorted(self._samples)}

    @property
    def known(self) -> bool:
        """Whether rates are known: from a prior that is not relative, or from samples processed."""
        return (self._prior is not None and not self._prior.relative) or any(self._samples.values())

    @property
    def searches(self) -> bool:
        """Whether larger sizes are searched by doubling, for lack of a prior."""
        return self._prior is None

    @property
    def largest_worth_trying(self) -> int | None:
        """Twice the largest number of nodes so far, at most four times the best; ``None`` with a prior or no data."""
        if not (self.searches and self.known):
            return None
        return min(2 * max(self._samples), 4 * self._best(self.measured))

    @property
    def curve(self) -> ScalingCurve:
        """The best estimate: the measurements, extended by the prior's shape or linearly from the best one.

        Without any measurement the prior or, without one, the default curve, which is relative.
        """
        if self._curve is None:
            self._curve = self._estimate()
        return self._curve

    def _estimate(self) -> ScalingCurve:
        if not self.known:
            return self._prior or ScalingCurve.default()
        rates = self.measured
        if self._prior is not None:
            return ScalingCurve(self._around(self._prior, rates)) if rates else self._prior
        top, best = self.largest_worth_trying, self._best(rates)
        if top is not None and top > max(rates):
            rates[top] = rates[best] * top / best
        if 1 not in rates:
            rates[1] = rates[min(rates)] / min(rates)
        return ScalingCurve(rates)

    @staticmethod
    def _best(rates: Mapping[int, float]) -> int:
        return max(rates, key=lambda nodes: (rates[nodes], -nodes))

    @staticmethod
    def _around(prior: ScalingCurve, rates: Mapping[int, float]) -> dict[int, float]:
        """Scale the prior's points by the ratio of measured to prior rates, linear between measured sizes."""
        ratios = ScalingCurve(
            {nodes: rate / prior(nodes) for nodes, rate in rates.items() if nodes >= prior.first_nodes and prior(nodes)}
            or {1: 1.0}
        )
        counts = {nodes for nodes, _ in prior.points} - rates.keys()
        return {**{n: prior(n) * ratios(max(n, ratios.first_nodes)) for n in counts}, **rates}


def best_rate_per_node(curves: Iterable[ScalingCurve]) -> float:
    """Return the largest rate per node, in samples per second, of curves that are not relative; 1 if there is none."""
    return max((rate / n for curve in curves if not curve.relative for n, rate in curve.points), default=1.0)


def as_learned(trainer: PlannedJob, profile: Profile, rate_per_node: float, slots: int = 1) -> PlannedJob:
    """Return a trainer with the curve learned so far, and with ``max_nodes`` limited to sizes worth trying.

    Parameters
    ----------
    trainer
        As specified by its user.
    profile
        Its measurements.
    rate_per_node
        Samples per second assumed for a node as long as nothing has been measured; that of the fastest other trainer,
        so that an unknown trainer does not wait behind known ones. A trainer to be searched gets its ``min_nodes``.
    slots
        Of the hosts that trainers share; 1: its nodes are whole machines.
    """
    if profile.known:
        curve, top = profile.curve, profile.largest_worth_trying
        if top is None:
            return replace(trainer, curve=curve)
        most = trainer.at_least(top, slots) or trainer.max_nodes
        if most > top > max(profile.measured):
            curve = ScalingCurve({**dict(curve.points), most: curve(top) * most / top})
        return replace(trainer, curve=curve, max_nodes=most)
    if not profile.searches:
        return replace(trainer, curve=profile.curve.scaled(rate_per_node))
    start = ScalingCurve({n: n * rate_per_node for n in (1, trainer.min_nodes)}, relative=True)
    return replace(trainer, curve=start, max_nodes=trainer.at_least(trainer.min_nodes, slots) or trainer.min_nodes)


def learned(trainers: Iterable[PlannedJob], profiles: Mapping[str, Profile], slots: int = 1) -> list[PlannedJob]:
    """Return the trainers as `as_learned` does, the unknown ones relative to the fastest.

    Several trainers may share a profile; those without one are returned unchanged.
    """
    trainers = list(trainers)
    unit = best_rate_per_node(profiles[t.name].curve if t.name in profiles else t.curve for t in trainers)
    return [as_learned(t, profiles[t.name], unit, slots) if t.name in profiles else t for t in trainers]


def relative_speeds(
    stated: Mapping[str, float], profiles: Iterable[Mapping[str, Profile]]
) -> dict[tuple[str, str], float]:
    """Return (kind, other kind) -> how many times as fast a node of the first is.

    From the stated speed of each kind, in any unit, and, for each trainer, its measurements on each kind.
    """
    ratios: dict[tuple[str, str], list[float]] = {}
    for trainer in profiles:
        rates = {kind: best_rate_per_node([one.curve]) for kind, one in trainer.items() if any(one.measured.values())}
        for kind, rate in rates.items():
            for other, base in rates.items():
                if base > 0:
                    ratios.setdefault((kind, other), []).append(rate / base)
    return {
        (kind, other): median(ratios.get((kind, other), [stated[kind] / stated[other]]))
        for kind in stated
        for other in stated
    }


def learned_on_kinds(
    trainer: PlannedJob, profiles: Mapping[str, Profile], speeds: Mapping[tuple[str, str], float], rate_per_node: float
) -> PlannedJob:
    """Return a trainer with its curves on all kinds, as far as known; see `learning.as_learned`.

    From its measurements on each kind, at least one, and `relative_speeds`; the assumed rate is that on the fastest
    kind.
    """
    known = {
        kind: as_learned(trainer, one, rate_per_node)
        for kind, one in profiles.items()
        if any(one.measured.values()) or (one.known and kind in trainer.curves)
    }
    measured = [kind for kind in known if any(profiles[kind].measured.values())]
    fastest = max(profiles, key=lambda kind: (sum(speeds[kind, other] for other in profiles), kind))
    curves: dict[str, ScalingCurve] = {}
    limits = {kind: one.max_nodes for kind, one in known.items()}
    for kind, profile in profiles.items():
        if kind in known:
            curves[kind] = known[kind].curve
        elif measured:
            most = max(measured, key=lambda other: (sum(profiles[other].measured.values()), other))
            curves[kind] = known[most].curve.scaled(speeds[kind, most])
        else:  # a stated curve without a kind is that of the fastest
            guess = as_learned(trainer, profile, rate_per_node * (1.0 if profile.known else speeds[kind, fastest]))
            curves[kind] = guess.curve.scaled(speeds[kind, fastest]) if profile.known else guess.curve
            limits[kind] = guess.max_nodes
    return replace(trainer, curve=curves[fastest], curves=curves, max_nodes=max(limits.values()))
