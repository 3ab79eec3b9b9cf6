"""How many nodes a site will offer on average until the next look, from the numbers seen at looks so far.

A number n that is far above its mean m now will be closer to it later. It is modelled as an autoregressive process of
first order: with the autocorrelation r of consecutive looks, T apart, n - m is expected to decay as exp(t ln r / T), so
that on average until the next look the number is m + w (n - m), w = (r - 1) / ln r.
"""

from __future__ import annotations

import math

__all__ = ["NodeForecast"]

_FIRST_CORRELATION = 0.5  # before enough looks
_FIRST_LOOKS = 4.0  # how many looks that is worth
_RANGE = 0.01, 0.99  # of the correlation


class NodeForecast:
    """Learns the mean and the autocorrelation of a site's nodes; looks are assumed to be equally far apart."""

    def __init__(self) -> None:
        self._looks = 0
        self._sum = 0.0
        self._squares = 0.0
        self._products = 0.0  # of consecutive numbers
        self._first = 0.0
        self._last = 0.0

    def seen(self, nodes: float) -> None:
        """Record the number at a look."""
        if self._looks:
            self._products += self._last * nodes
        else:
            self._first = nodes
        self._looks += 1
        self._sum += nodes
        self._squares += nodes * nodes
        self._last = nodes

    @property
    def correlation(self) -> float:
        """The autocorrelation of consecutive looks."""
        if not self._looks:
            return _FIRST_CORRELATION
        mean = self._sum / self._looks
        variance = self._squares / self._looks - mean * mean
        pairs = self._looks - 1
        covariance = self._products - mean * (2 * self._sum - self._first - self._last) + pairs * mean * mean
        prior = _FIRST_LOOKS * max(variance, _tiny(mean))
        estimate = (covariance + _FIRST_CORRELATION * prior) / (pairs * max(variance, _tiny(mean)) + prior)
        return min(max(estimate, _RANGE[0]), _RANGE[1])

    def mean_next(self) -> float:
        """Return the mean number expected until the next look; zero before the first look."""
        if not self._looks:
            return 0.0
        mean = self._sum / self._looks
        weight = (self.correlation - 1) / math.log(self.correlation)
        return max(0.0, mean + weight * (self._last - mean))


def _tiny(mean: float) -> float:
    """Return a variance that counts as none, against rounding."""
    return 1e-9 * (1.0 + mean * mean)
