"""A loop in the style of the Hugging Face examples: batches are dictionaries, and the model returns its loss.

The model is a small stand-in with the same interface, so that nothing has to be downloaded; any
``transformers.AutoModelFor…`` can replace it. ``python apps/hf_style.py`` is ordinary PyTorch in one process.
`train` is the same training job for FreeTrain, in which the session has the role of ``accelerate``.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset

from freetrain_parsl import training_app

if TYPE_CHECKING:
    from freetrain_parsl.training.session import TrainingSession

WORDS, LENGTH, LABELS = 50, 12, 2


class Sentences(Dataset[dict[str, torch.Tensor]]):
    """Synthetic tokenized sentences; the label is whether most words are from the upper half of the vocabulary.

    Parameters
    ----------
    samples
        Number of sentences.
    seed
        Seed of the random generator.
    """

    def __init__(self, samples: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.words = torch.randint(1, WORDS, (samples, LENGTH), generator=generator)
        self.lengths = torch.randint(LENGTH // 2, LENGTH + 1, (samples,), generator=generator)

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, position: int) -> dict[str, torch.Tensor]:
        mask = torch.arange(LENGTH) < self.lengths[position]
        words = self.words[position] * mask
        label = (words > WORDS // 2).sum() * 2 > mask.sum()
        return {"input_ids": words, "attention_mask": mask, "labels": label.long()}


@dataclass
class Output:
    """Output of the model: ``loss`` if labels were given, and scores, shape (n, labels)."""

    loss: torch.Tensor | None
    logits: torch.Tensor


class Classifier(nn.Module):
    """An encoder layer on word vectors, the mean over the words, and a linear layer."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.encoder = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.score = nn.Linear(width, LABELS)

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor | None = None
    ) -> Output:
        """Map words and mask, shape (n, length), to scores."""
        x = self.encoder(self.words(input_ids), src_key_padding_mask=~attention_mask)
        shares = attention_mask / attention_mask.sum(1, keepdim=True)
        logits = self.score((x * shares[..., None]).sum(1))
        return Output(None if labels is None else cross_entropy(logits, labels), logits)


def make(lr: float, steps: int) -> tuple[Classifier, AdamW, LambdaLR]:
    """Return the model, an optimizer with weight decay for matrices only, and a linear schedule with warm-up."""
    model = Classifier()
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    optimizer = AdamW([{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}], lr=lr)
    warm_up = max(1, steps // 10)
    scheduler = LambdaLR(optimizer, lambda step: min((step + 1) / warm_up, max(0.0, (steps - step) / steps)))
    return model, optimizer, scheduler


def accuracy(model: nn.Module, data: DataLoader[dict[str, torch.Tensor]]) -> float:
    """Return the fraction of correctly labeled sentences."""
    device = next(model.parameters()).device
    model.eval()
    right = total = 0
    with torch.no_grad():
        for batch in data:
            labels = batch.pop("labels")
            logits = model(**{name: tensor.to(device) for name, tensor in batch.items()}).logits
            right += int((logits.argmax(1).cpu() == labels).sum())
            total += len(labels)
    model.train()
    return right / total


@training_app(max_nodes=4)
def train(
    session: TrainingSession, *, epochs: int = 4, batch_size: int = 32, lr: float = 3e-3, samples: int = 2000
) -> dict[str, Any]:
    """Train on the idle nodes of a cluster: on any number of nodes, in any number of fragments."""
    sentences, validation = Sentences(samples, 0), DataLoader(Sentences(400, 1), 200)
    model, optimizer, scheduler = make(lr, epochs * -(-samples // batch_size))
    model, optimizer, scheduler = session.prepare(model, optimizer, scheduler)
    data = session.loader(sentences, batch_size)
    for _epoch in session.epochs(epochs):
        for batch in data:
            session.backward(model(**batch).loss)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            session.step()
            scheduler.step()
        session.log(accuracy=accuracy(model, validation))
    return session.metrics


def main() -> None:
    """Train in this process, without FreeTrain."""
    parser = argparse.ArgumentParser(description="Train a Hugging Face-style model in plain PyTorch.")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--samples", type=int, default=2000)
    options = parser.parse_args()

    sentences, validation = Sentences(options.samples, 0), DataLoader(Sentences(400, 1), 200)
    model, optimizer, scheduler = make(options.lr, options.epochs * -(-options.samples // options.batch_size))
    data = DataLoader(sentences, options.batch_size, shuffle=True)
    for epoch in range(options.epochs):
        for batch in data:
            loss = model(**batch).loss
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        print(f"epoch {epoch:2d}  loss {loss.item():.3f}  accuracy {accuracy(model, validation):.3f}")


if __name__ == "__main__":
    main()
