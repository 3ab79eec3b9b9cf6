"""Training functions that do not survive being moved, each with its mended twin; the line at fault is marked.

The twin of ``name`` is ``name_mended``: it does what the message on ``name`` says.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss, normalize
from torch.optim import SGD
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

MARK = "# the cause"
STEPS = 0
SEEN = {"batches": 0}


def data() -> TensorDataset:
    x = torch.randn(160, 6, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x.argmax(1) % 3)


def begin(session: Any, model: nn.Module | None = None, **options: Any) -> Any:
    model, optimizer = session.prepare(model or nn.Linear(6, 3), SGD, lr=0.1)
    return model, optimizer, session.loader(data(), batch_size=16, **options)


# ── variables ─────────────────────────────────────────────────────────────────────────────────────


def counter(session: Any) -> None:
    model, optimizer, loader = begin(session)
    it = 0
    for _ in session.epochs(4):
        for x, y in loader:
            for group in optimizer.param_groups:
                group["lr"] = 0.1 / (1 + it)
            session.step(cross_entropy(model(x), y))
            it += 1  # the cause


def counter_mended(session: Any) -> None:
    model, optimizer, loader = begin(session)
    state = session.state(it=0)
    for _ in session.epochs(4):
        for x, y in loader:
            for group in optimizer.param_groups:
                group["lr"] = 0.1 / (1 + state.it)
            session.step(cross_entropy(model(x), y))
            state.it += 1


def patience(session: Any) -> float:
    model, _, loader = begin(session)
    best = 1e9
    for _ in session.epochs(4):
        for x, y in loader:
            session.step(cross_entropy(model(x), y))
        if session.metrics["loss"] > best:
            break
        best = min(best, session.metrics["loss"])  # the cause
    return best


def patience_mended(session: Any) -> float:
    model, _, loader = begin(session)
    state = session.state(best=1e9)
    for _ in session.epochs(4):
        for x, y in loader:
            session.step(cross_entropy(model(x), y))
        if session.metrics["loss"] > state.best:
            break
        state.best = min(state.best, session.metrics["loss"])
    return float(state.best)


def numbered(session: Any) -> None:
    model, optimizer, loader = begin(session)
    for _ in session.epochs(4):
        for i, (x, y) in enumerate(loader):  # the cause
            optimizer.param_groups[0]["lr"] = 0.1 * (1 - i / 10)
            session.step(cross_entropy(model(x), y))


def numbered_mended(session: Any) -> None:
    model, optimizer, loader = begin(session)
    for _ in session.epochs(4):
        for x, y in loader:
            i = session.position.samples // 16
            optimizer.param_groups[0]["lr"] = 0.1 * (1 - i / 10)
            session.step(cross_entropy(model(x), y))


def averaged(session: Any) -> list[float]:
    model, _, loader = begin(session)
    average = nn.Linear(6, 3)
    average.load_state_dict(model.state_dict())
    for _ in session.epochs(4):
        for x, y in loader:
            if session.step(cross_entropy(model(x), y)):
                with torch.no_grad():
                    for a, p in zip(average.parameters(), model.parameters(), strict=True):
                        a.lerp_(p, 0.02)
    return [float(p.detach().sum()) for p in average.parameters()]


def averaged_mended(session: Any) -> list[float]:
    model = nn.Linear(6, 3)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.98))
    session.prepare(model, SGD(model.parameters(), lr=0.1), average)
    loader = session.loader(data(), batch_size=16)
    for _ in session.epochs(4):
        for x, y in loader:
            if session.step(cross_entropy(model(x), y)):
                average.update_parameters(model)
    return [float(p.detach().sum()) for p in average.parameters()]


def global_variable(session: Any) -> None:
    global STEPS  # noqa: PLW0603 - it is what is wrong
    model, _, loader = begin(session)
    for _ in session.epochs(4):
        for x, y in loader:
            STEPS += 1  # the cause
            session.step(cross_entropy(model(x), y) / (1 + STEPS))


def global_variable_mended(session: Any) -> None:
    model, _, loader = begin(session)
    for _ in session.epochs(4):
        for x, y in loader:
            session.step(cross_entropy(model(x), y) / (2 + session.metrics["steps"]))


def count() -> None:
    SEEN["batches"] += 1


def global_of_a_helper(session: Any) -> None:
    model, _, loader = begin(session)
    for _ in session.epochs(4):
        for x, y in loader:
            count()
            session.step(cross_entropy(model(x), y) / (1 + SEEN["batches"]))


class Annealed(nn.Linear):
    """Counts its calls in an attribute."""

    calls: Any = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1  # the cause
        return super().forward(x) * (1 + 1 / (1 + self.calls))


def attribute_of_the_model(session: Any) -> None:
    model, _, loader = begin(session, Annealed(6, 3))
    for _ in session.epochs(4):
        for x, y in loader:
            session.step(cross_entropy(model(x), y))


class AnnealedByBuffer(nn.Linear):
    """Counts its calls in a buffer."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
        return super().forward(x) * (1 + 1 / (1 + self.calls))


def attribute_of_the_model_mended(session: Any) -> None:
    model, _, loader = begin(session, AnnealedByBuffer(6, 3))
    for _ in session.epochs(4):
        for x, y in loader:
            session.step(cross_entropy(model(x), y))


class Trainer:
    """A loop in a class, which counts its steps."""

    def __init__(self, session: Any) -> None:
        self.session, self.it = session, 0
        self.model, self.optimizer, self.loader = begin(session)

    def fit(self) -> None:
        for _ in self.session.epochs(4):
            for x, y in self.loader:
                self.train_on(x, y)

    def train_on(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.it += 1  # the cause
        self.optimizer.param_groups[0]["lr"] = 0.1 / self.it
        self.session.step(cross_entropy(self.model(x), y))


def attribute_of_a_trainer(session: Any) -> None:
    Trainer(session).fit()


def closure(session: Any) -> None:
    model, _, loader = begin(session)
    it = 0

    def weight() -> float:
        nonlocal it
        it += 1  # the cause
        return 1 / it

    for _ in session.epochs(4):
        for x, y in loader:
            session.step(cross_entropy(model(x), y) * weight())


def closure_mended(session: Any) -> None:
    model, _, loader = begin(session)
    state = session.state(it=0)

    def weight() -> float:
        state.it += 1
        return 1 / state.it

    for _ in session.epochs(4):
        for x, y in loader:
            session.step(cross_entropy(model(x), y) * weight())


def own_generator(session: Any) -> None:
    model, _, loader = begin(session)
    rng = np.random.default_rng(0)  # the cause
    for _ in session.epochs(4):
        for x, y in loader:
            session.step(cross_entropy(model(x), y) * rng.uniform())


def own_generator_mended(session: Any) -> None:
    model, _, loader = begin(session)
    for _ in session.epochs(4):
        for x, y in loader:
            position = session.position
            rng = np.random.default_rng((position.epoch, position.samples))
            session.step(cross_entropy(model(x), y) * rng.uniform())


def iterator(session: Any) -> None:
    model, _, loader = begin(session)
    numbers = itertools.count(1)  # the cause
    for _ in session.epochs(4):
        for x, y in loader:
            session.step(cross_entropy(model(x), y) / next(numbers))


def iterator_mended(session: Any) -> None:
    model, _, loader = begin(session)
    for _ in session.epochs(4):
        for x, y in loader:
            session.step(cross_entropy(model(x), y) / (1 + session.metrics["steps"]))


def python_generator(session: Any) -> None:
    def warmup() -> Any:
        number = 0
        while True:
            number += 1
            yield 1 / number

    model, _, loader = begin(session)
    weights = warmup()  # the cause
    for _ in session.epochs(4):
        for x, y in loader:
            session.step(cross_entropy(model(x), y) * next(weights))


def hidden(session: Any) -> None:
    model = nn.ModuleDict({"cell": nn.GRUCell(6, 8), "out": nn.Linear(8, 3)})
    model, _, loader = begin(session, model)
    h = torch.zeros(1, 8)
    for _ in session.epochs(4):
        for x, y in loader:
            new = model["cell"](x, h.expand(len(x), 8))
            session.step(cross_entropy(model["out"](new), y))
            h = session.all_reduce(new.detach().sum(0, keepdim=True)) / 16  # the cause


def hidden_mended(session: Any) -> None:
    model = nn.ModuleDict({"cell": nn.GRUCell(6, 8), "out": nn.Linear(8, 3)})
    model, _, loader = begin(session, model)
    state = session.state(h=torch.zeros(1, 8))
    for _ in session.epochs(4):
        for x, y in loader:
            new = model["cell"](x, state.h.expand(len(x), 8))
            if session.step(cross_entropy(model["out"](new), y)):
                state.h = session.all_reduce(new.detach().sum(0, keepdim=True)) / 16


def recent(session: Any) -> None:
    model, optimizer, loader = begin(session)
    losses: deque[float] = deque(maxlen=3)  # the cause
    for _ in session.epochs(4):
        for x, y in loader:
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + sum(losses))
            if session.step(cross_entropy(model(x), y)):
                losses.append(session.batch_loss)


def recent_mended(session: Any) -> None:
    model, optimizer, loader = begin(session)
    losses: list[float] = []
    state = session.state(losses=losses)
    for _ in session.epochs(4):
        for x, y in loader:
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + sum(state.losses))
            if session.step(cross_entropy(model(x), y)):
                state.losses = [*state.losses, session.batch_loss][-3:]


# ── losses ────────────────────────────────────────────────────────────────────────────────────────


def contrastive(session: Any) -> None:
    model, _, loader = begin(session)
    for _ in session.epochs(4):
        for x, _ in loader:
            a, b = normalize(model(x), dim=1), normalize(model(x.flip(1)), dim=1)
            session.step(cross_entropy(a @ b.T / 0.1, torch.arange(len(a))))  # the cause


def contrastive_mended(session: Any) -> None:
    model, _, loader = begin(session)
    for _ in session.epochs(4):
        for x, _ in loader:
            a, b = normalize(model(x), dim=1), normalize(model(x.flip(1)), dim=1)
            a, b = session.gather(a), session.gather(b)
            session.step(cross_entropy(a @ b.T / 0.1, torch.arange(len(a))), reduction="batch")


def penalty(session: Any) -> None:
    model, _, loader = begin(session)
    for _ in session.epochs(4):
        for x, y in loader:
            out = model(x)
            loss = cross_entropy(out, y)
            size = out.norm()  # the cause
            session.step(loss + 0.1 * size)


def penalty_mended(session: Any) -> None:
    model, _, loader = begin(session)
    for _ in session.epochs(4):
        for x, y in loader:
            out = model(x)
            loss = cross_entropy(out, y)
            size = out.norm(dim=1).mean()
            session.step(loss + 0.1 * size)


# ── replicas ──────────────────────────────────────────────────────────────────────────────────────


def rank_rate(session: Any) -> None:
    model, optimizer, loader = begin(session)
    for _ in session.epochs(4):
        for x, y in loader:
            optimizer.param_groups[0]["lr"] = 0.1 + 0.1 * session.rank
            session.step(cross_entropy(model(x), y))


def rank_rate_mended(session: Any) -> None:
    model, optimizer, loader = begin(session)
    for _ in session.epochs(4):
        for x, y in loader:
            optimizer.param_groups[0]["lr"] = session.broadcast(0.1 + 0.1 * session.rank)
            session.step(cross_entropy(model(x), y))


def noise(session: Any) -> None:
    model, _, loader = begin(session)
    for _ in session.epochs(4):
        for x, y in loader:
            if session.backward(cross_entropy(model(x), y)):
                for p in model.parameters():
                    p.grad.add_(torch.randn_like(p) * 0.1)
            session.step()


def unguarded_gradients(session: Any) -> None:
    model, _, loader = begin(session)
    for _ in session.epochs(4):
        for x, y in loader:
            session.backward(cross_entropy(model(x), y))
            model.weight.grad.mul_(0.5)  # the cause
            session.step()


def unguarded_gradients_mended(session: Any) -> None:
    model, _, loader = begin(session)
    for _ in session.epochs(4):
        for x, y in loader:
            if session.backward(cross_entropy(model(x), y)):
                model.weight.grad.mul_(0.5)
            session.step()


def noise_mended(session: Any) -> None:
    model, _, loader = begin(session)
    for _ in session.epochs(4):
        for x, y in loader:
            generator = torch.Generator().manual_seed(session.metrics["steps"])
            if session.backward(cross_entropy(model(x), y)):
                for p in model.parameters():
                    p.grad.add_(torch.randn(p.shape, generator=generator) * 0.1)
            session.step()


def mean_buffer(session: Any) -> None:
    model = nn.Linear(6, 3)
    model.register_buffer("mean", torch.zeros(6))
    model, _, loader = begin(session, model)
    for _ in session.epochs(4):
        for x, y in loader:
            model.mean.lerp_(x.mean(0), 0.1)
            session.step(cross_entropy(model(x - model.mean), y))


def mean_buffer_mended(session: Any) -> None:
    model = nn.Linear(6, 3)
    model.register_buffer("mean", torch.zeros(6))
    model, _, loader = begin(session, model)
    for _ in session.epochs(4):
        for x, y in loader:
            total, count = session.all_reduce(x.sum(0)), session.all_reduce(torch.tensor(len(x)))
            model.mean.lerp_(total / count, 0.1)
            session.step(cross_entropy(model(x - model.mean), y))


# ── what the session does not know, or cannot repeat ──────────────────────────────────────────────


def unseeded(session: Any) -> None:
    model, _, loader = begin(session)
    rng = np.random.default_rng()
    for _ in session.epochs(4):
        for x, y in loader:
            session.step(cross_entropy(model(x), y) * rng.uniform())


def unseeded_mended(session: Any) -> None:
    model, _, loader = begin(session)
    for _ in session.epochs(4):
        for x, y in loader:
            session.step(cross_entropy(model(x), y) * (0.5 + session.broadcast(random.random())))


def skips_by_own_loss(session: Any) -> None:
    model, _, loader = begin(session)
    for _ in session.epochs(4):
        for x, y in loader:
            loss = cross_entropy(model(x), y)
            if loss.item() > 1.25:
                continue
            session.step(loss)


def skips_by_own_loss_mended(session: Any) -> None:
    model, _, loader = begin(session)
    for _ in session.epochs(4):
        for x, y in loader:
            loss = cross_entropy(model(x), y)
            session.step(loss * float(session.all_reduce(loss.detach() * len(x)) / 16 <= 1.25))


# ── what holds ────────────────────────────────────────────────────────────────────────────────────


def only_printed(session: Any) -> None:
    """Has a counter that reaches nothing: a note."""
    model, _, loader = begin(session)
    printed = 0
    for _ in session.epochs(4):
        for x, y in loader:
            session.step(cross_entropy(model(x), y))
            printed += 1


def patience_never_used(session: Any) -> None:
    """Count epochs that are not better, of which there are none in so few: a note."""
    model, _, loader = begin(session)
    best = session.state(loss=float("inf"))
    bad = 0
    for _ in session.epochs(4):
        for x, y in loader:
            session.step(cross_entropy(model(x), y))
        if session.metrics["loss"] < best.loss:
            best.loss, bad = session.metrics["loss"], 0
        else:
            bad += 1
            if bad >= 2:
                break


def norm_and_dropout(session: Any) -> Any:
    """Depends by design on how batches are divided."""
    net = nn.Sequential(nn.Linear(6, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 3))
    session.prepare(net, torch.optim.Adam(net.parameters(), lr=0.01))
    loader = session.loader(data(), batch_size=16)
    for _ in session.epochs(4):
        for x, y in loader:
            session.step(cross_entropy(net(x), y))
    return session.metrics


def sharded(session: Any) -> Any:
    """Shards the model; its norm computes in float32, and its counter begins anew."""
    net, it = _sharded_net(session), 0
    optimizer = session.prepare(net, torch.optim.Adam(net.parameters(), lr=0.01))[1]
    loader = session.loader(data(), batch_size=16)
    for _ in session.epochs(4):
        for x, y in loader:
            optimizer.param_groups[0]["lr"] = 0.01 / (1 + it)
            session.step(cross_entropy(net(x), y))
            it += 1  # the cause


def sharded_evenly(session: Any, width: int = 32) -> None:
    """Shard columns, whose number the processes must divide."""
    from torch.distributed.tensor import Shard

    def placement(parameter: nn.Parameter) -> Shard | None:
        return Shard(1) if parameter.shape == (3, width) else None

    sharded_mended(session, width=width, shard_placement_fn=placement)


def sharded_in_pairs(session: Any) -> None:
    """Shard for groups of two."""
    sharded_mended(session, reshard_after_forward=2)


def sharded_mended(session: Any, *, width: int = 32, **options: Any) -> Any:
    """Keep the counter in the session."""
    net = _sharded_net(session, width, **options)
    optimizer = session.prepare(net, torch.optim.Adam(net.parameters(), lr=0.01))[1]
    loader, state = session.loader(data(), batch_size=16), session.state(it=0)
    for _ in session.epochs(4):
        for x, y in loader:
            optimizer.param_groups[0]["lr"] = 0.01 / (1 + state.it)
            session.step(cross_entropy(net(x), y))
            state.it += 1


def _sharded_net(session: Any, width: int = 32, **options: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    net = nn.Sequential(nn.Linear(6, width), Float32Norm(), nn.Linear(width, 3))
    return fully_shard(net, mesh=session.mesh, **options)


class Float32Norm(nn.Module):
    """Computes in float32, whatever it is given, as the norms of language models."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Divide by the root of the mean square."""
        exact = x.float()
        return (exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def only_in_float32(session: Any) -> None:
    """Refuses float64."""
    model, _, loader = begin(session)
    for _ in session.epochs(4):
        for x, y in loader:
            if x.dtype != torch.float32:
                raise TypeError("this kernel takes float32 only")
            session.step(cross_entropy(model(x), y))


def checks_its_steps(session: Any) -> None:
    """Cannot be cut short."""
    model, _, loader = begin(session)
    for _ in session.epochs(2):
        for x, y in loader:
            session.step(cross_entropy(model(x), y))
    assert session.metrics["steps"] == 20


def endless(session: Any) -> None:
    """Never makes a step."""
    begin(session)
    while True:
        pass


def regression(session: Any, width: int = 8, rates: tuple[float, ...] = (0.1,)) -> Any:
    """Have arguments."""
    net = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 1))
    session.prepare(net, SGD(net.parameters(), lr=rates[0]))
    loader = session.loader(TensorDataset(data().tensors[0], data().tensors[0].sum(1, keepdim=True)), batch_size=16)
    for _ in session.epochs(4):
        for x, y in loader:
            session.step(mse_loss(net(x), y))
    return session.metrics
