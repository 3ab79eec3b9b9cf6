"""The gradient noise scale: its estimates against the exact values, and what it costs a training job."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

from freetrain_parsl.training.data.order import Batch, Order, Piece
from freetrain_parsl.training.step.gradient_noise import NoiseMeter

LENGTH = 4000
DIMENSIONS = 30


class Quadratic:
    """The loss of a sample is |w - x|² / 2, so its gradient is w - x; the exact values are known at every w."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        spread = torch.linspace(0.5, 2.0, DIMENSIONS)
        self.samples = spread * torch.randn(LENGTH, DIMENSIONS, generator=generator)
        self.w = nn.Parameter(torch.full((DIMENSIONS,), 0.4))
        self.square = float((self.w.detach() - self.samples.mean(0)).square().sum())
        self.variance = float(self.samples.var(0).sum())

    def gradient(self, positions: torch.Tensor) -> torch.Tensor:
        return self.w.detach() - self.samples[positions].mean(0)


def of_group(quadratic: Quadratic, meters: list[NoiseMeter], batches: list[Batch]) -> None:
    """Measure one batch between the members' shards, as `OverlappedSum` does."""
    shares = []
    for meter, batch in zip(meters, batches, strict=True):
        meter.open_batch(batch, 1.0)
        shares.append(sum(p.weight / batch.samples * quadratic.gradient(p.positions) for p in batch.pieces))
    if meters[0].measures_shards:
        terms = [meter.shard_term(share) for meter, share in zip(meters, shares, strict=True)]
        for meter in meters:
            meter.add_shards([torch.stack(terms).sum()], [torch.stack(shares).sum(0)])
    for meter in meters:
        meter.close_batch()


def of_one(quadratic: Quadratic, meter: NoiseMeter, batch: Batch, loss_scale: float = 1.0) -> None:
    """Measure one batch in one process, as `BatchRunner` does."""
    meter.open_batch(batch, loss_scale)
    total = torch.zeros(DIMENSIONS)
    for piece in batch.pieces:
        share = loss_scale * piece.weight / batch.samples * quadratic.gradient(piece.positions)
        total += share
        if meter.measures_pieces:
            quadratic.w.grad = share
            meter.add_piece([quadratic.w], piece.weight)
    quadratic.w.grad = total
    meter.add_whole([quadratic.w])
    meter.close_batch()


def measured(way: str, batch_size: int, epochs: int = 12) -> tuple[Quadratic, list[tuple[float, float]]]:
    """Return the estimates after each of some epochs at constant parameters."""
    quadratic = Quadratic()
    members = 3 if way == "shards" else 1
    order = Order(LENGTH, batch_size, seed=1, micro_batch=batch_size // 3 if way == "pieces" else None)
    meters, estimates = [NoiseMeter() for _ in range(members)], []
    for epoch in range(epochs):
        positions = order.epoch(epoch)
        for begin in range(0, LENGTH, batch_size):
            batches = [order.batch(positions, begin, rank, members) for rank in range(members)]
            if members > 1:
                of_group(quadratic, meters, batches)
            else:
                of_one(quadratic, meters[0], batches[0], loss_scale=64.0)
        estimate = meters[0].estimate
        assert all(meter.estimate == estimate for meter in meters)
        if estimate is not None:
            estimates.append(estimate)
    return quadratic, estimates


@pytest.mark.parametrize("way", ["shards", "pieces", "successive"])
@pytest.mark.parametrize("batch_size", [pytest.param(10, marks=pytest.mark.slow), 40])
def test_the_estimates_are_those_of_a_known_quadratic(way: str, batch_size: int) -> None:
    """On average over the epochs; parts of 10 or 40 samples divided by three differ in size."""
    quadratic, estimates = measured(way, batch_size)
    square, variance = (sum(column) / len(column) for column in zip(*estimates, strict=True))
    assert variance == pytest.approx(quadratic.variance, rel=0.05)
    assert square == pytest.approx(quadratic.square, rel=0.2)


def test_there_is_no_estimate_before_enough_measurements() -> None:
    meter = NoiseMeter()
    order = Order(LENGTH, 10, seed=1)
    of_one(Quadratic(), meter, order.batch(order.epoch(0), 0, 0, 1))
    assert meter.estimate is None


def test_measurements_continue_from_their_state() -> None:
    quadratic, order = Quadratic(), Order(LENGTH, 40, seed=1, micro_batch=20)
    positions = order.epoch(0)
    batches = [order.batch(positions, begin, 0, 1) for begin in range(0, LENGTH, 40)]
    whole, first, second = NoiseMeter(), NoiseMeter(), NoiseMeter()
    for batch in batches:
        of_one(quadratic, whole, batch)
    for batch in batches[:50]:
        of_one(quadratic, first, batch)
    second.load(first.state())
    for batch in batches[50:]:
        of_one(quadratic, second, batch)
    assert second.state() == whole.state()


def test_gradients_that_are_not_finite_are_left_out() -> None:
    quadratic, order, meter = Quadratic(), Order(LENGTH, 40, seed=1, micro_batch=20), NoiseMeter()
    quadratic.samples[0] = torch.inf
    for begin in range(0, LENGTH, 40):
        of_one(quadratic, meter, order.batch(torch.arange(LENGTH), begin, 0, 1))
    estimate = meter.estimate
    assert estimate is not None
    assert all(0 < value < 1e6 for value in estimate)


def test_a_gradient_is_compared_only_with_that_of_the_next_batch() -> None:
    """The batches of a group in between are not measured in one process."""
    quadratic, order, meter = Quadratic(), Order(LENGTH, 40, seed=1), NoiseMeter()
    batch = order.batch(order.epoch(0), 0, 0, 1)
    of_one(quadratic, meter, batch)
    meter.open_batch(batch, 1.0)
    meter.close_batch()
    meter.open_batch(batch, 1.0)
    quadratic.w.grad = quadratic.gradient(batch.positions)
    meter._measures = False
    meter.add_whole([quadratic.w])
    assert meter.state()["measurements"] == 0


def test_only_some_batches_are_measured() -> None:
    quadratic, order, meter = Quadratic(), Order(LENGTH, 40, seed=1, micro_batch=20), NoiseMeter()
    batch = order.batch(order.epoch(0), 0, 0, 1)
    counts = []
    for _ in range(200):
        of_one(quadratic, meter, batch)
        counts.append(meter.state()["measurements"])
    steps = [number for number, (before, after) in enumerate(pairwise(counts), 1) if after > before]
    assert [b - a for a, b in pairwise(steps)] == [2] * 31 + [8] * (len(steps) - 32)


def test_a_member_without_samples_has_no_part() -> None:
    meter = NoiseMeter()
    idle = Piece(torch.zeros(1, dtype=torch.int64), 0, 2, last_of_shard=True, last=True)
    meter.open_batch(Batch(torch.arange(2), (idle,), 2), 1.0)
    assert meter.measures_shards
    assert float(meter.shard_term(torch.zeros(4))) == 0.0
