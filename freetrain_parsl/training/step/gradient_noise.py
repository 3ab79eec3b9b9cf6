"""The gradient noise scale, measured while training.

The mean gradient of n samples has the expected squared norm ``|G|² + tr(S) / n``, where G is the true gradient and S
the covariance of the gradient of one sample. Two averages over different numbers of samples therefore give both
(McCandlish et al., An Empirical Model of Large-Batch Training, 2018, appendix A.1). Let a batch of B samples have k
parts, part i with n_i samples and the gradient g_i, and let g be that of the whole batch. With

    s = sum_i (n_i / B) |g_i|²        E[s] = |G|² + k tr(S) / B        E[|g|²] = |G|² + tr(S) / B

these estimates are unbiased, also for parts of different sizes:

    tr(S) = (s - |g|²) B / (k - 1)        |G|² = (k |g|² - s) / (k - 1)

The parts are the shards of a group's members. In one process they are its micro-batches or, without these, the batches
of two successive steps, as in AdaptDL (Qiao et al., Pollux, 2021): the parameters differ a little between them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn.utils import get_total_norm

from freetrain_parsl.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn

    from freetrain_parsl.training.data.order import Batch

__all__ = ["NoiseMeter", "dense_gradient"]

_SOON = 64  # batches
_EVERY_AT_FIRST = 2  # batches; the first estimate is needed soon
_EVERY = 8  # batches: measuring reads all gradients
_DECAY = 0.95  # of the weight of earlier measurements, with each one
_LEAST = 16  # measurements before there is an estimate


class _Kept(NamedTuple):
    """Gradients of batch number `number`, to be compared with those of the next one."""

    number: int
    gradients: list[torch.Tensor | None]
    square: torch.Tensor
    samples: int
    loss_scale: float


class NoiseMeter:
    """Measures the squared norm of the true gradient and the variance of a sample's, in some of the batches.

    The estimates are exponentially weighted means over measurements, the same on all members.
    """

    def __init__(self) -> None:
        self.measurements = 0
        """How many there have been."""
        self._batches = 0  # trained on
        self._weight = self._square = self._variance = 0.0
        self._unread: list[tuple[torch.Tensor, int, int]] = []  # s and |g|², k, B; on the gradients' device
        self._measures = False
        self.share = 0.0
        """Weight of this member's gradients in the batch."""
        self.factor = 1.0
        """By which gradients that are summed over the batch have yet to be multiplied."""
        self._loss_scale = 1.0
        self._batch: Batch
        self._parts: list[torch.Tensor] = []
        self._kept: _Kept | None = None

    # In a step.

    def open_batch(self, batch: Batch, loss_scale: float) -> None:
        """Begin a batch, whose losses are multiplied by a scale."""
        self._batch = batch
        self._loss_scale = loss_scale
        self.share = sum(piece.weight for piece in batch.pieces) / batch.samples
        self.factor = 1.0
        self._parts = []
        self._measures = self._batches % self._interval == 0

    def close_batch(self) -> None:
        """Note that the gradients of the batch are complete; further ones of the same batch are not measured."""
        self._batches += 1
        self._measures = False

    @property
    def measures_shards(self) -> bool:
        """Whether this batch is measured between the members' shards, if there are several members."""
        return self._measures and self._batch.shards > 1

    @property
    def measures_pieces(self) -> bool:
        """Whether this batch is measured between the pieces, if there is one member."""
        return self._measures and len(self._batch.pieces) > 1

    def shard_term(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the term of s, a scalar, of some of this member's gradients, weighted by its share of the batch."""
        return torch.dot(flat, flat) / self.share if self.share else flat.new_zeros(())

    def add_shards(self, terms: Sequence[torch.Tensor], sums: Sequence[torch.Tensor]) -> None:
        """Add a measurement between shards, from terms that were summed over the members, and summed gradients."""
        small, big = _total(terms), _total([torch.dot(each, each) for each in sums])
        scale = self._loss_scale**2
        small, big = small * self.factor / scale, big * self.factor**2 / scale
        self._add(small, big, self._batch.shards, self._batch.samples)

    def add_piece(self, parameters: Sequence[nn.Parameter], weight: float) -> None:
        """Add the gradients of a piece, which are weighted by its share of the batch: its `weight`."""
        if weight:
            self._parts.append(self._squared_norm(_gradients(parameters)) / (weight / self._batch.samples))

    def add_whole(self, parameters: Sequence[nn.Parameter]) -> None:
        """Add the gradients of a batch that one member has computed."""
        kept, self._kept = self._kept, None
        if len(self._parts) > 1:
            big = self._squared_norm(_gradients(parameters))
            self._add(_total(self._parts) * self.factor, big, len(self._parts), self._batch.samples)
        elif self._measures:
            gradients = _gradients(parameters)
            copies = [None if gradient is None else gradient.clone() for gradient in gradients]
            square = self._squared_norm(gradients)
            self._kept = _Kept(self._batches, copies, square, self._batch.samples, self._loss_scale)
        elif kept is not None and kept.number == self._batches - 1:
            self._add_successive(kept, _gradients(parameters))

    def _add_successive(self, kept: _Kept, gradients: Sequence[torch.Tensor | None]) -> None:
        """Add a measurement between two successive batches, as if they were parts of one."""
        samples = kept.samples + self._batch.samples
        one, other = kept.samples / samples, self._batch.samples / samples
        pairs = [(a, b) for a, b in zip(kept.gradients, gradients, strict=True) if a is not None and b is not None]
        if not pairs:
            return
        product = _total([torch.dot(a.reshape(-1), b.reshape(-1)) for a, b in pairs])
        product = product / (kept.loss_scale * self._loss_scale)
        square = self._squared_norm(gradients)
        big = one**2 * kept.square + other**2 * square + 2 * one * other * product
        self._add(one * kept.square + other * square, big, 2, samples)

    def _add(self, small: torch.Tensor, big: torch.Tensor, parts: int, samples: int) -> None:
        self._unread.append((torch.stack([small, big]), parts, samples))

    def _squared_norm(self, gradients: Sequence[torch.Tensor | None]) -> torch.Tensor:
        norm = get_total_norm([gradient for gradient in gradients if gradient is not None])
        return (norm.double() / self._loss_scale) ** 2

    @property
    def _interval(self) -> int:
        return _EVERY_AT_FIRST if self._batches < _SOON else _EVERY

    # The estimate.

    @property
    def estimate(self) -> tuple[float, float] | None:
        """Squared norm of the true gradient, and variance of a sample's gradient; ``None`` before enough batches.

        Neither is negative, although single measurements may be.
        """
        self._read()
        if self.measurements < _LEAST:
            return None
        return max(self._square / self._weight, 0.0), max(self._variance / self._weight, 0.0)

    def _read(self) -> None:
        if not self._unread:
            return
        values = torch.stack([value for value, _, _ in self._unread]).tolist()  # one wait for a GPU
        sizes = [(parts, samples) for _, parts, samples in self._unread]
        self._unread = []
        for (small, big), (parts, samples) in zip(values, sizes, strict=True):
            square, variance = (parts * big - small) / (parts - 1), (small - big) * samples / (parts - 1)
            if math.isfinite(square) and math.isfinite(variance):  # else a GradScaler skips the step
                self._weight = _DECAY * self._weight + 1.0
                self._square = _DECAY * self._square + square
                self._variance = _DECAY * self._variance + variance
                self.measurements += 1

    def state(self) -> dict[str, Any]:
        """Return the measurements as plain values."""
        self._read()
        return {
            "batches": self._batches,
            "measurements": self.measurements,
            "weight": self._weight,
            "square": self._square,
            "variance": self._variance,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Load measurements."""
        self._unread, self._kept, self._parts = [], None, []
        self._batches, self.measurements = int(state["batches"]), int(state["measurements"])
        self._weight, self._square = float(state["weight"]), float(state["square"])
        self._variance = float(state["variance"])


def _gradients(parameters: Sequence[nn.Parameter]) -> list[torch.Tensor | None]:
    return [dense_gradient(parameter) for parameter in parameters]


def _total(scalars: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack([scalar.reshape(()).to(scalars[0].device, torch.float64) for scalar in scalars]).sum()


def dense_gradient(parameter: nn.Parameter) -> torch.Tensor | None:
    """Return a parameter's gradient, or ``None``.

    Raises
    ------
    UsageError
        The gradient is sparse.
    """
    if parameter.grad is not None and parameter.grad.is_sparse:
        raise UsageError("session.step: sparse gradients cannot be summed over processes; use sparse=False")
    return parameter.grad
