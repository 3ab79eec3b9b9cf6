"""The training jobs of chaos episodes. Their parameters record which samples they were trained on.

`CountedNet.counts` is a parameter with one entry for each epoch and sample. The loss adds the mean of the batch's
entries, so the gradient of an entry is one divided by the batch size, and plain SGD with a learning rate of the batch
size subtracts exactly one each time the sample takes part in a step. The entries are saved, restored, transferred and
rolled back with the other parameters. At the end each must be minus one, regardless of the faults.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import Dataset

from freetrain_parsl.app import training_app
from freetrain_parsl.errors import UsageError, did_you_mean
from freetrain_parsl.training.data.loader_options import LoaderOptions
from tests.support.chaos.claims import claim_slot

if TYPE_CHECKING:
    from freetrain_parsl.training.session import TrainingSession

__all__ = ["BATCH", "SHARED_SUBJECTS", "SUBJECTS", "CountedNet", "NumberedSamples", "Subject", "chosen", "train"]

BATCH = 32
_MOST_LEAKED = 400  # MiB, in one process
_FEATURES, _CLASSES = 24, 4


@dataclass(frozen=True)
class Subject:
    """One training job of an episode.

    Parameters
    ----------
    name, seed
        Name and seed of the training job.
    deterministic
        Whether its parameters must be bitwise identical to an undisturbed run.
    batch_norm
        Whether the model has running statistics.
    pace
        Minimum seconds per batch, so that faults hit the training job while it runs.
    least, most
        Bounds on its size: nodes, or slots where training jobs share nodes.
    leak
        MiB of host memory that each batch leaves behind.
    replicas
        Of a job whose processes hold different parts of the model: the number of replicas where there is room for
        them. One replica has copies on other nodes every few steps. ``None``: each process holds the whole model.
    """

    name: str
    seed: int
    deterministic: bool
    batch_norm: bool
    pace: float
    least: int = 1
    most: int = 3
    leak: int = 0
    replicas: int | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Options of the training app that differ from their defaults."""
        if self.replicas is None:
            return {}
        return {"snapshot_every": 3} if self.replicas == 1 else {"replicas": self.replicas}

    @property
    def sharded(self) -> bool:
        """Whether its processes hold different parts of the model; it then trains in float64, without random numbers.

        Its parameters must be those of an undisturbed run of one process, but for rounding.
        """
        return self.replicas is not None

    def arguments(self, epochs: int, samples: int) -> dict[str, Any]:
        """Return the keyword arguments of `train`, except ``out`` and ``claims``."""
        return {
            "epochs": epochs,
            "samples": samples,
            "deterministic": self.deterministic,
            "batch_norm": self.batch_norm,
            "pace": self.pace,
            "shards": max(4, self.most),
            "leak": self.leak,
            "sharded": self.sharded,
            "smooth": self.sharded,
            "subject": self.name,
        }


SUBJECTS = (
    Subject("exact", 1, deterministic=True, batch_norm=False, pace=0.02),
    Subject("exact-norm", 2, deterministic=True, batch_norm=True, pace=0.02),
    Subject("plain", 3, deterministic=False, batch_norm=False, pace=0.05),
    Subject("plain-norm", 4, deterministic=False, batch_norm=True, pace=0.05),
    Subject("sharded", 5, deterministic=False, batch_norm=False, pace=0.05, replicas=1),
    Subject("replicated", 6, deterministic=False, batch_norm=False, pace=0.05, most=4, replicas=2),
)
"""The training jobs of an episode in which each has whole nodes."""

SHARED_SUBJECTS = (
    Subject("single", 1, deterministic=True, batch_norm=False, pace=0.08, most=1),
    Subject("half", 2, deterministic=True, batch_norm=True, pace=0.08, most=2),
    Subject("node", 3, deterministic=True, batch_norm=False, pace=0.08, least=2, most=4),
    Subject("nodes", 4, deterministic=True, batch_norm=False, pace=0.08, least=4, most=8),
    Subject("leaky", 5, deterministic=True, batch_norm=False, pace=0.12, most=1, leak=40),
    Subject("sharded", 6, deterministic=False, batch_norm=False, pace=0.08, least=2, most=8, replicas=1),
    Subject("replicated", 7, deterministic=False, batch_norm=False, pace=0.08, least=2, most=8, replicas=2),
)
"""The training jobs of an episode in which they share nodes of four slots."""


def chosen(names: str | None, subjects: tuple[Subject, ...]) -> tuple[Subject, ...]:
    """Return the training jobs of an episode with these names, ``sharded,replicated``; ``None``: all.

    Raises
    ------
    UsageError
        A name is not that of one of them.
    """
    if names is None:
        return subjects
    known = {subject.name: subject for subject in subjects}
    for name in names.split(","):
        if name not in known:
            raise UsageError(f"--only: there is no training job {name!r}{did_you_mean(name, known)}")
    return tuple(known[name] for name in names.split(","))


class NumberedSamples(Dataset[tuple[int, torch.Tensor, int]]):
    """A small classification problem whose samples include their index, with random augmentation if not `smooth`."""

    def __init__(self, size: int, *, smooth: bool = False) -> None:
        self._noise = 0.0 if smooth else 0.05
        generator = torch.Generator().manual_seed(11)
        self._inputs = torch.randn(size, _FEATURES, generator=generator)
        self._labels = (self._inputs @ torch.randn(_FEATURES, _CLASSES, generator=generator)).argmax(1)

    def __len__(self) -> int:
        return len(self._inputs)

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, int]:
        return index, self._inputs[index] + self._noise * torch.randn(_FEATURES), int(self._labels[index])


class CountedNet(nn.Module):
    """A small classifier with counts of the samples it was trained on (see the module docstring)."""

    def __init__(self, epochs: int, samples: int, *, batch_norm: bool, smooth: bool = False) -> None:
        super().__init__()
        self._dtype = dtype = torch.float64 if smooth else torch.float32
        self.net = nn.Sequential(
            nn.Linear(_FEATURES, 32),
            nn.BatchNorm1d(32) if batch_norm else nn.Identity(),
            nn.Tanh() if smooth else nn.ReLU(),
            nn.Dropout(0.0 if smooth else 0.1),
            nn.Linear(32, _CLASSES),
        ).to(dtype)
        self.counts = nn.Parameter(torch.zeros(epochs, samples, dtype=dtype))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        logits: torch.Tensor = self.net(inputs.to(self._dtype))
        return logits


@training_app(max_nodes=3)
def train(
    session: TrainingSession,
    *,
    epochs: int,
    samples: int,
    deterministic: bool,
    batch_norm: bool,
    pace: float,
    out: str,
    shards: int = 4,
    leak: int = 0,
    sharded: bool = False,
    smooth: bool = False,
    subject: str = "",
    claims: str | None = None,
) -> dict[str, Any]:
    """Train a `CountedNet` and save its final state to the file `out`; `claims` is the directory of `claim_slot`."""
    if claims is not None:
        claim_slot(Path(claims), subject)
    leaked: list[torch.Tensor] = []
    model = CountedNet(epochs, samples, batch_norm=batch_norm, smooth=smooth)
    if sharded:  # the counts are not: their gradients are exact
        from torch.distributed.fsdp import fully_shard

        fully_shard(model.net, mesh=session.mesh)
    adam = torch.optim.Adam(model.net.parameters(), lr=3e-3)
    model, adam, _, scheduler = session.prepare(
        model,
        adam,
        torch.optim.SGD([model.counts], lr=float(BATCH)),
        torch.optim.lr_scheduler.StepLR(adam, step_size=1, gamma=0.9),
    )
    options: dict[str, Any] = {"deterministic": True, "options": LoaderOptions(shards=shards)} if deterministic else {}
    data = session.loader(NumberedSamples(samples, smooth=smooth), batch_size=BATCH, **options)
    for epoch in session.epochs(epochs):
        for numbers, inputs, labels in data:
            time.sleep(pace)
            if leak and len(leaked) * leak < _MOST_LEAKED:
                leaked.append(torch.ones(leak << 20, dtype=torch.uint8))
            loss = nn.functional.cross_entropy(model(inputs), labels)
            session.step(loss + model.counts[epoch, numbers].mean())
        scheduler.step()
        session.log(lr=scheduler.get_last_lr()[0])
    state = {
        name: value.full_tensor() if sharded and name != "counts" else value
        for name, value in model.state_dict().items()
    }
    if session.is_main_process:
        _save({"model": state, "metrics": dict(session.metrics)}, Path(out))
    return {"steps": session.metrics["steps"], "samples": session.metrics["samples"]}


def _save(state: dict[str, Any], path: Path) -> None:
    aside = path.with_suffix(f".{os.getpid()}")
    torch.save(state, aside)
    aside.replace(path)
