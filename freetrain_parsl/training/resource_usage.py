"""What a process of a training uses of its node, and how fast the training is."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import psutil
import torch

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ResourceUsage"]

_PERIOD: Final = 1.0  # seconds: rates of shorter periods are noise
_GIB: Final = 2**30


class ResourceUsage:
    """Measures this process and its accelerator.

    Parameters
    ----------
    device
        The device on which the process trains.
    samples
        Samples of the training so far.
    clock
        Returns seconds.
    """

    def __init__(self, device: torch.device, samples: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._device = device
        self._clock = clock
        self._process = psutil.Process()
        self._process.cpu_percent()  # later calls measure from here on
        self._since, self._samples = clock(), samples
        self._values: dict[str, float] = {}

    def read(self, samples: int) -> dict[str, float]:
        """Return name -> value, measured at most once a second; see `TrainingSession.usage`."""
        elapsed = self._clock() - self._since
        if elapsed >= _PERIOD:
            self._values = {
                "samples_per_second": (samples - self._samples) / elapsed,
                "cpu_percent": self._process.cpu_percent(),
                "memory_gib": self._process.memory_info().rss / _GIB,
                **self._accelerator(),
            }
            self._since, self._samples = self._clock(), samples
        return dict(self._values)

    def _accelerator(self) -> dict[str, float]:
        if self._device.type != "cuda":
            return {}
        free, total = torch.cuda.mem_get_info(self._device)
        values = {"gpu_memory_gib": (total - free) / _GIB}
        with suppress(ModuleNotFoundError):  # nvidia-ml-py is not installed
            values["gpu_percent"] = float(torch.cuda.utilization(self._device))
        return values
