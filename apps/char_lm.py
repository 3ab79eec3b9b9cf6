"""A character-level language model: a small transformer on real English.

The text is the Python language documentation, which is part of every CPython (``pydoc_data.topics``).
``python apps/char_lm.py`` is ordinary PyTorch in one process. `train` is the same training job for FreeTrain:
compare its lines with those of `main`.
"""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.optim import AdamW
from torch.utils.data import DataLoader, Dataset

from freetrain_parsl import training_app

if TYPE_CHECKING:
    from freetrain_parsl.training.session import TrainingSession


class Text(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Non-overlapping windows of a text: characters and their next characters, both of shape (context,).

    Parameters
    ----------
    characters
        Number of characters of the text to use, from its start.
    context
        Characters in a window.
    """

    def __init__(self, characters: int, context: int) -> None:
        from pydoc_data.topics import topics

        text = "\n".join(topics[name] for name in sorted(topics))[:characters]
        self.alphabet = sorted(set(text))
        index = {character: number for number, character in enumerate(self.alphabet)}
        self.codes = torch.tensor([index[character] for character in text])
        self.context = context

    def __len__(self) -> int:
        return (len(self.codes) - 1) // self.context

    def __getitem__(self, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        begin, end = position * self.context, (position + 1) * self.context
        return self.codes[begin:end], self.codes[begin + 1 : end + 1]


class Block(nn.Module):
    """Causal self-attention and a feed-forward network, each with a preceding layer norm and a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (n, length, width) to the same shape."""
        n, length, width = x.shape
        heads = self.query_key_value(self.norm1(x)).view(n, length, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        seen = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(n, length, width))
        return x + self.feed_forward(self.norm2(x))


class Transformer(nn.Module):
    """A decoder: predicts each next character from the preceding ones."""

    def __init__(self, alphabet: int, context: int, width: int = 64, heads: int = 4, blocks: int = 2) -> None:
        super().__init__()
        self.character = nn.Embedding(alphabet, width)
        self.place = nn.Parameter(torch.zeros(context, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(blocks)), nn.LayerNorm(width))
        self.score = nn.Linear(width, alphabet)

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        """Map codes, shape (n, length), to scores, shape (n, alphabet, length)."""
        x = self.character(codes) + self.place[: codes.shape[1]]
        return self.score(self.blocks(x)).transpose(1, 2)


@training_app(max_nodes=4)
def train(
    session: TrainingSession, *, epochs: int = 3, batch_size: int = 16, lr: float = 2e-3, width: int = 64,
    context: int = 64, characters: int = 200_000,
) -> dict[str, Any]:  # fmt: skip
    """Train on the idle nodes of a cluster: on any number of nodes, in any number of fragments."""
    text = Text(characters, context)
    model, _optimizer = session.prepare(Transformer(len(text.alphabet), context, width), AdamW, lr=lr)
    data = session.loader(text, batch_size=batch_size)
    for _epoch in session.epochs(epochs):
        for x, y in data:
            session.step(cross_entropy(model(x), y))
        session.log(bits_per_character=session.metrics["loss"] / math.log(2))
    return session.metrics


def main() -> None:
    """Train in this process, without FreeTrain."""
    parser = argparse.ArgumentParser(description="Train a character-level language model in plain PyTorch.")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--characters", type=int, default=200_000)
    options = parser.parse_args()

    text = Text(options.characters, options.context)
    model = Transformer(len(text.alphabet), options.context, options.width)
    optimizer = AdamW(model.parameters(), lr=options.lr)
    data = DataLoader(text, batch_size=options.batch_size, shuffle=True)
    for epoch in range(options.epochs):
        for x, y in data:
            loss = cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        print(f"epoch {epoch:2d}  loss {loss.item():.3f}  bits per character {loss.item() / math.log(2):.3f}")


if __name__ == "__main__":
    main()
