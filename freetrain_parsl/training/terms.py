"""What passes between a slot and the training inside it. Importable anywhere: no torch here."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Any

from freetrain_parsl.errors import InvalidSettings

Clock = Callable[[], float]
"""Seconds on a clock that never goes back; injected wherever time matters."""


class PauseReason(str, Enum):
    """Why a fragment ended before its training was done; the value is the sentence that the log shows."""

    REQUESTED = "a pause was requested"
    CLOSING = "a node is about to close"


@dataclass(frozen=True)
class SessionOptions:
    """How one training keeps its state.

    Parameters
    ----------
    name
        The trainer's name; its checkpoints are in a directory of that name.
    checkpoint_root
        Where the directories of all trainers are. Every node must see it.
    seed
        Start of every random number of the training.
    checkpoint_interval
        Time between periodic checkpoints.
    keep
        How many checkpoints stay; two leave one to fall back on.
    save_margin
        How long before a node's closing the last checkpoint must be complete.
    threads
        CPU threads of torch in this process; ``None`` leaves torch's own choice.
    epochs
        Default of ``session.epochs()``.

    Raises
    ------
    InvalidSettings
        A value is out of range.
    """

    name: str
    checkpoint_root: Path
    seed: int = 0
    checkpoint_interval: timedelta = timedelta(seconds=60)
    keep: int = 2
    save_margin: timedelta = timedelta(seconds=2)
    threads: int | None = None
    epochs: int | None = None

    def __post_init__(self) -> None:
        who = f"trainer {self.name!r}"
        object.__setattr__(self, "checkpoint_root", Path(self.checkpoint_root))
        if self.seed < 0:
            raise InvalidSettings(f"{who}: seed must be zero or more, got {self.seed}")
        if self.checkpoint_interval <= timedelta(0):
            raise InvalidSettings(f"{who}: checkpoint_interval must be positive, got {self.checkpoint_interval}")
        if self.keep < 1:
            raise InvalidSettings(f"{who}: keep must be at least 1 checkpoint, got {self.keep}")
        if self.save_margin < timedelta(0):
            raise InvalidSettings(f"{who}: save_margin must not be negative, got {self.save_margin}")
        if self.threads is not None and self.threads < 1:
            raise InvalidSettings(f"{who}: threads must be at least 1, got {self.threads}")


@dataclass(frozen=True)
class Membership:
    """One process's place among the processes that train together.

    Parameters
    ----------
    trainer
        Name of the training.
    generation
        Number of the fragment: never used twice in one training, so that a process of an earlier
        fragment cannot meet those of this one.
    rank, world_size
        This process's number, from 0, and how many there are.
    timeout
        How long a collective waits for a silent peer. A peer that dies is noticed at once; the time-out is
        for one that hangs. It must exceed the time of one step plus one checkpoint write.
    interface
        Network interface that carries the collectives, such as ``"ib0"``; ``None`` lets the library choose.

    Raises
    ------
    InvalidSettings
        The rank is not one of the group's.
    """

    trainer: str
    generation: int = 0
    rank: int = 0
    world_size: int = 1
    timeout: timedelta = timedelta(minutes=2)
    interface: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise InvalidSettings(f"trainer {self.trainer!r}: rank {self.rank} is not in a group of {self.world_size}")


class Notice:
    """What the slot tells the training while it runs: pause, and when the node closes.

    Thread-safe; the training reads it at step boundaries.

    Parameters
    ----------
    clock
        Seconds on a clock that never goes back.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._closes: float | None = None
        self.pause_requested = threading.Event()
        """Set it to end the fragment at the next step boundary, after a checkpoint."""
        self.underway = threading.Event()
        """Set by the training after its first step: until then the fragment can be dropped and nothing is lost."""

    def close_after(self, remaining: timedelta | None) -> None:
        """Say that the node closes that long from now; ``None`` if that is not known (any more)."""
        self._closes = None if remaining is None else self._clock() + remaining.total_seconds()

    def closes_in(self) -> float | None:
        """Seconds until the node closes, negative once past; ``None`` if unknown."""
        closes = self._closes
        return None if closes is None else closes - self._clock()


@dataclass(frozen=True)
class Progress:
    """How far a training has come. All values can go into JSON.

    Parameters
    ----------
    step
        Optimizer steps done, in all fragments.
    epoch
        Number of the current epoch, from 0.
    samples
        Samples processed, in all fragments.
    samples_total
        Samples of the whole training, if its length is known.
    slot_seconds
        Time spent in the steps that count, in all fragments, times the slots that took part.
    loss
        Mean loss a sample of the current epoch so far; ``None`` before its first step.
    rate
        Recent throughput of this fragment, samples a second, without checkpoint writes; ``None`` at its
        start.
    samples_lost, duplicate_samples
        Samples never, or more than once, trained on in an epoch; counted over the finished epochs.
    checkpoint_step
        Step of the newest durable checkpoint; ``None`` before the first.
    resumed_from
        Step of the checkpoint that this fragment started from; ``None`` if it started afresh.
    write_seconds
        Estimated time to write a checkpoint, seconds.
    refused_checkpoints
        Paths of damaged checkpoints that were passed over when this fragment started.
    """

    step: int = 0
    epoch: int = 0
    samples: int = 0
    samples_total: int | None = None
    slot_seconds: float = 0.0
    loss: float | None = None
    rate: float | None = None
    samples_lost: int = 0
    duplicate_samples: int = 0
    checkpoint_step: int | None = None
    resumed_from: int | None = None
    write_seconds: float = 0.0
    refused_checkpoints: tuple[str, ...] = ()


@dataclass(frozen=True)
class Finished:
    """A fragment that ended because the training is done.

    Parameters
    ----------
    value
        What the user's function returned, on this rank.
    progress
        The last state.
    checkpoint
        Directory of the final checkpoint; ``None`` if the function never prepared a model.
    """

    value: Any
    progress: Progress
    checkpoint: Path | None = None


@dataclass(frozen=True)
class Paused:
    """A fragment that ended early; its state is in the checkpoint.

    Parameters
    ----------
    reason
        Why.
    progress
        The state at the end.
    checkpoint
        Directory of the checkpoint to go on from.
    """

    reason: PauseReason
    progress: Progress = field(default_factory=Progress)
    checkpoint: Path | None = None
