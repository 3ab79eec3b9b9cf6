"""Training functions in the manner of PyTorch's examples, small, as members of arrays."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

WORDS, LENGTH = 9, 5


def drawn(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def labels(count: int, classes: int) -> torch.Tensor:
    return torch.randint(classes, (count,), generator=torch.Generator().manual_seed(2))


def states(session: Any, *models: nn.Module) -> dict[str, Any]:
    return {
        "losses": [row["loss"] for row in session.metrics["history"]],
        "models": [{name: value.clone() for name, value in model.state_dict().items()} for model in models],
    }


def digits(session: Any, *, lr: float, epochs: int = 2) -> dict[str, Any]:
    """Train a network of convolutions with dropout by Adadelta and a schedule, with a validation after each epoch."""
    model = nn.Sequential(
        *(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.MaxPool2d(2), nn.Dropout(0.25), nn.Flatten()),
        *(nn.Linear(16, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3), nn.LogSoftmax(1)),
    ).double()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
    session.prepare(model, optimizer, schedule)
    images, targets = drawn(40, 1, 8, 8), labels(40, 3)
    data = session.loader(TensorDataset(images, targets), 8)
    for _ in session.epochs(epochs):
        model.train()
        for x, y in data:
            session.step(functional.nll_loss(model(x), y))
        schedule.step()
        model.eval()
        with torch.no_grad():
            session.log(right=(model(images).argmax(1) == targets).sum().item())
    return states(session, model)


class Language(nn.Module):
    def __init__(self, cells: str) -> None:
        super().__init__()
        self.drop, self.table = nn.Dropout(0.2), nn.Embedding(WORDS, 6)
        self.cells = getattr(nn, cells)(6, 6, 2, dropout=0.2)
        self.score = nn.Linear(6, WORDS)
        self.score.weight = self.table.weight

    def forward(self, words: torch.Tensor, hidden: Any) -> tuple[torch.Tensor, Any]:
        output, hidden = self.cells(self.drop(self.table(words)), hidden)
        return self.score(self.drop(output)).view(-1, WORDS), hidden


def text() -> TensorDataset:
    """Return pieces of four texts, one after another."""
    words = torch.randint(WORDS, (4, 6 * LENGTH + 1), generator=torch.Generator().manual_seed(1))
    pieces = [words[:, at : at + LENGTH + 1] for at in range(0, 6 * LENGTH, LENGTH)]
    return TensorDataset(torch.cat(pieces))


def language(session: Any, *, lr: float, cells: str, epochs: int = 2) -> dict[str, Any]:
    """Carry the hidden state from piece to piece, with tied weights and clipping."""
    model = Language(cells).double()
    session.prepare(model, torch.optim.SGD(model.parameters(), lr=lr))
    state = session.state(hidden=None)
    data = session.loader(text(), 4, shuffle=False)
    for _ in session.epochs(epochs):
        for (piece,) in data:
            zeros = torch.zeros(2, 4, 6, dtype=torch.float64)
            if session.position.samples == 0:
                state.hidden = (zeros, zeros) if cells == "LSTM" else zeros
            output, hidden = model(piece[:, :-1].t(), state.hidden)
            state.hidden = tuple(part.detach() for part in hidden) if cells == "LSTM" else hidden.detach()
            targets = piece[:, 1:].t().flatten()
            session.backward(functional.cross_entropy(output, targets), items=len(targets))
            nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            session.step()
    return states(session, model)


class MaskKept(nn.Module):
    """Keeps the mask of the last length."""

    def __init__(self) -> None:
        super().__init__()
        self.mask: torch.Tensor | None = None
        self.table = nn.Embedding(WORDS, 8)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 8, 0.2)
        self.score = nn.Linear(8, WORDS)

    def forward(self, words: torch.Tensor) -> Any:
        if self.mask is None or len(self.mask) != len(words):
            self.mask = torch.ones(len(words), len(words), dtype=torch.float64).tril().log()
        return self.score(self.encoder(self.table(words), self.mask))


def masked(session: Any, *, lr: float, epochs: int = 2) -> dict[str, Any]:
    model = MaskKept().double()
    session.prepare(model, torch.optim.SGD(model.parameters(), lr=lr))
    data = session.loader(text(), 4, shuffle=False)
    for _ in session.epochs(epochs):
        for (piece,) in data:
            targets = piece[:, 1:].t().flatten()
            loss = functional.cross_entropy(model(piece[:, :-1].t()).flatten(0, 1), targets)
            session.step(loss, items=len(targets))
    return {**states(session, model), "mask": model.mask}


class Variational(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.mean, self.spread = nn.Linear(12, 8), nn.Linear(8, 3), nn.Linear(8, 3)
        self.decoder = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 12), nn.Sigmoid())

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = functional.relu(self.encoder(x))
        mean, spread = self.mean(hidden), self.spread(hidden)
        return self.decoder(mean + torch.randn_like(mean) * (spread / 2).exp()), mean, spread


def autoencoder(session: Any, *, lr: float, epochs: int = 2) -> dict[str, Any]:
    """Sum the loss over the samples, and draw samples between the epochs."""
    model = Variational().double()
    session.prepare(model, torch.optim.Adam(model.parameters(), lr=lr))
    samples = []
    data = session.loader(TensorDataset(drawn(40, 12).sigmoid()), 8)
    for _ in session.epochs(epochs):
        for (x,) in data:
            found, mean, spread = model(x)
            loss = functional.binary_cross_entropy(found, x, reduction="sum")
            session.step(loss - 0.5 * (1 + spread - mean.square() - spread.exp()).sum(), reduction="sum")
        with torch.no_grad():
            samples.append(model.decoder(torch.randn(4, 3, dtype=torch.float64)))
    return {**states(session, model), "samples": samples}


def adversaries(session: Any, *, lr: float, epochs: int = 2) -> dict[str, Any]:
    """Train two networks of convolutions in turns, each with its optimizer."""
    generator = nn.Sequential(
        nn.ConvTranspose2d(3, 4, 4, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.ConvTranspose2d(4, 1, 4, 2, 1),
    ).double()
    critic = nn.Sequential(
        *(nn.Conv2d(1, 4, 4, 2, 1, bias=False), nn.BatchNorm2d(4), nn.LeakyReLU(0.2, inplace=True), nn.Conv2d(4, 1, 4)),
        *(nn.Sigmoid(), nn.Flatten(0)),
    ).double()
    optimizers = [torch.optim.Adam(net.parameters(), lr=lr, betas=(0.5, 0.999)) for net in (generator, critic)]
    session.prepare(generator, critic, *optimizers)
    data = session.loader(TensorDataset(drawn(32, 1, 8, 8)), 8)
    for _ in session.epochs(epochs):
        for (real,) in data:
            label = torch.full((len(real),), 1.0, dtype=torch.float64)
            loss = functional.binary_cross_entropy(critic(real), label)
            fake = generator(torch.randn(len(real), 3, 1, 1, dtype=torch.float64))
            loss = loss + functional.binary_cross_entropy(critic(fake.detach()), 0 * label)
            session.step(loss, optimizer=optimizers[1])
            session.step(functional.binary_cross_entropy(critic(fake), label), optimizer=optimizers[0])
    return states(session, generator, critic)


class Graph(nn.Module):
    """Two layers that multiply with a sparse matrix."""

    def __init__(self, *, dense: bool = True) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(drawn(rows, columns)) for rows, columns in ((6, 4), (4, 3)))
        self.drop, self.dense = nn.Dropout(0.5), dense

    def forward(self, features: torch.Tensor, edges: torch.Tensor) -> Any:
        hidden = functional.relu(torch.spmm(edges, torch.mm(features, self.first)))
        output = (edges @ (self.drop(hidden) @ self.second)).log_softmax(1)
        return output if self.dense else output.to_sparse()


def graph(
    session: Any,
    *,
    lr: float,
    layout: torch.layout = torch.sparse_coo,
    seed: int = 1,
    dense: bool = True,
    epochs: int = 6,
) -> dict[str, Any]:
    """Train on all nodes at once; each training job makes the matrices by itself."""
    torch.manual_seed(1)
    edges = (drawn(20, 20, seed=seed) > 1) + torch.eye(20, dtype=torch.float64)
    features = (drawn(20, 6) > 1).double()
    edges, features = (edges / edges.sum(1)).to_sparse(layout=layout), features.to_sparse(layout=layout)
    model, targets = Graph(dense=dense), labels(20, 3)
    session.prepare(model, torch.optim.Adam(model.parameters(), lr=lr, weight_decay=5e-4))
    data = session.loader(TensorDataset(torch.arange(15)), 15, shuffle=False)
    for _ in session.epochs(epochs):
        for (nodes,) in data:
            output = model(features, edges).to_dense()
            session.step(functional.nll_loss(output[nodes], targets[nodes]))
    return states(session, model)


class Patches(nn.Module):
    """Cuts images into patches, after a token and positions of its own, that it adds in place."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.norm, self.score = nn.Linear(16, 8), nn.LayerNorm(8), nn.Linear(8, 3)
        self.token, self.places = nn.Parameter(drawn(1, 1, 8)), nn.Parameter(drawn(1, 5, 8))
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.1)

    def forward(self, images: torch.Tensor) -> Any:
        patches = images.unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 1, 4, 5).contiguous()
        tokens = torch.cat((self.token.expand(len(images), -1, -1), self.patch(patches.view(len(images), 4, -1))), 1)
        tokens += self.places
        normed = self.norm(tokens)
        return self.score((self.attention(normed, normed, normed)[0] + tokens)[:, 0])


def vision(session: Any, *, lr: float, epochs: int = 2) -> dict[str, Any]:
    model = Patches().double()
    session.prepare(model, torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=0.03))
    data = session.loader(TensorDataset(drawn(40, 1, 8, 8), labels(40, 3)), 8)
    for _ in session.epochs(epochs):
        for images, targets in data:
            session.step(functional.cross_entropy(model(images), targets))
        model.eval()  # with gradients, as in the example
        model(drawn(4, 1, 8, 8)).sum().item()
        model.train()
    return states(session, model)
