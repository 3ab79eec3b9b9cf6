"""The training jobs of `peers.py`, the same for each way: models, data, what a sample costs, and what is recorded.

A process records which samples it has trained, so that useful, repeated and lost samples are counted from outside, in
the same manner for each way. Steps mostly sleep: eight virtual nodes fit on two cores, and a sample costs the same
node-seconds on any number of nodes. Gradients and losses are real.
"""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

SAMPLE_SECONDS = 0.05  # node-seconds that a sample costs
BATCH = 48
SAMPLES = 480  # of an epoch: 24 node-seconds; divisible by the batch, and batches by 1 to 4 nodes
WORDS, CONTEXT = 32, 16


@dataclass(frozen=True)
class Job:
    """A training job of the comparison: name, kind of model, epochs, learning rate and seed."""

    name: str
    kind: str
    epochs: int
    lr: float
    seed: int = 0

    @property
    def node_seconds(self) -> float:
        """What it costs, without starts and pauses."""
        return self.epochs * SAMPLES * SAMPLE_SECONDS


def jobs_of(node_seconds: float) -> list[Job]:
    """Return eight jobs of different lengths that need these node-seconds together."""
    shares = {"digits": 2, "char_lm": 5, "transformer": 12, "digits_long": 9, **{f"sweep{n}": 3 for n in range(4)}}
    epoch = SAMPLES * SAMPLE_SECONDS
    whole = sum(shares.values())
    kinds = {"digits_long": "digits"}
    return [
        Job(
            name,
            kinds.get(name, "digits" if name.startswith("sweep") else name),
            max(1, round(node_seconds * share / whole / epoch)),
            0.02 * (1 + int(name[-1])) if name.startswith("sweep") else 0.05,
        )
        for name, share in shares.items()
    ]


class Numbered(Dataset[tuple[torch.Tensor, torch.Tensor, int]]):
    """Samples with their numbers: (inputs, labels, number)."""

    def __init__(self, kind: str) -> None:
        generator = torch.Generator().manual_seed(1)
        if kind == "digits":
            self.x = torch.randn(SAMPLES, 1, 8, 8, generator=generator)
            self.y = (self.x.mean((2, 3)).squeeze(1) * 20).long().clamp(-4, 5) + 4
        else:
            followers = torch.randint(WORDS, (WORDS, 2), generator=generator)
            words = torch.randint(WORDS, (SAMPLES, CONTEXT + 1), generator=generator)
            for at in range(1, CONTEXT + 1):
                choice = (torch.rand(SAMPLES, generator=generator) < 0.2).long()
                words[:, at] = followers[words[:, at - 1], choice]
            self.x, self.y = words[:, :-1], words[:, 1:]

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        return self.x[number], self.y[number], number


class CharacterModel(nn.Module):
    """An LSTM over characters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 32)
        self.lstm = nn.LSTM(32, 64, batch_first=True)
        self.head = nn.Linear(64, WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Map words, shape (n, context), to scores, shape (n, words, context)."""
        return self.head(self.lstm(self.embedding(words))[0]).transpose(1, 2)


class Transformer(nn.Module):
    """A small causal transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 32)
        self.places = nn.Parameter(torch.zeros(CONTEXT, 32))
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Map words, shape (n, context), to scores, shape (n, words, context)."""
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        return self.head(self.layers(self.embedding(words) + self.places, mask, is_causal=True)).transpose(1, 2)


def model_of(job: Job) -> nn.Module:
    """Return the model of a job with its first weights."""
    torch.manual_seed(job.seed)
    if job.kind == "char_lm":
        return CharacterModel()
    if job.kind == "transformer":
        return Transformer()
    return nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 10))


def pretend(samples: int) -> None:
    """Take the time that a node needs for some samples."""
    time.sleep(SAMPLE_SECONDS * samples)


class Record:
    """What a process has trained, in a file of its own below ``seen/JOB`` of a directory."""

    def __init__(self, directory: str, job: Job) -> None:
        self._directory, self._job = Path(directory), job
        node = os.environ.get("SLURMD_NODENAME", socket.gethostname())
        folder = self._directory / "seen" / job.name
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / f"{node}-{os.getpid()}-{time.time_ns()}.jsonl"

    def trained(self, epoch: int, numbers: Iterable[int]) -> None:
        """Note samples whose step was made."""
        line = json.dumps({"time": time.time(), "epoch": epoch, "samples": [int(number) for number in numbers]})
        with self._file.open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")

    def finished(self, model: nn.Module) -> None:
        """Note the loss at the end, on all samples."""
        aside = self._directory / f"{self._job.name}.{os.getpid()}"
        aside.write_text(json.dumps({"time": time.time(), "loss": final_loss(model, self._job)}), encoding="utf-8")
        aside.replace(self._directory / f"{self._job.name}.finished")


def final_loss(model: nn.Module, job: Job) -> float:
    """Return the mean loss on all samples."""
    data = Numbered(job.kind)
    model.eval()
    with torch.no_grad():
        return float(cross_entropy(model(data.x), data.y))


def undisturbed_losses(job: Job, orders: int = 5) -> list[float]:
    """Return the final losses of a job that nothing disturbs, in one process, for different orders of the data.

    Each way draws its own order, so one run is no reference: the spread of these is what the order alone changes.
    """
    return [_undisturbed_loss(job, order) for order in range(orders)]


def _undisturbed_loss(job: Job, seed: int) -> float:
    model = model_of(job)
    optimizer = torch.optim.SGD(model.parameters(), lr=job.lr, momentum=0.9)
    data = Numbered(job.kind)
    for epoch in range(job.epochs):
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(1000 * seed + epoch))
        for batch in order.split(BATCH):
            optimizer.zero_grad()
            cross_entropy(model(data.x[batch]), data.y[batch]).backward()
            optimizer.step()
    return final_loss(model, job)


def read_finished(directory: Path, job: Job, until: float) -> float | None:
    """Return the final loss of a job that had finished by a time, otherwise ``None``."""
    file = directory / f"{job.name}.finished"
    if not file.exists():
        return None
    told = json.loads(file.read_text(encoding="utf-8"))
    return float(told["loss"]) if told["time"] <= until else None


def read_steps(file: Path) -> Iterator[tuple[float, set[tuple[int, int]]]]:
    """Yield the steps of a process: time, and samples as (epoch, number)."""
    for line in file.read_text(encoding="utf-8").splitlines(keepends=True):
        if line.endswith("\n"):  # otherwise its process was killed while it wrote
            step = json.loads(line)
            yield step["time"], {(step["epoch"], number) for number in step["samples"]}


def read_records(directory: Path, job: Job, until: float, in_vain: Collection[str] = ()) -> dict[str, int]:
    """Count what a job has trained until a time.

    Parameters
    ----------
    directory
        Of the way.
    job
        The job.
    until
        The time, seconds since the epoch.
    in_vain
        Names of the records, without suffix, of processes that ended without having saved anything.

    Returns
    -------
    dict
        ``trained``: samples of all steps; ``useful``: different samples of different epochs; ``repeated``: samples that
        were trained again, or in vain; ``lost``: samples of complete epochs (a later one has begun, or the job is
        finished) that were never trained.
    """
    seen: set[tuple[int, int]] = set()
    trained = 0
    for file in (directory / "seen" / job.name).glob("*.jsonl"):
        for at, samples in read_steps(file):
            if at <= until:
                trained += len(samples)
                if file.stem not in in_vain:
                    seen |= samples
    finished = read_finished(directory, job, until) is not None
    begun = job.epochs if finished else max((epoch for epoch, _ in seen), default=0)
    complete = sum(epoch < begun for epoch, _ in seen)
    return {
        "trained": trained,
        "useful": len(seen),
        "repeated": trained - len(seen),
        "lost": begun * SAMPLES - complete,
    }
