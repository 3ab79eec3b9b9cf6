"""Online scaling curves: start from nothing, measure at the sizes visited, and try larger ones while it pays.

A trainer of which nothing is known begins on its ``min_nodes``. From then on it may have up to twice the largest
number of nodes measured, and is expected there to train as efficiently as at its best rate so far. Where efficiency
falls with size that is the most it can be, so a size that the policy does not choose at that estimate is not worth
it, and one that it chooses is known from then on: a trainer is mistaken about at most log2(max_nodes / min_nodes)
doublings. Two doublings without a gain end the climb; one may be a node boundary, which can halve a rate and be made
up for by the next.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from freetrain_parsl.errors import PlanningError
from freetrain_parsl.planning.curves.scaling import ScalingCurve

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from freetrain_parsl.planning.model import Trainer

__all__ = ["Profile", "learned"]


class Profile:
    """What has been measured of a trainer, or of several that are alike.

    Parameters
    ----------
    prior
        What the user says; its shape is believed where nothing has been measured. ``None``, or a relative curve,
        if that is nothing.
    """

    def __init__(self, prior: ScalingCurve | None = None) -> None:
        self._prior = None if prior is None or prior.relative else prior
        self._samples: dict[int, float] = {}
        self._seconds: dict[int, float] = {}
        self._curve: ScalingCurve | None = None

    def observe(self, nodes: int, samples: float, seconds: float) -> None:
        """Add a stretch of training on a constant number of nodes, from the end of a step to the end of another.

        What rescaling took is not in it, nor are steps that were cut off: they would pass for a low rate.

        Parameters
        ----------
        nodes
            On how many.
        samples, seconds
            What was processed, and in what time. Longer stretches weigh more.

        Raises
        ------
        PlanningError
            No nodes, no time, or a number of samples that is negative or not finite.
        """
        if nodes < 1 or not 0 < seconds < math.inf or not 0 <= samples < math.inf:
            raise PlanningError(f"not a measurement: {samples!r} samples in {seconds!r} s on {nodes!r} nodes")
        self._samples[nodes] = self._samples.get(nodes, 0.0) + samples
        self._seconds[nodes] = self._seconds.get(nodes, 0.0) + seconds
        self._curve = None

    @property
    def measured(self) -> dict[int, float]:
        """Number of nodes -> samples per second, by number of nodes."""
        return {nodes: self._samples[nodes] / self._seconds[nodes] for nodes in sorted(self._samples)}

    @property
    def known(self) -> bool:
        """Whether there is anything to go by: a prior, or samples processed on any number of nodes."""
        return self._prior is not None or any(self._samples.values())

    @property
    def largest_worth_trying(self) -> int | None:
        """Twice the largest number of nodes so far, at most four times the best; ``None`` with a prior, or before."""
        if self._prior is not None or not self.known:
            return None
        return min(2 * max(self._samples), 4 * self._best(self.measured))

    @property
    def curve(self) -> ScalingCurve:
        """The best estimate: what was measured, the prior's shape around it, or a linear gain from the best.

        Relative, and the default, while nothing is known at all.
        """
        if self._curve is None:
            self._curve = self._estimate()
        return self._curve

    def _estimate(self) -> ScalingCurve:
        if not self.known:
            return ScalingCurve.default()
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
        """Scale the prior's points by what was measured over what it says, linear between measured sizes."""
        ratios = ScalingCurve(
            {nodes: rate / prior(nodes) for nodes, rate in rates.items() if nodes >= prior.first_nodes and prior(nodes)}
            or {1: 1.0}
        )
        counts = {nodes for nodes, _ in prior.points} - rates.keys()
        return {**{n: prior(n) * ratios(max(n, ratios.first_nodes)) for n in counts}, **rates}


def learned(trainers: Iterable[Trainer], profiles: Mapping[str, Profile]) -> list[Trainer]:
    """Return the trainers with the curves learned so far, and with no more nodes than are worth trying.

    One of which nothing is known may have its ``min_nodes``, and is expected to be as quick there as the quickest
    of the others on one node, times its nodes: it does not wait behind those that are known.

    Parameters
    ----------
    trainers
        As their users describe them.
    profiles
        Trainer -> what has been measured; several may share a profile. Who is absent is left alone.
    """
    trainers = list(trainers)
    curves = [profiles[t.name].curve if t.name in profiles else t.curve for t in trainers]
    unit = max((rate / n for curve in curves if not curve.relative for n, rate in curve.points), default=1.0)
    result = []
    for trainer, curve in zip(trainers, curves, strict=True):
        profile = profiles.get(trainer.name)
        if profile is None:
            result.append(trainer)
        elif not profile.known:
            start = ScalingCurve({n: n * unit for n in (1, trainer.min_nodes)})
            result.append(replace(trainer, curve=start, max_nodes=trainer.min_nodes))
        else:
            most = min(profile.largest_worth_trying or trainer.max_nodes, trainer.max_nodes)
            result.append(replace(trainer, curve=curve, max_nodes=max(most, trainer.min_nodes)))
    return result
