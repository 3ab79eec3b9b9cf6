"""The books of a training: steps, samples, losses, the ledger, and the metrics that the user gets."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from freetrain_parsl.errors import NonFiniteLoss, TrainingError, UsageError
from freetrain_parsl.training.data.audit import Audit, Ledger, audit, checksum

if TYPE_CHECKING:
    from collections.abc import Mapping

    from freetrain_parsl.training.data.order import Batch, Piece


class Tally:
    """What the members tell each other of one step, in one tensor that travels with the gradients.

    Losses stand share by share, in places of their own: so their sum over the members has the same bits whoever had
    which share.

    Parameters
    ----------
    batch
        The batch.
    device
        Where the losses are.
    """

    def __init__(self, batch: Batch, device: torch.device) -> None:
        self.values = torch.zeros(batch.shards + 2, dtype=torch.float64, device=device)

    def add(self, loss: torch.Tensor, piece: Piece) -> None:
        """Note the mean loss of a piece."""
        if piece.weight:
            self.values[piece.shard] += loss.detach().double() * piece.weight
            self.values[-2] += piece.weight
            self.values[-1] += checksum(piece.positions)


class TrainingMetrics:
    """What has been done so far, in all fragments; the same on every member.

    Losses stay where they are (on a GPU) until asked for (`settle`), so that no step waits for them.
    """

    def __init__(self) -> None:
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
        self._pending = torch.zeros(3, dtype=torch.float64)  # loss, samples and checksum, not yet looked at
        self._expected = [0, 0]  # samples and checksum of the batches in it

    @property
    def mean_loss(self) -> float | None:
        """Mean loss a sample of this epoch, as far as settled; ``None`` before its first step."""
        return self._loss_sum / self._loss_samples if self._loss_samples else None

    @property
    def has_steps(self) -> bool:
        """Whether a sample was trained on in this epoch, by any member and in any fragment."""
        return self._ledger is not None and bool(self._ledger.counts.any())

    def has_row(self, epoch: int) -> bool:
        """Whether the history has a row of an epoch."""
        history = self.metrics["history"]
        return bool(history) and history[-1]["epoch"] == epoch

    def keep_ledger(self, length: int) -> None:
        """Count from now on how often each of `length` samples is trained on."""
        self._ledger = Ledger(length)

    def count_step(self, batch: Batch, tally: Tally) -> None:
        """Count one optimizer step, with the tally of the whole group."""
        assert self._ledger is not None
        self.step += 1
        self.samples += batch.samples
        self.metrics["steps"], self.metrics["samples"] = self.step, self.samples
        self._ledger.add(batch.positions)
        loss = tally.values[:-2].sum(0, keepdim=True)  # of one shape in one order, whoever had which share
        self._pending = self._pending.to(loss.device) + torch.cat([loss, tally.values[-2:]])
        self._expected[0] += batch.samples
        self._expected[1] += checksum(batch.positions)

    def settle(self) -> None:
        """Look at what the steps since the last time have told.

        Raises
        ------
        NonFiniteLoss
            The loss is not a number, or infinite.
        TrainingError
            The members did not train on the samples of the batches: a defect of ours.
        """
        loss, samples, told = self._pending.tolist()
        expected, self._expected = self._expected, [0, 0]
        self._pending = torch.zeros(3, dtype=torch.float64)
        if not math.isfinite(loss):
            raise NonFiniteLoss(
                f"the loss is {loss} by step {self.step}: nothing that follows would be of use; lower the learning "
                "rate, clip gradients, or look for bad samples"
            )
        if [int(samples), int(told)] != expected:
            raise TrainingError(f"by step {self.step} the members trained on other samples than those of the batches")
        self._loss_sum += loss
        self._loss_samples += expected[0]

    def open_epoch(self, epoch: int) -> None:
        """Begin an epoch, or go on with it; its row is written when it has had all its batches."""
        self._row_open = not self.has_row(epoch)

    def close_pass(self, epoch: int, expected: torch.Tensor) -> None:
        """Close an epoch that had all its batches: audit the ledger, write the history's row.

        Parameters
        ----------
        epoch
            Its number.
        expected
            Positions of all samples of the epoch.
        """
        assert self._ledger is not None
        self.audit += audit(self._ledger.counts, expected)
        self._write_row(epoch)
        self.metrics["epochs"] = epoch + 1  # here already: a function may return without going on to the next one

    def close_epoch(self, epoch: int) -> None:
        """End an epoch; one that the user's loop left early gets its row here, unaudited."""
        if not self.has_row(epoch):
            self._write_row(epoch)
        self.metrics["epochs"] = epoch + 1
        self._loss_sum, self._loss_samples = 0.0, 0
        if self._ledger is not None:
            self._ledger.clear()

    def log(self, values: Mapping[str, Any]) -> None:
        """Put values of the user's own into the row of this epoch; between epochs, into the last row."""
        history = self.metrics["history"]
        row = self._log if self._row_open or not history else history[-1]
        row.update({name: _plain(name, value) for name, value in values.items()})

    def state(self) -> dict[str, Any]:
        """Return all of it."""
        self.settle()
        return {
            "step": self.step,
            "samples": self.samples,
            "slot_seconds": self.slot_seconds,
            "audit": asdict(self.audit),
            "metrics": self.metrics,
            "ledger": None if self._ledger is None else self._ledger.counts,
            "log": self._log,
            "row_open": self._row_open,
            "loss_sum": self._loss_sum,
            "loss_samples": self._loss_samples,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over a state, except for the ledger (see `load_ledger`)."""
        self.step, self.samples = state["step"], state["samples"]
        self.slot_seconds = state["slot_seconds"]
        self.audit = Audit(**state["audit"])
        # In place: the user may hold session.metrics.
        self.metrics.clear()
        self.metrics.update(state["metrics"])
        self._log = state["log"]
        self._row_open = state["row_open"]
        self._loss_sum, self._loss_samples = state["loss_sum"], state["loss_samples"]
        self._pending = torch.zeros(3, dtype=torch.float64)
        self._expected = [0, 0]

    def load_ledger(self, state: Mapping[str, Any]) -> None:
        """Take over the counts."""
        assert self._ledger is not None
        if state["ledger"] is not None:
            self._ledger.counts.copy_(state["ledger"])

    def _write_row(self, epoch: int) -> None:
        self.settle()
        self.metrics["loss"] = self.mean_loss
        self.metrics["history"].append({"epoch": epoch, "loss": self.mean_loss, **self._log})
        self._log = {}
        self._row_open = False


def _plain(name: str, value: Any) -> float | int | str | bool:
    if hasattr(value, "item"):  # tensors and numpy scalars
        value = value.item()
    if isinstance(value, (bool, int, float, str)):
        return value
    raise UsageError(f"session.log({name}=…) takes numbers and strings, got {type(value).__name__}")
