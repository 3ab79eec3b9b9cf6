"""The ledger of samples: exactly once an epoch is counted, not assumed.

Each member counts the samples of every batch that the group has trained on, so that the loss of a member loses no
counts. That the members together trained on those very samples is checked step by step by a checksum that travels
with the gradients (`checksum`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_SPREAD = 2654435761  # Knuth's multiplicative hash
_MODULUS = 1 << 20  # so that the sums of billions of samples are exact in float64


@dataclass(frozen=True)
class Audit:
    """Totals over the finished epochs of a training.

    Parameters
    ----------
    samples_seen
        Samples trained on, repetitions included.
    samples_lost
        Samples that an epoch should have had and had not.
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


class Ledger:
    """How often the group has trained on each sample in the current epoch.

    Parameters
    ----------
    length
        Samples in the dataset.
    """

    def __init__(self, length: int) -> None:
        self.counts = torch.zeros(length, dtype=torch.int32)

    def add(self, positions: torch.Tensor) -> None:
        """Count one training step on each of `positions` (int64, may repeat)."""
        self.counts.index_add_(0, positions, torch.ones_like(positions, dtype=torch.int32))

    def clear(self) -> None:
        """Start a new epoch."""
        self.counts.zero_()


def checksum(positions: torch.Tensor) -> int:
    """Return a sum over `positions` (int64) that tells sets of samples apart; it adds up over disjoint sets."""
    return int(((positions + 1) * _SPREAD % _MODULUS).sum())


def audit(counts: torch.Tensor, expected: torch.Tensor) -> Audit:
    """Compare what an epoch had with what it should have had.

    Parameters
    ----------
    counts
        Steps on each sample, of the dataset's length.
    expected
        Positions of the samples of a whole epoch, each once.
    """
    return Audit(
        samples_seen=int(counts.sum()),
        samples_lost=int((counts[expected] == 0).sum()),
        duplicate_samples=int((counts - 1).clamp(min=0).sum()),
    )
