"""The session's verbs beside training: the best epoch, early stopping, and resource usage."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Literal

import psutil
import torch

from freetrain_parsl.errors import UsageError
from freetrain_parsl.training.best_epoch import KEEP, BestEpoch
from freetrain_parsl.training.data.loader_options import check_whole

if TYPE_CHECKING:
    from collections.abc import Callable

    from freetrain_parsl.training.best_epoch import EpochValue
    from freetrain_parsl.training.runtime import Runtime

__all__ = ["HelperVerbs", "ResourceUsage"]

_PERIOD: Final = 1.0  # seconds: rates of shorter periods are noise
_GIB: Final = 2**30


class ResourceUsage:
    """Measures this process and its accelerator.

    Parameters
    ----------
    device
        The device on which the process trains.
    samples
        Samples of the training job so far.
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
        """Return name -> value, measured at most once a second; see `HelperVerbs.usage`."""
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


class HelperVerbs:
    """A part of `TrainingSession`."""

    _runtime: Runtime
    _usage: ResourceUsage | None = None

    def usage(self) -> dict[str, float]:
        """Return this process's resource usage and the training job's throughput, for `log`.

        ::

            session.log(every=50, **session.usage())

        Trackers get the values of the first process.

        Returns
        -------
        values
            ``samples_per_second`` of the whole training job, ``cpu_percent`` of one core and ``memory_gib`` of this
            process without its loader's workers; on a GPU ``gpu_memory_gib``, in use by all its processes, and, if
            ``nvidia-ml-py`` is installed, ``gpu_percent``. Rates are means since the previous measurement, at least
            one second. Empty in the first second.
        """
        samples = self._runtime.state.training_metrics.samples
        if self._usage is None:
            self._usage = ResourceUsage(self._runtime.device, samples)
        return self._usage.read(samples)

    def keep_best(self, metric: str, *, mode: Literal["min", "max"]) -> None:
        """Keep the model's state after the epoch with the best value, for `load_best`; call it before the loop.

        It is kept in host memory and is part of each checkpoint. The first process's values count, so all processes
        keep the same epoch. An epoch that ``break`` ends together with the loop over the epochs does not count.

        Parameters
        ----------
        metric
            Name of the value: ``"loss"``, or one that is passed to `log` in each epoch.
        mode
            Whether the smallest or the largest value is the best.

        Raises
        ------
        UsageError
            It is called inside the loop or twice, or the mode is wrong. Later, after an epoch: it has no such value.
        """
        self._runtime.follow(BestEpoch(KEEP, metric, mode))

    def load_best(self) -> EpochValue:
        """Load the state of the best epoch into the model, usually after the loop; see `keep_best`.

        Returns
        -------
        best
            The epoch and its value: ``best.epoch``, ``best.value``.

        Raises
        ------
        UsageError
            There is no best epoch, or the loop has not begun.
        """
        state = self._runtime.state
        if not self._runtime.started:
            raise UsageError("call session.load_best inside or after `for epoch in session.epochs(…)`")
        best, kept = state.best_epochs.kept()
        state.objects["model"].load_state_dict(kept)
        return best

    def stop_early(self, metric: str, *, mode: Literal["min", "max"], patience: int, min_delta: float = 0.0) -> None:
        """End the loop over the epochs when a value no longer gets better; call it before the loop.

        All processes end it after the same epoch, also if their values differ, and after a restart.

        Parameters
        ----------
        metric
            Name of the value: ``"loss"``, or one that is passed to `log` in each epoch.
        mode
            Whether the smallest or the largest value is the best.
        patience
            Epochs in a row that are not better than the best, after which the loop ends.
        min_delta
            How much better than the best a value must be.

        Raises
        ------
        UsageError
            It is called inside the loop or twice, or a parameter is out of range. Later, after an epoch: it has no such
            value.
        """
        check_whole("session.stop_early: patience", patience, least=1)
        self._runtime.follow(BestEpoch("stop_early", metric, mode, min_delta, patience))
