"""Transfer rates from measured copies. Checkpoints travel through home: a site has a rate to it and one from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from freetrain_parsl.extensions.globus.sites.planning.model import TransferRate

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["ASSUMED", "HOME", "SiteRates", "fit_rate", "rates_between"]

HOME = "home"
"""Name of the home among the collections."""
ASSUMED = TransferRate(100e6, 30.0)
"""Until a copy is measured."""

_LEAST_SPREAD = 2.0  # largest size over smallest: with less, latency and throughput cannot be told apart


@dataclass(frozen=True)
class SiteRates:
    """The rates of one site.

    Parameters
    ----------
    to_home, from_home
        Of copies between its checkpoint directory and home.
    """

    to_home: TransferRate = ASSUMED
    from_home: TransferRate = ASSUMED


def fit_rate(copies: Sequence[tuple[float, float]], assumed: TransferRate = ASSUMED) -> TransferRate:
    """Estimate latency and throughput from measured copies, by least squares.

    Parameters
    ----------
    copies
        Bytes and seconds of each.
    assumed
        Used without copies; its throughput also if all copies have about the same size, or larger ones were no slower.
    """
    if not copies:
        return assumed
    sizes, seconds = np.array(copies, dtype=float).T
    per_byte = 1 / assumed.bytes_per_second
    if sizes.max() > _LEAST_SPREAD * max(1.0, sizes.min()):
        centred = sizes - sizes.mean()
        slope = float(centred @ seconds / (centred @ centred))
        per_byte = slope if slope > 0 else per_byte
    latency = max(0.0, float(np.mean(seconds - per_byte * sizes)))
    return TransferRate(1 / per_byte, latency)


def rates_between(sites: Mapping[str, SiteRates]) -> dict[tuple[str, str], TransferRate]:
    """Return (from collection, to site) -> rate: from home, and from each site to each other one through home."""
    rates = {(HOME, name): one.from_home for name, one in sites.items()}
    for source, one in sites.items():
        for target, other in sites.items():
            if source != target:
                up, down = one.to_home, other.from_home
                rates[source, target] = TransferRate(
                    1 / (1 / up.bytes_per_second + 1 / down.bytes_per_second), up.latency + down.latency
                )
    return rates
