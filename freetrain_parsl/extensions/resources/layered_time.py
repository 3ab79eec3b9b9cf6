"""Seconds per step of a layered network that is trained with parameter servers.

Yu, Wu, Ji & Liu (SMD, INFOCOM 2021, arXiv 2105.13855) describe a synchronous step by the layers of the network:
gradients are pushed while earlier layers are still in the backward pass, and the next forward pass begins while the
parameters of later layers are still being pulled. They bound its duration by a sum of ratios of workers and servers.
Here the same model is evaluated exactly. With w workers, p servers, layers 1 to L of sizes s_l, and the batch b divided
among the workers::

    backward_l = backward_{l+1} + B_l b / w                    from the last layer to the first
    push_l = max(backward_l, push_{l+1}) + s_l / R             one transfer at a time, in the order of the backward pass
    pull_l = pull_{l-1} + s_l / R,  pull_0 = push_1            one at a time, in the order of the forward pass
    forward_l = max(forward_{l-1}, pull_l) + F_l b / w         the step ends with forward_L

Every layer is divided equally among the servers, and the workers move in lockstep, so that each of them transfers at
R = min(N, S p / w): its own network, or its share of the servers'. The pulls need no wait for their layer's push, since
the layer that is pulled first is the last one to be pushed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from freetrain_parsl.errors import InvalidTrainer

__all__ = ["LayeredTraining"]

Table = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class LayeredTraining:
    """A network's layers, and the networks of its workers and servers.

    Parameters
    ----------
    forward, backward
        F_l and B_l, seconds per sample, in the order of the forward pass.
    sizes
        s_l, megabytes of each layer's parameters.
    batch
        b, samples of all workers together in a step.
    worker_rate
        N, megabytes per second of a worker's network, in each direction.
    server_rate
        S, megabytes per second of a server's network, in each direction.

    Raises
    ------
    InvalidTrainer
        Not the same number of layers in each list, or none; negative values; or a batch or rate that is not positive.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    sizes: tuple[float, ...]
    batch: float
    worker_rate: float
    server_rate: float

    def __post_init__(self) -> None:
        if not self.forward or not len(self.forward) == len(self.backward) == len(self.sizes):
            layers = f"{len(self.forward)}, {len(self.backward)} and {len(self.sizes)}"
            raise InvalidTrainer(f"layers: forward, backward and sizes need one value for each layer, got {layers}")
        for name in ("forward", "backward", "sizes"):
            if not all(math.isfinite(value) and value >= 0 for value in getattr(self, name)):
                raise InvalidTrainer(f"layers: {name} must be zero or more, got {getattr(self, name)!r}")
        for name in ("batch", "worker_rate", "server_rate"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise InvalidTrainer(f"layers: {name} must be positive, got {getattr(self, name)!r}")

    def step_seconds(self, workers: Counts, servers: Counts) -> Table:
        """Return the seconds of a step for each pair of numbers of workers and servers, which are positive."""
        samples = self.batch / workers
        per_megabyte = 1 / np.minimum(self.worker_rate, self.server_rate * servers / workers)
        computed, transferred = np.zeros(len(workers)), np.zeros(len(workers))
        for backward, size in zip(reversed(self.backward), reversed(self.sizes), strict=True):
            computed = computed + backward * samples
            transferred = np.maximum(computed, transferred) + size * per_megabyte
        computed = transferred
        for forward, size in zip(self.forward, self.sizes, strict=True):
            transferred = transferred + size * per_megabyte
            computed = np.maximum(computed, transferred) + forward * samples
        return computed
