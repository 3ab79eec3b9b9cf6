"""Options of ``session.loader``, and their checks, before anything is changed."""

from __future__ import annotations

from dataclasses import dataclass
from operator import index
from typing import TYPE_CHECKING, Any, get_args

from freetrain_parsl.errors import UsageError
from freetrain_parsl.training.step.learning_rate import Rule

if TYPE_CHECKING:
    from collections.abc import Mapping

    from freetrain_parsl.training.step.learning_rate import LrScaling

__all__ = [
    "LoaderOptions",
    "check_batch_range",
    "check_fixed_size",
    "check_whole",
    "check_worker_options",
    "chosen_lr_scaling",
]

WORKER_OPTIONS = ("worker_init_fn", "timeout", "prefetch_factor", "multiprocessing_context", "persistent_workers")
"""Arguments of torch's DataLoader that are passed on as they are."""

_WHY_NOT = {
    "deterministic": "the results would depend on when the batch size changes",
    "scaled": "both decide the batch size",
    "drop_last": "the dropped samples would depend on when the batch size changes",
}


@dataclass(frozen=True)
class LoaderOptions:
    """Options of `TrainingSession.loader` that few training jobs need.

    Parameters
    ----------
    shards
        Parts into which ``deterministic=True`` divides a batch; at least the maximum number of processes, as further
        processes have nothing to do.
    scaled
        Whether the batch size is per process, so that the batch, and with it the learning rate, grows with the number
        of processes.
    lr_scaling
        How the learning rate follows the batch size with ``batch_range`` or `scaled`: ``"linear"``, ``"sqrt"``,
        ``"adascale"``, ``"none"``, or a function: batch size relative to the initial one -> factor. By default
        ``"auto"`` with ``batch_range``: linear for SGD, square root for other optimizers; linear with `scaled`.
    ramp
        Steps over which the learning rate is adjusted.
    seed_samples
        Whether random numbers are seeded for each sample, so that augmentation does not depend on the fetching
        process. Takes some microseconds per sample; not for datasets that fetch samples in bulk (``__getitems__``).
    """

    shards: int = 8
    scaled: bool = False
    lr_scaling: LrScaling | None = None
    ramp: int = 100
    seed_samples: bool = True


def check_whole(what: str, value: object, *, least: int) -> None:
    """Raise UsageError, which begins with `what`, unless a value is a whole number of at least `least`."""
    try:
        number = index(value)  # type: ignore[arg-type]  # checked here
    except TypeError:
        raise UsageError(f"{what} must be a whole number, got {value!r}") from None
    if number < least:
        raise UsageError(f"{what} must be at least {least}, got {number}")


def check_worker_options(options: Mapping[str, Any], num_workers: int) -> None:
    """Raise UsageError if there are options that are none of workers, or options without workers."""
    if unknown := [name for name in options if name not in WORKER_OPTIONS]:
        raise UsageError(f"session.loader: worker_options are {', '.join(WORKER_OPTIONS)}; got {', '.join(unknown)}")
    if options and not num_workers:
        raise UsageError(f"session.loader: {', '.join(options)} need workers: num_workers=…")


def check_batch_range(value: object, batch_size: int) -> tuple[int, int]:
    """Return a range of batch sizes, which contains the batch size, as a pair; raises UsageError if it is none."""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise UsageError(f"session.loader: batch_range is a pair such as (64, 4096), got {value!r}")
    least, most = value
    check_whole("session.loader: batch_range's smallest batch", least, least=1)
    check_whole("session.loader: batch_range's largest batch", most, least=1)
    if not least <= batch_size <= most:
        raise UsageError(f"session.loader: batch_range {least} to {most} must contain batch_size ({batch_size})")
    return int(least), int(most)


def check_fixed_size(*, deterministic: bool, scaled: bool, drop_last: bool) -> None:
    """Raise UsageError, with the reason, if an option cannot be combined with ``batch_range``."""
    given = {"deterministic": deterministic, "scaled": scaled, "drop_last": drop_last}
    if option := next((name for name in given if given[name]), None):
        raise UsageError(f"session.loader: batch_range cannot be combined with {option}=True: {_WHY_NOT[option]}")


def chosen_lr_scaling(value: LrScaling | None, *, elastic: bool, scaled: bool) -> LrScaling:
    """Return how the learning rate follows the batch size; raises UsageError if there is no such choice or effect."""
    if value is None:
        return "linear" if scaled else "auto"
    if not (callable(value) or value in get_args(Rule)):
        choices = ", ".join(repr(choice) for choice in get_args(Rule))
        raise UsageError(f"session.loader: lr_scaling is {value!r}; it is one of {choices}, or a function")
    if not (elastic or scaled):
        raise UsageError("session.loader: lr_scaling needs batch_range=… or scaled=True; the batch size is fixed")
    if value == "adascale" and not elastic:
        raise UsageError("session.loader: lr_scaling='adascale' needs batch_range=…, which measures the noise")
    return value
