"""The books of a training: steps, samples, losses, the ledger, and the metrics that the user gets."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from freetrain_parsl.errors import UsageError
from freetrain_parsl.training.ledger import Audit, Ledger, audit

if TYPE_CHECKING:
    from collections.abc import Mapping

    from freetrain_parsl.training.loader import Share
    from freetrain_parsl.training.membership import Group


class Books:
    """What has been done so far, in all fragments.

    Losses are summed locally, and added up over the group when asked (`settle`), so that no step waits for a
    GPU.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self.step = 0
        self.samples = 0
        self.slot_seconds = 0.0  # spent in the steps that count, times the slots that took part
        self.audit = Audit()
        self.metrics: dict[str, Any] = {"epochs": 0, "steps": 0, "samples": 0, "loss": None, "history": []}
        self._ledger: Ledger | None = None
        self._row_open = False  # whether log() is about an epoch that has no row in the history yet
        self._log: dict[str, Any] = {}
        self._loss_sum = 0.0  # over this epoch and the whole group
        self._loss_samples = 0
        self._pending_loss = torch.zeros((), dtype=torch.float64)  # of this member, not yet added up
        self._pending_samples = 0

    @property
    def mean_loss(self) -> float | None:
        """Mean loss a sample of this epoch, as far as settled; ``None`` before its first step."""
        return self._loss_sum / self._loss_samples if self._loss_samples else None

    @property
    def has_row(self) -> bool:
        """Whether the history has a row of this epoch."""
        history = self.metrics["history"]
        return bool(history) and history[-1]["epoch"] == self.epoch

    def keep_ledger(self, length: int) -> None:
        """Count from now on how often each of `length` samples is trained on."""
        self._ledger = Ledger(length)

    def add_loss(self, loss: torch.Tensor, share: Share) -> None:
        """Note the mean loss of this member's share."""
        self._pending_loss = self._pending_loss.to(loss.device) + loss.detach().double() * share.weight
        self._pending_samples += share.weight

    def count_step(self, share: Share) -> None:
        """Count one optimizer step."""
        assert self._ledger is not None
        self.step += 1
        self.samples += share.batch
        self.metrics["steps"], self.metrics["samples"] = self.step, self.samples
        if share.weight:
            self._ledger.add(share.positions)

    def pending(self) -> tuple[float, int]:
        """Take out this member's sum of losses and number of samples since the last time."""
        taken = float(self._pending_loss), self._pending_samples
        self._pending_loss = torch.zeros((), dtype=torch.float64)
        self._pending_samples = 0
        return taken

    def settle(self, loss_sum: float, samples: int) -> None:
        """Add what the whole group had pending."""
        self._loss_sum += loss_sum
        self._loss_samples += samples

    def settle_with(self, group: Group) -> None:
        """Add up over the group what is pending."""
        loss_sum, samples = group.sum(torch.tensor(self.pending(), dtype=torch.float64)).tolist()
        self.settle(loss_sum, int(samples))

    def open_epoch(self) -> None:
        """Begin an epoch, or go on with it; its row is written when it has had all its batches."""
        self._row_open = not self.has_row

    def close_pass(self, group: Group, expected: torch.Tensor) -> None:
        """Close an epoch that had all its batches: audit the ledger, write the history's row.

        Parameters
        ----------
        group
            All members call this.
        expected
            Positions of all samples of the epoch.
        """
        assert self._ledger is not None
        self.audit += audit(group.sum(self._ledger.counts), expected)
        self._write_row(group)

    def close_epoch(self, group: Group) -> None:
        """Go on to the next epoch; one that the user's loop left early gets its row here, unaudited."""
        if not self.has_row:
            self._write_row(group)
        self.epoch += 1
        self.metrics["epochs"] = self.epoch
        self._loss_sum, self._loss_samples = 0.0, 0
        if self._ledger is not None:
            self._ledger.clear()

    def log(self, values: Mapping[str, Any]) -> None:
        """Put values of the user's own into the row of this epoch; between epochs, into the last row."""
        history = self.metrics["history"]
        row = self._log if self._row_open or not history else history[-1]
        row.update({name: _plain(name, value) for name, value in values.items()})

    def state(self, group: Group) -> dict[str, Any]:
        """Return all of it, the same on every member. All members call this."""
        self.settle_with(group)
        return {
            "epoch": self.epoch,
            "step": self.step,
            "samples": self.samples,
            "slot_seconds": self.slot_seconds,
            "audit": asdict(self.audit),
            "metrics": self.metrics,
            "ledger": None if self._ledger is None else group.sum(self._ledger.counts),
            "log": self._log,
            "loss_sum": self._loss_sum,
            "loss_samples": self._loss_samples,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over a state, except for the ledger (see `load_ledger`)."""
        self.epoch, self.step, self.samples = state["epoch"], state["step"], state["samples"]
        self.slot_seconds = state["slot_seconds"]
        self.audit = Audit(**state["audit"])
        self.metrics = state["metrics"]
        self._log = state["log"]
        self._loss_sum, self._loss_samples = state["loss_sum"], state["loss_samples"]

    def load_ledger(self, state: Mapping[str, Any]) -> None:
        """Take over the counts of the whole group; for one member only, as they are going to be added up."""
        assert self._ledger is not None
        if state["ledger"] is not None:
            self._ledger.counts.copy_(state["ledger"])

    def _write_row(self, group: Group) -> None:
        self.settle_with(group)
        self.metrics["loss"] = self.mean_loss
        self.metrics["history"].append({"epoch": self.epoch, "loss": self.mean_loss, **self._log})
        self._log = {}
        self._row_open = False


def _plain(name: str, value: Any) -> float | int | str | bool:
    if hasattr(value, "item"):  # tensors and numpy scalars
        value = value.item()
    if isinstance(value, (bool, int, float, str)):
        return value
    raise UsageError(f"session.log({name}=…) takes numbers and strings, got {type(value).__name__}")
