"""The metrics of a training: steps, samples, losses, sample counts, and the user's metrics."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from freetrain_parsl.errors import NonFiniteLoss, TrainingError, UsageError
from freetrain_parsl.training.data.audit import Audit, Ledger, audit
from freetrain_parsl.training.logged_rows import LoggedRows

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from freetrain_parsl.training.data.order import Batch, Piece


class Tally:
    """Losses, sample counts and checksum of one step, in one tensor that is summed with the gradients.

    Each shard has its own element for the loss: so the sum over the members has the same bits, whichever member had
    which shard.

    Parameters
    ----------
    batch
        The batch.
    device
        Device of the losses.
    """

    def __init__(self, batch: Batch, device: torch.device) -> None:
        self._shards = batch.shards
        self._device = device
        self._losses: list[tuple[int, torch.Tensor | float, int]] = []  # shard, mean over a piece, its weight
        self._samples = self._checksum = 0
        self._values: torch.Tensor | None = None

    @property
    def values(self) -> torch.Tensor:
        """The tensor, once all pieces have been added."""
        if self._values is None:
            self._values = torch.zeros(self._shards + 2, dtype=torch.float64, device=self._device)
            for shard, loss, weight in self._losses:
                self._values[shard] += (loss.double() if isinstance(loss, torch.Tensor) else loss) * weight
            # Filled on the device: no copy to it.
            self._values[-2], self._values[-1] = self._samples, self._checksum
        return self._values

    @property
    def loss(self) -> torch.Tensor | float:
        """Sum of the losses over all samples."""
        return self.values[:-2].sum() if self._read is None else self._read

    @property
    def totals(self) -> torch.Tensor | _Unread | _Totals:
        """Sum of the losses, samples and checksum; a tensor of shape (3,) if they are those of several members."""
        if self._read is not None:
            return _Totals(self._read, self._samples, self._checksum)
        if self._is_of_one and len(self._losses) == 1:
            _, loss, weight = self._losses[0]
            assert isinstance(loss, torch.Tensor), "of a GPU"
            return _Unread(loss, weight, self._samples, self._checksum)
        # The sum of the losses has the same shape and order, whichever member had which shard.
        return torch.cat([self.values[:-2].sum(0, keepdim=True), self.values[-2:]])

    def add(self, loss: torch.Tensor, piece: Piece) -> None:
        """Add the mean loss of a piece."""
        if piece.weight:
            mean = loss.item() if self._device.type == "cpu" else loss.detach()
            self._losses.append((piece.shard, mean, piece.weight))
            self._samples += piece.weight
            self._checksum += piece.checksum

    @property
    def _is_of_one(self) -> bool:
        """Whether one member had the whole batch."""
        return self._values is None and self._shards == 1

    @property
    def _read(self) -> float | None:
        """Sum of the losses if it is known in this process already; ``None`` on a GPU, or of several members."""
        if self._is_of_one and self._device.type == "cpu":
            return float(sum(loss * weight for _, loss, weight in self._losses))
        return None


class _Totals(NamedTuple):
    """Sum of the losses, samples and checksum of one step."""

    loss: float
    samples: int
    checksum: int


class _Unread(NamedTuple):
    """Those of a step on a GPU: its loss is the mean over `weight` samples, and has not been read."""

    loss: torch.Tensor
    weight: int
    samples: int
    checksum: int


class TrainingMetrics:
    """Metrics over all fragments so far; the same on every member.

    Losses stay on their device until `settle` is called, so that no step waits for a GPU.
    """

    def __init__(self) -> None:
        self.step = 0
        self.samples = 0
        self.slot_seconds = 0.0  # time of the counted steps, times the number of slots
        self.audit = Audit()
        self.metrics: dict[str, Any] = {"epochs": 0, "steps": 0, "samples": 0, "loss": None, "history": []}
        self.facts: Callable[[], dict[str, Any]] = dict
        """Set by the session's state: returns values for an epoch's row of the history."""
        self.logged = LoggedRows()
        """The values for trackers."""
        self._ledger: Ledger | None = None
        self._row_open = False  # whether log() refers to an epoch without a row in the history
        self._log: dict[str, Any] = {}
        self._loss_sum = 0.0  # of this epoch, over the whole group
        self._loss_samples = 0
        self._pending: list[torch.Tensor | _Unread | _Totals] = []  # `Tally.totals` of each step
        self._expected = [0, 0]  # samples and checksum of the pending batches

    @property
    def mean_loss(self) -> float | None:
        """Mean loss per sample of this epoch, as far as settled; ``None`` before its first step."""
        return self._loss_sum / self._loss_samples if self._loss_samples else None

    @property
    def has_steps(self) -> bool:
        """Whether any sample was trained on in this epoch, by any member and in any fragment."""
        return self._ledger is not None and bool(self._ledger.counts.any())

    def has_row(self, epoch: int) -> bool:
        """Return whether the history has a row for an epoch."""
        history = self.metrics["history"]
        return bool(history) and history[-1]["epoch"] == epoch

    def keep_ledger(self, length: int) -> None:
        """Start to count how often each of `length` samples is trained on."""
        self._ledger = Ledger(length)

    def count_step(self, batch: Batch, tally: Tally) -> None:
        """Count one optimizer step, with the tally of the whole group."""
        assert self._ledger is not None
        self.step += 1
        self.samples += batch.samples
        self.metrics["steps"], self.metrics["samples"] = self.step, self.samples
        self._ledger.add(batch.positions)
        self._pending.append(tally.totals)
        self._expected[0] += batch.samples
        self._expected[1] += batch.checksum

    def settle(self) -> None:
        """Read the tallies of the steps since the last call.

        Raises
        ------
        NonFiniteLoss
            The loss is NaN or infinite.
        TrainingError
            The members did not train on the samples of the batches: a bug in this package.
        """
        if not self._pending:
            return
        tensors = [totals for totals in self._pending if isinstance(totals, torch.Tensor)]
        unread = [totals for totals in self._pending if isinstance(totals, _Unread)]
        steps = [totals for totals in self._pending if isinstance(totals, _Totals)]
        if tensors:  # read together: each read waits for a GPU
            steps += [_Totals(*row) for row in torch.stack(tensors).tolist()]
        if unread:
            means = torch.stack([each.loss.reshape(()) for each in unread]).tolist()
            steps += [
                _Totals(mean * each.weight, each.samples, each.checksum)
                for mean, each in zip(means, unread, strict=True)
            ]
        loss, samples, received = (sum(column) for column in zip(*steps, strict=True))
        expected, self._expected = self._expected, [0, 0]
        self._pending = []
        if not math.isfinite(loss):
            raise NonFiniteLoss(
                f"the loss is {loss} at step {self.step} or shortly before; lower the learning rate, clip gradients, "
                "or look for bad samples"
            )
        if [int(samples), int(received)] != expected:
            raise TrainingError(f"at step {self.step} or before, members trained on samples other than the batch's")
        self._loss_sum += loss
        self._loss_samples += expected[0]

    def open_epoch(self, epoch: int) -> None:
        """Begin or resume an epoch; its row is written after its last batch."""
        self._row_open = not self.has_row(epoch)

    def close_pass(self, epoch: int, expected: torch.Tensor) -> None:
        """Close an epoch after its last batch: audit the sample counts and write the row of the history.

        Parameters
        ----------
        epoch
            Number of the epoch.
        expected
            Positions of all samples of the epoch.
        """
        assert self._ledger is not None
        self.audit += audit(self._ledger.counts, expected)
        self._write_row(epoch)
        self.metrics["epochs"] = epoch + 1  # already here: a function may return without asking for the next epoch

    def close_epoch(self, epoch: int) -> None:
        """End an epoch; if the user's loop left it early, its row is written here, without an audit."""
        if not self.has_row(epoch):
            self._write_row(epoch)
        self.metrics["epochs"] = epoch + 1
        self._loss_sum, self._loss_samples = 0.0, 0
        if self._ledger is not None:
            self._ledger.clear()

    def log(self, values: Mapping[str, Any]) -> None:
        """Add the user's values to the row of this epoch or, between epochs, to the last row."""
        history = self.metrics["history"]
        plain = {name: _plain(name, value) for name, value in values.items()}
        if self._row_open or not history:
            self._log.update(plain)
        else:
            history[-1].update(plain)
            self.logged.add(self.step, history[-1]["epoch"], plain)

    def log_step(self, epoch: int, every: int, values: Mapping[str, Any]) -> None:
        """Pass the user's values to the trackers, at every so many steps."""
        if self.step and self.step % every == 0:
            self.logged.add(self.step, epoch, {name: _plain(name, value) for name, value in values.items()})

    def state(self) -> dict[str, Any]:
        """Return the metrics as plain values and tensors."""
        self.settle()
        return {
            "step": self.step,
            "samples": self.samples,
            "slot_seconds": self.slot_seconds,
            "audit": asdict(self.audit),
            "metrics": self.metrics,
            "ledger": None if self._ledger is None else self._ledger.counts,
            "log": self._log,
            "logged": self.logged.state(),
            "row_open": self._row_open,
            "loss_sum": self._loss_sum,
            "loss_samples": self._loss_samples,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Load a state, except for the sample counts (see `load_ledger`)."""
        self.step, self.samples = state["step"], state["samples"]
        self.slot_seconds = state["slot_seconds"]
        self.audit = Audit(**state["audit"])
        # In place: the user may have a reference to session.metrics.
        self.metrics.clear()
        self.metrics.update(state["metrics"])
        self._log = state["log"]
        if "logged" in state:  # not in checkpoints of earlier versions
            self.logged.load(state["logged"])
        self._row_open = state["row_open"]
        self._loss_sum, self._loss_samples = state["loss_sum"], state["loss_samples"]
        self._pending = []
        self._expected = [0, 0]

    def load_ledger(self, state: Mapping[str, Any]) -> None:
        """Load the sample counts."""
        assert self._ledger is not None
        if state["ledger"] is not None:
            self._ledger.counts.copy_(state["ledger"])

    def _write_row(self, epoch: int) -> None:
        self.settle()
        self.metrics["loss"] = self.mean_loss
        row = {"epoch": epoch, "loss": self.mean_loss, **self.facts(), **self._log}
        self.metrics["history"].append(row)
        self.logged.add(self.step, epoch, row)
        self._log = {}
        self._row_open = False


def _plain(name: str, value: Any) -> float | int | str | bool:
    if hasattr(value, "item"):  # tensors, arrays and numpy scalars
        shape = tuple(getattr(value, "shape", ()))
        if math.prod(shape) != 1:
            raise UsageError(
                f"session.log({name}=…) takes one number or string, got {type(value).__name__} of shape {shape}; "
                "log its mean, or each of its elements with a name of its own"
            )
        value = value.item()
    if isinstance(value, (bool, int, float, str)):
        return value
    raise UsageError(f"session.log({name}=…) takes numbers and strings, got {type(value).__name__}")
