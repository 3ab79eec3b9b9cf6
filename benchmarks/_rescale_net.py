"""The model that both sides of `rescale` train, and the log with which both are measured."""

from __future__ import annotations

import os
import time
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from pathlib import Path

WIDTH = 2048
LAYERS = 5
CLASSES = 10
SAMPLES = 1 << 14
BATCH = 48
LEARNING_RATE = 0.01
MOMENTUM = 0.9


def make_net() -> nn.Module:
    """Return a perceptron of 21.0 million parameters, initialized deterministically."""
    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))


class Data(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """Noise with labels: each sample is a shifted slice of one tensor, so that reading costs nothing."""

    def __init__(self) -> None:
        self._noise = torch.randn(SAMPLES + WIDTH, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, position: int) -> tuple[torch.Tensor, int]:
        return self._noise[position : position + WIDTH], position % CLASSES


class StepLog:
    """One line for each start and end of a step of one process: seconds, event, ranks, rank, step.

    The clock is the machine's monotonic clock, shared by all processes.
    """

    def __init__(self, directory: Path) -> None:
        self._file = (directory / f"steps-{os.getpid()}-{time.monotonic_ns()}").open("w", encoding="utf-8", buffering=1)

    def write(self, word: str, ranks: int, rank: int, step: int) -> None:
        """Append a line."""
        self._file.write(f"{time.monotonic():.6f} {word} {ranks} {rank} {step}\n")


@dataclass(frozen=True)
class Mark:
    """A line of a `StepLog`; `step` is the number of completed steps."""

    seconds: float
    word: str
    ranks: int
    rank: int
    step: int


@dataclass(frozen=True)
class Pause:
    """Cost of a change, from the logs of all processes.

    Parameters
    ----------
    seconds
        Time without a step: from the end of the last one in the old group (on its last rank to end it) to the start of
        the first one in the new group (on its last rank to start it).
    step_seconds
        Median duration of a step in the old group.
    steps_lost
        Steps that are repeated.
    """

    seconds: float
    step_seconds: float
    steps_lost: int


def read_marks(directory: Path, since: float = 0.0) -> list[Mark]:
    """Read the logs of all processes in time order; incomplete lines are skipped."""
    marks = []
    for path in directory.glob("steps-*"):
        for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
            if line.endswith("\n"):
                seconds, word, *numbers = line.split()
                marks.append(Mark(float(seconds), word, *map(int, numbers)))
    return sorted((mark for mark in marks if mark.seconds >= since), key=lambda mark: mark.seconds)


def steps_of(marks: list[Mark], ranks: int) -> int:
    """Count the steps that all members of a group of `ranks` have completed."""
    ends = Counter(mark.rank for mark in marks if mark.word == "end" and mark.ranks == ranks)
    return min((ends[rank] for rank in range(ranks)), default=0)


def wait_for_steps(directory: Path, ranks: int, count: int, since: float, timeout: float = 120.0) -> None:
    """Wait until a group of `ranks` has completed `count` steps since a given time.

    Raises
    ------
    TimeoutError
        It did not.
    """
    deadline = time.monotonic() + timeout
    while steps_of(read_marks(directory, since), ranks) < count:
        if time.monotonic() > deadline:
            raise TimeoutError(f"no {count} steps of {ranks} ranks within {timeout:.0f} s, see {directory}")
        time.sleep(0.1)


def pause_between(marks: list[Mark], before: int, after: int) -> Pause:
    """Measure a change of a group's size; the marks start with the old group and end with the new one.

    Steps that torchrun makes at an intermediate size do not count as a pause.
    """
    first = min(mark.seconds for mark in marks if mark.ranks == after and mark.word == "begin")
    last = max(mark.seconds for mark in marks if mark.ranks == before and mark.word == "end" and mark.seconds < first)
    between = [m for m in marks if m.ranks not in (before, after) and last < m.seconds < first and m.rank == 0]
    stepping = sum(b.seconds - a.seconds for a, b in pairwise(between) if (a.word, b.word) == ("begin", "end"))
    return pause_after(marks, before, after, last, stepping)


def pause_after(marks: list[Mark], before: int, after: int, moment: float, stepping: float = 0.0) -> Pause:
    """Measure the time from a given moment to the first step of the next group; see `pause_between`."""
    begins: dict[int, Mark] = {}
    for mark in marks:
        if mark.ranks == after and mark.word == "begin" and mark.seconds >= moment:
            begins.setdefault(mark.rank, mark)
    first, last = min(mark.seconds for mark in begins.values()), max(mark.seconds for mark in begins.values())
    ends = [mark for mark in marks if mark.ranks == before and mark.word == "end" and mark.seconds < first]
    of_a_rank = [mark.seconds for mark in ends if mark.rank == ends[0].rank]
    return Pause(
        last - moment - stepping,
        median(b - a for a, b in pairwise(of_a_rank)),
        max(mark.step for mark in ends) - min(mark.step for mark in begins.values()),
    )
