"""The best epoch of a training job so far, by a value that it logs: for `keep_best`, and for early stopping."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

from freetrain_parsl.errors import UsageError
from freetrain_parsl.training.checkpoints.background import HostBuffers
from freetrain_parsl.training.data.loader_options import check_whole

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import TypeGuard

__all__ = ["KEEP", "BestEpoch", "BestEpochs", "EpochValue"]

KEEP: Final = "keep_best"
"""The verb that keeps the model's state."""


@dataclass(frozen=True)
class EpochValue:
    """The value of an epoch.

    Parameters
    ----------
    epoch
        Its number, from 0.
    value
        The value.
    """

    epoch: int
    value: float


@dataclass
class BestEpoch:
    """The epoch with the best value; the same on all members, as all judge the same values.

    Parameters
    ----------
    verb
        The session's verb; begins the messages of errors.
    metric
        Name of the value in the rows of the history.
    mode
        Which value is the best.
    min_delta
        How much better than the best a value must be.
    patience
        Epochs without a better value after which the training job ends; ``None``: it does not.

    Raises
    ------
    UsageError
        A parameter is out of range.
    """

    verb: str
    metric: str
    mode: Literal["min", "max"]
    min_delta: float = 0.0
    patience: int | None = None
    best: EpochValue | None = field(default=None, init=False)
    judged: int = field(default=-1, init=False)
    """The last epoch that was judged."""

    def __post_init__(self) -> None:
        what = f"session.{self.verb}"
        if not self.metric or str(self.metric) != self.metric:
            raise UsageError(f"{what}: give the name of a logged value, such as 'loss', got {self.metric!r}")
        if self.mode not in ("min", "max"):
            raise UsageError(f"{what}: mode must be 'min' or 'max', got {self.mode!r}")
        if not _is_number(self.min_delta) or not 0 <= self.min_delta < math.inf:
            raise UsageError(f"{what}: min_delta must be a number that is not negative, got {self.min_delta!r}")
        if self.patience is not None:
            check_whole(f"{what}: patience", self.patience, least=1)

    @property
    def is_over(self) -> bool:
        """Whether `patience` epochs in a row were not better than the best."""
        if self.patience is None:
            return False
        return self.judged - (-1 if self.best is None else self.best.epoch) >= self.patience

    def value_in(self, row: Mapping[str, Any]) -> float:
        """Return the value in a row of the history; raises UsageError if it has none."""
        value = row.get(self.metric)
        if not _is_number(value):
            known = ", ".join(name for name in row if name != "epoch")
            raise UsageError(
                f"session.{self.verb}: epoch {row['epoch']} has no number {self.metric!r}; call "
                f"session.log({self.metric}=…) in each epoch, on all processes (it has {known})"
            )
        return float(value)

    def judge(self, epoch: int, value: float) -> bool:
        """Return whether an epoch is better than all before; NaN never is."""
        self.judged = epoch
        if math.isnan(value):
            return False
        if self.best is not None:
            gain = self.best.value - value if self.mode == "min" else value - self.best.value
            if not gain > self.min_delta:
                return False
        self.best = EpochValue(epoch, value)
        return True

    def state(self) -> dict[str, Any]:
        """Return the result so far as plain values."""
        best = None if self.best is None else [self.best.epoch, self.best.value]
        return {"metric": self.metric, "mode": self.mode, "best": best, "judged": self.judged}

    def load(self, state: Mapping[str, Any]) -> bool:
        """Load a state; return false if it belongs to another metric or mode."""
        if (state["metric"], state["mode"]) != (self.metric, self.mode):
            return False
        self.best = None if state["best"] is None else EpochValue(*state["best"])
        self.judged = state["judged"]
        return True


class BestEpochs:
    """The best epochs of a job, by the session's verb that they are for, and the model's state after one of them.

    It is part of the training job's state: a training job that resumes and a member that joins continue with it.
    """

    def __init__(self) -> None:
        self.followed: dict[str, BestEpoch] = {}
        self._kept: dict[str, Any] | None = None

    @property
    def stops_early(self) -> bool:
        """Whether no epoch follows, since the last ones were not better."""
        return any(each.is_over for each in self.followed.values())

    def values_in(self, row: Mapping[str, Any]) -> list[float]:
        """Return the values in a row of the history; raises UsageError if one is missing."""
        return [each.value_in(row) for each in self.followed.values()]

    def judge(self, epoch: int, values: Sequence[float], state_of_model: Callable[[], Any]) -> None:
        """Compare an epoch with the best ones, and copy the model's state to host memory if it is to be kept."""
        for each, value in zip(self.followed.values(), values, strict=True):
            if each.judge(epoch, value) and each.verb == KEEP:
                self._kept = HostBuffers().copy(state_of_model())

    def kept(self) -> tuple[EpochValue, dict[str, Any]]:
        """Return the best epoch and the model's state after it; raises UsageError if there is none."""
        each = self.followed.get(KEEP)
        if each is None or each.best is None or self._kept is None:
            why = "call session.keep_best before the loop" if each is None else "no epoch had a value other than NaN"
            raise UsageError(f"session.load_best: there is no best epoch; {why}")
        return each.best, self._kept

    def state(self) -> dict[str, Any]:
        """Return the best epochs as plain values and tensors."""
        return {"epochs": {verb: each.state() for verb, each in self.followed.items()}, "model": self._kept}

    def load(self, state: Mapping[str, Any]) -> None:
        """Load a state, for the metrics that are still followed."""
        for verb, each in self.followed.items():
            known = state["epochs"].get(verb)
            if known is not None and each.load(known) and verb == KEEP:
                self._kept = state["model"]


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
