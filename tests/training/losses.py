"""Training jobs whose gradients are easily wrong on several processes, and the plain loop that they are compared with.

In a separate module because the processes of the crew import it.
"""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy, cross_entropy, mse_loss, normalize
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Subset, TensorDataset
from verbs import Sentences, flat, pass_gate, tagger, token_loss

from freetrain_parsl.training.step import gradients

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SAMPLES = 53
SMALL_BUCKETS = 64
"""Bytes: each parameter has a bucket of its own."""


def points() -> TensorDataset:
    x = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    return TensorDataset(x, (x[:, :3] + 0.5 * x[:, 3:]).argmax(1))


class Net(nn.Module):
    """With a block that is used several times, and a weight that is used in two places."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.block, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.double()

    def repeated(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.block(hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.repeated(torch.tanh(self.first(x))))


class PlainSession:
    """The verbs of a session, as a plain loop has them."""

    def __init__(self) -> None:
        self.metrics: dict[str, Any] = {"steps": 0, "history": []}

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer, *others: Any) -> None:
        self.optimizer = optimizer

    def loader(self, dataset: Any, batch_size: int, **_options: Any) -> DataLoader[Any]:
        return DataLoader(dataset, batch_size)

    def epochs(self, count: int) -> range:
        return range(count)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def step(self, loss: torch.Tensor | Callable[[], torch.Tensor], **_options: Any) -> bool:
        def closure() -> Any:
            self.optimizer.zero_grad()
            value = loss() if callable(loss) else loss
            value.backward()  # type: ignore[no-untyped-call]  # torch's own
            return value

        self.optimizer.step(closure)  # type: ignore[arg-type]  # returns a tensor
        self.metrics["steps"] += 1
        return True


# ── losses ────────────────────────────────────────────────────────────────────────────────────────

Loss = tuple[torch.Tensor, dict[str, Any]]


def checkpointed(session: Any, net: Net, x: torch.Tensor, y: torch.Tensor) -> Loss:
    """Apply a block three times, checkpointed."""
    hidden = net.first(x)
    for _ in range(3):
        hidden = checkpoint(net.repeated, hidden, use_reentrant=True)
    return cross_entropy(net.last(hidden), y), {}


def tied(session: Any, net: Net, x: torch.Tensor, y: torch.Tensor) -> Loss:
    """Use a weight inside and outside a checkpointed block."""
    hidden = checkpoint(net.repeated, torch.tanh(net.first(x)), use_reentrant=True)
    return cross_entropy(net.last(torch.tanh(hidden @ net.block.weight)), y), {}


def checkpointed_later(session: Any, net: Net, x: torch.Tensor, y: torch.Tensor) -> Loss:
    """Begin in the middle to checkpoint the block."""
    if session.metrics["steps"] < 5:
        return cross_entropy(net(x), y), {}
    return checkpointed(session, net, x, y)


def tempered(session: Any, net: Net, x: torch.Tensor, y: torch.Tensor) -> Loss:
    """Learn a temperature that is in no model."""
    return cross_entropy(net(x) * session.scale, y), {}


def summed(session: Any, net: Net, x: torch.Tensor, y: torch.Tensor) -> Loss:
    return cross_entropy(net(x), y, reduction="sum") + mse_loss(net(x), x[:, :3], reduction="sum"), {}


def elbo(session: Any, net: Net, x: torch.Tensor, y: torch.Tensor) -> Loss:
    """Add two sums, of which torch shows only one."""
    out = net(x)
    target = nn.functional.one_hot(y, 3).double()
    return binary_cross_entropy(out.sigmoid(), target, reduction="sum") + out.pow(2).sum(), {"reduction": "sum"}


def class_weighted(session: Any, net: Net, x: torch.Tensor, y: torch.Tensor) -> Loss:
    return cross_entropy(net(x), y, weight=torch.tensor([1.0, 5.0, 20.0], dtype=torch.float64)), {}


def unlabeled(session: Any, net: Net, x: torch.Tensor, y: torch.Tensor) -> Loss:
    """Leave out some of the targets."""
    return cross_entropy(net(x), torch.where(x[:, 0] > 0.5, -100, y)), {}


def penalized(session: Any, net: Net, x: torch.Tensor, y: torch.Tensor) -> Loss:
    """Add penalties on the weights to a mean over class weights."""
    loss, options = class_weighted(session, net, x, y)
    square: Any = sum(parameter.pow(2).sum() for parameter in net.parameters())
    return loss + 0.01 * square + 0.01 * net.first.weight.norm(), options


def statistic(session: Any, net: Net, x: torch.Tensor, y: torch.Tensor) -> Loss:
    """Add a penalty on the mean output over the whole batch, and on its square."""
    out = net(x)
    count = session.all_reduce(torch.tensor(float(len(x)), dtype=torch.float64))
    mean = session.all_reduce(out.sum(0)) / count
    variance = session.all_reduce((out - mean).pow(2).sum(0)) / count
    return cross_entropy(out, y) + (mean.pow(2) + (variance - 1).pow(2)).mean(), {"reduction": "mean"}


def contrastive(session: Any, net: Net, x: torch.Tensor, y: torch.Tensor) -> Loss:
    """Compare each sample with all others of the batch: NT-Xent."""
    one, other = session.gather(normalize(net(x), dim=1)), session.gather(normalize(net(x.flip(1)), dim=1))
    both = torch.cat([one, other])
    same = torch.arange(len(both)).roll(len(one))
    likeness = (both @ both.T / 0.5).masked_fill(torch.eye(len(both), dtype=torch.bool), float("-inf"))
    return cross_entropy(likeness, same), {}


def contrastive_twice(session: Any, net: Net, x: torch.Tensor, y: torch.Tensor) -> Loss:
    """Add a loss of this share to one of the whole batch, with a checkpointed block."""
    hidden = checkpoint(net.repeated, net.first(x), use_reentrant=True)
    hidden = checkpoint(net.repeated, hidden, use_reentrant=True)
    whole, labels = session.gather(hidden), session.gather(y)
    distances = (whole[:, None] - whole[None]).pow(2).mean(2)
    return cross_entropy(net.last(hidden), y) + (distances * (labels[:, None] == labels)).mean(), {}


def tokens(session: Any, net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Loss:
    return token_loss(net, x, y), {}


def quasi_newton(session: Any, net: Net, x: torch.Tensor, y: torch.Tensor) -> Loss:
    return cross_entropy(net(x), y), {}


def quasi_newton_weighted(session: Any, net: Net, x: torch.Tensor, y: torch.Tensor) -> Loss:
    return class_weighted(session, net, x, y)


LOSSES: dict[str, Callable[..., Loss]] = {
    each.__name__: each
    for each in (
        checkpointed, tied, checkpointed_later, tempered, summed, elbo, class_weighted, unlabeled, penalized, statistic,
        contrastive, contrastive_twice, tokens, quasi_newton, quasi_newton_weighted,
    )
}  # fmt: skip


def learn(
    session: Any,
    *,
    loss: str,
    epochs: int = 2,
    batch_size: int = 8,
    samples: int = SAMPLES,
    gates: dict[int, Path] | None = None,
    overlap: bool = True,
    die: str = "",
) -> dict[str, Any]:
    """Train on one of these losses; return the parameters and metrics.

    `overlap` divides the gradients into small buckets, so that most are sent while the backward pass runs. The second
    process dies in its fifth batch, when the verb `die` is called, or in the backward pass.
    """
    before = gradients._BUCKET_BYTES
    gradients._BUCKET_BYTES = SMALL_BUCKETS if overlap else before
    try:
        return _learn(session, loss, epochs, batch_size, samples, gates, die)
    finally:
        gradients._BUCKET_BYTES = before


def _learn(
    session: Any, loss: str, epochs: int, batch_size: int, samples: int, gates: dict[int, Path] | None, die: str
) -> dict[str, Any]:
    net: Any = tagger() if loss == "tokens" else Net()
    session.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
    parameters = [*net.parameters(), *([session.scale] if loss == "tempered" else [])]
    optimizer: torch.optim.Optimizer
    if loss.startswith("quasi_newton"):
        optimizer = torch.optim.LBFGS(parameters, lr=0.5, max_iter=4, line_search_fn="strong_wolfe")
    else:
        optimizer = torch.optim.SGD(parameters, lr=0.01 if loss in ("summed", "elbo") else 0.1, momentum=0.9)
    session.prepare(net, optimizer)
    data = session.loader(
        Subset(Sentences() if loss == "tokens" else points(), range(samples)), batch_size, shuffle=False
    )
    losses = []
    compute = LOSSES[loss] if not die else dying(session, LOSSES[loss], die)
    for _ in session.epochs(epochs):
        for x, y in data:
            if loss.startswith("quasi_newton"):
                made = session.step(lambda x=x, y=y: compute(session, net, x, y)[0])
            else:
                value, options = compute(session, net, x, y)
                made = session.step(value, **options)
            if made and not isinstance(session, PlainSession):
                losses.append(session.batch_loss)
            pass_gate(session, gates)
    return {
        "parameters": torch.cat([flat(net), session.scale.detach()[None]]),
        "losses": losses,
        "late": sends_late(session),
        **session.metrics,
    }


def dying(session: Any, compute: Callable[..., Loss], verb: str) -> Callable[..., Loss]:
    """Let the second process die at a point of the fifth batch."""
    calls = 0

    def compute_and_die(session: Any, net: Net, x: torch.Tensor, y: torch.Tensor) -> Loss:
        nonlocal calls
        if (session.rank, session.world_size, session.metrics["steps"]) != (1, 3, 4):
            return compute(session, net, x, y)
        calls += 1
        if verb == "third evaluation" and calls == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        loss, options = compute(_Dying(session, verb), net, x, y)
        if verb == "backward":
            net.last.bias.register_hook(lambda _gradient: os.kill(os.getpid(), signal.SIGKILL))
        return loss, options

    return compute_and_die


class _Dying:
    """A session of which one verb kills this process, the second time it is called."""

    def __init__(self, session: Any, verb: str) -> None:
        self._session, self._verb, self._calls = session, verb, 0

    def __getattr__(self, name: str) -> Any:
        self._calls += name == self._verb
        if self._calls == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return getattr(self._session, name)


def sends_late(session: Any) -> bool:
    """Return whether the session has noticed that gradients change after they are complete."""
    return not isinstance(session, PlainSession) and session._runtime.batch_runner._sum._changes_late
