"""What the graph of a loss tells: how its shares are weighed, and when that has to be said."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everywhere
from torch.utils.checkpoint import checkpoint

from freetrain_parsl.errors import UsageError
from freetrain_parsl.training.step.loss_kind import LossReader

if TYPE_CHECKING:
    from collections.abc import Callable

SAMPLES = 5

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
weight = net[0].weight
x, target = torch.randn(SAMPLES, 6), torch.randn(SAMPLES, 3)
y = torch.tensor([0, 1, 2, 1, 0])
words = torch.tensor([0, 1, 2, -100] * SAMPLES)
weights = torch.tensor([1.0, 5.0, 20.0])
kept = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0])


def classes(**options: Any) -> torch.Tensor:
    return F.cross_entropy(net(x), y, **options)


def tokens(**options: Any) -> torch.Tensor:
    return F.cross_entropy(net(x).repeat_interleave(4, 0), words, **options)


MEANS: list[Callable[[], torch.Tensor]] = [
    lambda: F.mse_loss(net(x), target),
    lambda: classes(label_smoothing=0.1),
    lambda: classes(reduction="sum") / len(x),
    lambda: classes(reduction="none").mean(),
    lambda: (classes(reduction="none") * torch.ones(SAMPLES)).sum() / SAMPLES,
    lambda: F.kl_div(net(x).log_softmax(1), target.softmax(1), reduction="batchmean"),
    lambda: F.cross_entropy(net(x), target.softmax(1), weight=weights),
    lambda: net(x).sum(1).mean(),
    lambda: net(x).mean(0).sum(),
    lambda: -net(x).logsumexp(1).mean(),
    lambda: 1 - net(x).mean(),
    lambda: torch.stack([net(x).mean(), F.mse_loss(net(x), target)]).sum(),
    lambda: torch.sum(torch.tensor([1.0, 2.0]) * torch.stack([classes(), net(x).mean()])),
    lambda: F.mse_loss(net(x), target) + 0.1 * sum(p.pow(2).sum() for p in net.parameters()),  # type: ignore[return-value]
    lambda: F.mse_loss(net(x), target) + 0.1 * sum(p.abs().sum() for p in net.parameters()),  # type: ignore[return-value]
    lambda: F.mse_loss(net(x), target) + (torch.ones_like(weight) * (weight - weight.detach()) ** 2).sum(),
    lambda: F.mse_loss(net(x), target) + (weight.T @ weight - torch.eye(6)).pow(2).sum(),
    lambda: torch.ones(()),
    lambda: checkpoint(lambda x: F.cross_entropy(net(x), y), x, use_reentrant=False),
]


@pytest.mark.parametrize("loss", MEANS)
def test_means_and_penalties_on_parameters_are_weighed_by_samples(loss: Callable[[], torch.Tensor]) -> None:
    assert read(LossReader(), loss()) == ("mean", None)


@pytest.mark.parametrize(
    ("loss", "items"),
    [
        (classes, SAMPLES),
        (lambda: classes(weight=weights), 32),
        (lambda: classes(ignore_index=1), 3),
        (tokens, 15),
        (lambda: (-net[2].bias[0]).exp() * tokens() + net[2].bias[0], 15),
        (lambda: -0.5 * tokens(), 15),
        (lambda: tokens() + 0.1 * weight.pow(2).sum(), 15),
        (lambda: tokens() + 0.1 * weight.norm(), 15),
        (lambda: F.cross_entropy(net(x).view(SAMPLES, 3, 1).expand(-1, -1, 4), words.view(SAMPLES, 4)), 15),
    ],
)
def test_cross_entropy_alone_knows_how_many_items_it_is_a_mean_over(
    loss: Callable[[], torch.Tensor], items: float
) -> None:
    assert read(LossReader(), loss()) == ("mean", items)


@pytest.mark.parametrize(
    "loss",
    [
        lambda: classes(reduction="sum"),
        lambda: classes(reduction="sum", weight=weights),
        lambda: classes(reduction="sum") / 1,  # a library's number of accumulated batches
        lambda: classes(reduction="sum") + F.mse_loss(net(x), target, reduction="sum"),
        lambda: F.binary_cross_entropy_with_logits(net(x), target.sigmoid(), reduction="sum"),
    ],
)
def test_sums_of_torch_are_sums(loss: Callable[[], torch.Tensor]) -> None:
    assert read(LossReader(), loss()) == ("sum", None)


UNCLEAR = r'is the loss a sum over the samples, or a mean\?.*reduction="sum"\) or reduction="mean"'
MIXED = r"adds a sum over samples and something that is none.*divide the sum by the number of samples"
DIVIDED = r"a sum that is divided by something else than the number of samples.*items=mask\.sum\(\)"
PART = r"only a part of the loss: .*items=\(y != ignore_index\).sum\(\)"


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda: net(x).pow(2).sum(), UNCLEAR),
        (lambda: net(x).mean(1).sum(), UNCLEAR),
        (lambda: -net(x).log_softmax(1)[range(SAMPLES), y].sum(), UNCLEAR),
        (lambda: F.l1_loss(net(x), target, reduction="sum"), UNCLEAR),
        (lambda: 0.5 * F.mse_loss(net(x), target, reduction="sum"), UNCLEAR),  # or is it 1 / len(x)?
        (lambda: classes(reduction="sum") - 0.5 * net(x).sum(), UNCLEAR),
        (lambda: (net(x).pow(2).mean(1) * kept).sum() / kept.sum(), DIVIDED),
        (lambda: classes(reduction="sum") / 7, DIVIDED),
        (lambda: classes() + net(x).pow(2).sum(), MIXED),
        (lambda: classes(reduction="sum") + weight.pow(2).sum(), MIXED),
        (lambda: F.mse_loss(net(x), target) + (net[0].bias[:6] * x).sum(), MIXED),
        (lambda: torch.stack([classes(reduction="sum"), net(x).mean()]).sum(), MIXED),
        (lambda: tokens() + net(x).pow(2).mean(), PART),
        (lambda: tokens(label_smoothing=0.1), PART),
        (lambda: classes(weight=weights) + classes(), PART),
    ],
)
def test_what_cannot_be_known_is_asked_for_in_one_line(loss: Callable[[], torch.Tensor], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        read(LossReader(), loss())
    assert "\n" not in str(caught.value)


SUMS: list[Callable[[], torch.Tensor]] = [
    lambda: F.mse_loss(net(x), target, reduction="sum"),
    lambda: (net(x) - target).pow(2).sum(),
    lambda: classes(reduction="sum") + 0.1 * net(x).pow(2).sum(),
]


@pytest.mark.parametrize("loss", SUMS)
def test_a_sum_over_a_share_that_is_divided_by_the_whole_batch_is_asked_about(loss: Callable[[], torch.Tensor]) -> None:
    """Weighed as a mean, its gradient would be as many times too small as there are shares."""
    assert read(LossReader(), loss() / 10, batch=5) == ("mean", None), "of two elements for each sample"
    with pytest.raises(UsageError, match=r"a sum that is divided by 10, the samples of the whole batch, of which 5"):
        read(LossReader(), loss() / 10, batch=10)
    with pytest.raises(UsageError, match=r"divided by 10, the samples of the whole batch"):
        read(LossReader(), F.mse_loss(net(x), target) + loss() / 10, batch=10)
    assert read(LossReader(), loss() / 5, batch=10) == ("mean", None)


@pytest.mark.parametrize("loss", SUMS[:2])
def test_a_mean_over_as_many_elements_as_the_batch_has_samples_is_one(loss: Callable[[], torch.Tensor]) -> None:
    assert read(LossReader(), loss() / 15, batch=15) == ("mean", None)


def test_a_loss_is_looked_at_again_when_its_batch_is_divided() -> None:
    reader = LossReader()
    for _ in range(40):
        read(reader, F.mse_loss(net(x), target) + F.mse_loss(net(x), target, reduction="sum") / 10, batch=SAMPLES)
    with pytest.raises(UsageError, match="the samples of the whole batch"):
        read(reader, F.mse_loss(net(x), target) + F.mse_loss(net(x), target, reduction="sum") / 10, batch=10)


def read(reader: LossReader, loss: torch.Tensor, batch: int = SAMPLES) -> Any:
    return reader.weighing(loss, None, None, samples=SAMPLES, batch=batch, step=0, gathered=False)


def test_composed_losses_are_looked_at_again_now_and_then() -> None:
    reader = LossReader()
    for _ in range(40):
        assert read(reader, F.mse_loss(net(x), target) + net(x).norm()) == ("mean", None)
    results = []
    with pytest.raises(UsageError, match="adds a sum"):
        results.extend(read(reader, F.mse_loss(net(x), target) + net(x).sum()) for _ in range(100))


def test_items_are_read_in_each_batch() -> None:
    reader = LossReader()
    for number in range(100):
        count = number % SAMPLES + 1
        labels = torch.where(torch.arange(SAMPLES) < count, y, -100)
        assert read(reader, F.cross_entropy(net(x), labels) + 0.1 * weight.pow(2).sum()) == ("mean", count)
