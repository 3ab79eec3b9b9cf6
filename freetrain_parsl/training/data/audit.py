"""Sample counts, to verify that each sample is trained on exactly once per epoch.

Each member counts the samples of every batch that the group has trained on, so no counts are lost when a member fails.
A checksum that is summed with the gradients (`checksum`) verifies at each step that the members together trained on
exactly these samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from freetrain_parsl.training.data.lazy_positions import counts as counts_of

if TYPE_CHECKING:
    from freetrain_parsl.training.data.lazy_positions import Positions

_SPREAD = 2654435761  # Knuth's multiplicative hash
_MODULUS = 1 << 20  # so that the sums of billions of samples are exact in float64


@dataclass(frozen=True)
class Audit:
    """Totals over the finished epochs of a training job.

    Parameters
    ----------
    samples_seen
        Samples trained on, repetitions included.
    samples_lost
        Samples missing from an epoch.
    duplicate_samples
        Repetitions within an epoch.
    """

    samples_seen: int = 0
    samples_lost: int = 0
    duplicate_samples: int = 0

    def __add__(self, other: Audit) -> Audit:
        return Audit(
            self.samples_seen + other.samples_seen,
            self.samples_lost + other.samples_lost,
            self.duplicate_samples + other.duplicate_samples,
        )


_COUNTED_TOGETHER = 256  # batches


class Ledger:
    """Counts of how often the group has trained on each sample in the current epoch."""

    def __init__(self, length: int) -> None:
        self._counts = torch.zeros(length, dtype=torch.int32)
        self._added: list[torch.Tensor] = []  # positions that are not counted yet

    @property
    def counts(self) -> torch.Tensor:
        """How often, int32, shape (length,)."""
        if self._added:
            positions, self._added = torch.cat(self._added), []
            self._counts.index_add_(0, positions, torch.ones_like(positions, dtype=torch.int32))
        return self._counts

    def add(self, positions: torch.Tensor) -> None:
        """Count one training step on each of `positions` (int64, may repeat)."""
        self._added.append(positions)
        if len(self._added) >= _COUNTED_TOGETHER:
            _ = self.counts

    def clear(self) -> None:
        """Start a new epoch."""
        self._added = []
        self._counts.zero_()


def checksum(positions: torch.Tensor) -> int:
    """Return a checksum of `positions` (int64) that distinguishes sets of samples; additive over disjoint sets."""
    return int(((positions + 1) * _SPREAD % _MODULUS).sum())


def audit(counts: torch.Tensor, expected: Positions) -> Audit:
    """Compare the steps on each sample of the dataset with the positions of a whole epoch, some perhaps repeated."""
    missing = counts_of(expected, len(counts)) - counts
    return Audit(
        samples_seen=int(counts.sum()),
        samples_lost=int(missing.clamp(min=0).sum()),
        duplicate_samples=int((-missing).clamp(min=0).sum()),
    )
