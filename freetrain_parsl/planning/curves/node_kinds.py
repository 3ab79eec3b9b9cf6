"""Scaling curves on several kinds of nodes: measured where a trainer has been, estimated elsewhere.

On a kind where it has not been measured, a trainer with other measurements is assumed to have their curve times the
ratio of the kinds' speeds. That ratio is the median over the trainers that were measured on both, else the ratio of
the speeds that the site states. The estimate decides whether a kind is tried; the first measurement there replaces it.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING

from freetrain_parsl.planning.curves.learning import as_learned, best_rate_per_node

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from freetrain_parsl.planning.curves.learning import Profile
    from freetrain_parsl.planning.curves.scaling import ScalingCurve
    from freetrain_parsl.planning.model import Trainer

__all__ = ["learned_on_kinds", "relative_speeds"]


def relative_speeds(
    stated: Mapping[str, float], profiles: Iterable[Mapping[str, Profile]]
) -> dict[tuple[str, str], float]:
    """Return (kind, other kind) -> how many times as fast a node of the first is.

    Parameters
    ----------
    stated
        Kind -> its speed, in any unit.
    profiles
        For each trainer, kind -> its measurements there.
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
    trainer: Trainer, profiles: Mapping[str, Profile], speeds: Mapping[tuple[str, str], float], rate_per_node: float
) -> Trainer:
    """Return a trainer with its curves on all kinds, as far as known; see `learning.as_learned`.

    Parameters
    ----------
    trainer
        As specified by its user.
    profiles
        Kind -> its measurements there; at least one.
    speeds
        See `relative_speeds`.
    rate_per_node
        As for `learning.as_learned`, on the fastest kind.
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
