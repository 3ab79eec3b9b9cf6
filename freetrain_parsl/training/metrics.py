"""The metrics of a training job: steps, samples, losses, sample counts, the user's metrics, and the rows for trackers.

The last rows are part of the state: a process that becomes the first member, and a training job that resumes from a
checkpoint, reports them again, and the driver drops duplicates. So no row is lost when a process or the driver
fails between a value and its report.
"""

from __future__ import annotations

import json
import math
import time
from collections import deque
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from freetrain_parsl.errors import NonFiniteLoss, TrainingError, UsageError
from freetrain_parsl.training.data.audit import Audit, Ledger, audit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from freetrain_parsl.training.data.lazy_positions import Positions
    from freetrain_parsl.training.data.order import Batch, Piece
    from freetrain_parsl.training.mailbox import Clock

__all__ = ["LoggedRows"]

_KEPT: Final = 1000  # rows in the state; one for each epoch, or as many as the user logs by steps
_LONGEST_TEXT: Final = 500  # characters of a value
_LONGEST_ROW: Final = 60_000  # characters; a row is one field of a message
_LONGEST_REPORT: Final = 256_000  # characters


class LoggedRows:
    """The last rows, and the number of rows so far.

    Parameters
    ----------
    clock
        Seconds since the epoch.
    """

    def __init__(self, clock: Clock = time.time) -> None:
        self._clock = clock
        self._rows: deque[str] = deque(maxlen=_KEPT)
        self.count = 0
        """Number of rows so far."""

    def add(self, step: int, epoch: int | None, values: Mapping[str, Any]) -> None:
        """Add values of an epoch, or of a step alone; without those that are ``None``, or too long for a message."""
        short = {
            name: value[:_LONGEST_TEXT] if isinstance(value, str) else value
            for name, value in values.items()
            if value is not None
        }
        row = json.dumps({"step": step, "epoch": epoch, "time": self._clock(), "values": short})
        if len(row) <= _LONGEST_ROW:
            self._rows.append(row)
            self.count += 1

    def reports(self, sent: int) -> Iterator[tuple[str, ...]]:
        """Yield the rows after the first `sent` ones, as far as they are kept, in portions for one message each."""
        new = self.count - sent if 0 <= sent <= self.count else len(self._rows)
        portion: list[str] = []
        length = 0
        for row in list(self._rows)[-new:] if new else []:
            if length + len(row) > _LONGEST_REPORT:
                yield tuple(portion)
                portion, length = [], 0
            portion.append(row)
            length += len(row)
        if portion:
            yield tuple(portion)

    def state(self) -> dict[str, Any]:
        """Return the rows as plain values."""
        return {"count": self.count, "rows": list(self._rows)}

    def load(self, state: Mapping[str, Any]) -> None:
        """Load a state."""
        self.count = state["count"]
        self._rows = deque(state["rows"], maxlen=_KEPT)


class Tally:
    """Losses, items, sample counts and checksum of one step, in one tensor that is summed with the gradients.

    Each shard has its own elements for the loss and the items: so the sums over the members have the same bits,
    whichever member had which shard. The loss is a mean over the items: samples, unless others are given.

    Parameters
    ----------
    batch
        The batch.
    device
        Device of the losses.
    """

    def __init__(self, batch: Batch, device: torch.device) -> None:
        self.device = device
        self._shards = batch.shards
        self._is_divided = batch.is_divided
        self._losses: list[tuple[int, torch.Tensor | float, torch.Tensor | float]] = []  # shard, mean, its items
        self._samples = self._checksum = 0
        self._values: torch.Tensor | None = None

    @property
    def values(self) -> torch.Tensor:
        """The tensor, once all pieces have been added."""
        if self._values is None:
            self._values = torch.zeros(2 * self._shards + 2, dtype=torch.float64, device=self.device)
            for shard, loss, items in self._losses:
                product = (loss.double() if isinstance(loss, torch.Tensor) else loss) * items
                # The mean over no items is NaN.
                counts = isinstance(items, torch.Tensor)
                self._values[shard] += torch.where(items > 0, product, 0.0) if counts else product  # type: ignore[arg-type]
                self._values[self._shards + shard] += items
            # Filled on the device: no copy to it.
            self._values[-2], self._values[-1] = self._samples, self._checksum
        return self._values

    @property
    def mean(self) -> torch.Tensor | float:
        """Mean loss over all items; on a GPU a tensor, which has not been read."""
        if self._read is not None:
            return self._read.loss / self._read.items if self._read.items else math.nan
        if self._is_of_one and len(self._losses) == 1:
            return self._losses[0][1]
        return self._sums[0] / self._sums[1]

    @property
    def items(self) -> torch.Tensor | float:
        """Number of items; on a GPU a tensor, unless they are samples."""
        return self._sums[1] if self._read is None else self._read.items

    @property
    def totals(self) -> torch.Tensor | _Unread | _Totals:
        """Sum of the losses, items, samples and checksum; of shape (4,) if they are sums over several members."""
        if self._read is not None:
            return self._read
        if self._is_of_one and len(self._losses) == 1:
            _, loss, items = self._losses[0]
            assert isinstance(loss, torch.Tensor), "of a GPU"
            if not isinstance(items, torch.Tensor):
                return _Unread(loss, items, self._samples, self._checksum)
        # The sum of the losses has the same shape and order, whichever member had which shard.
        return torch.cat([self._sums, self.values[-2:]])

    def add(self, loss: torch.Tensor, piece: Piece, items: torch.Tensor | float | None = None) -> None:
        """Add the mean loss of a piece over `items`; ``None``: over its samples."""
        if not piece.weight:
            return
        self._samples += piece.weight
        if self._is_divided:
            self._checksum += piece.checksum
        if items is None:
            items = piece.weight
        on_cpu = self.device.type == "cpu"
        if on_cpu and isinstance(items, torch.Tensor):
            items = items.item()
        if not isinstance(items, torch.Tensor) and not items:
            return  # the mean over no items is NaN
        self._losses.append((piece.shard, loss.item() if on_cpu else loss.detach(), items))

    @property
    def _sums(self) -> torch.Tensor:
        """Sums of the losses and of the items, shape (2,)."""
        return self.values[:-2].view(2, -1).sum(1)

    @property
    def _is_of_one(self) -> bool:
        """Whether one member had the whole batch."""
        return self._values is None and self._shards == 1

    @property
    def _read(self) -> _Totals | None:
        """The totals if they are known in this process already; ``None`` on a GPU, or of several members."""
        if self._is_of_one and self.device.type == "cpu":
            if len(self._losses) == 1:
                _, mean, items = self._losses[0]
                assert isinstance(mean, float), "read by add"
                assert not isinstance(items, torch.Tensor), "likewise"
                return _Totals(mean * items, items, self._samples, self._checksum)
            loss = float(sum(loss * items for _, loss, items in self._losses))
            items = float(sum(items for _, _, items in self._losses))
            return _Totals(loss, items, self._samples, self._checksum)
        return None


class _Totals(NamedTuple):
    """Sum of the losses, items, samples and checksum of one step."""

    loss: float
    items: float
    samples: int
    checksum: int


class _Unread(NamedTuple):
    """The totals of a step on a GPU: its loss is the mean over the items, and has not been read."""

    loss: torch.Tensor
    items: float
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
        self._loss_items = 0.0
        self._pending: list[torch.Tensor | _Unread | _Totals] = []  # `Tally.totals` of each step
        self._expected = [0, 0]  # samples and checksum of the pending batches

    @property
    def mean_loss(self) -> float | None:
        """Mean loss per item of this epoch, as far as settled; ``None`` before its first step."""
        return self._loss_sum / self._loss_items if self._loss_items else None

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
        expected, self._expected = self._expected, [0, 0]
        pending, self._pending = self._pending, []
        loss, items, samples, received = _sum_of(pending)
        if not math.isfinite(loss) or not math.isfinite(items):
            raise NonFiniteLoss(
                f"the loss is {loss} at step {self.step} or shortly before; lower the learning rate, clip gradients, "
                "or look for bad samples"
            )
        if [int(samples), int(received)] != expected:
            raise TrainingError(f"at step {self.step} or before, members trained on samples other than the batch's")
        self._loss_sum += loss
        self._loss_items += items

    def open_epoch(self, epoch: int) -> None:
        """Begin or resume an epoch; its row is written after its last batch."""
        self._row_open = not self.has_row(epoch)

    def close_pass(self, epoch: int, expected: Positions) -> None:
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
        self._loss_sum = self._loss_items = 0.0
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

    def log_step(self, every: int, values: Mapping[str, Any]) -> None:
        """Pass the user's values to the trackers, at every so many steps."""
        if self.step and self.step % every == 0:
            self.logged.add(self.step, None, {name: _plain(name, value) for name, value in values.items()})

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
            "loss_samples": self._loss_items,
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
        self.logged.load(state["logged"])
        self._row_open = state["row_open"]
        self._loss_sum, self._loss_items = state["loss_sum"], state["loss_samples"]
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


def _sum_of(pending: list[torch.Tensor | _Unread | _Totals]) -> tuple[float, ...]:
    """Return the sums of losses, items, samples and checksums of several steps."""
    if len(pending) == 1 and isinstance(pending[0], _Totals):
        return pending[0]
    tensors = [totals for totals in pending if isinstance(totals, torch.Tensor)]
    unread = [totals for totals in pending if isinstance(totals, _Unread)]
    steps = [totals for totals in pending if isinstance(totals, _Totals)]
    if tensors:  # read together: each read waits for a GPU
        steps += [_Totals(*row) for row in torch.stack(tensors).tolist()]
    if unread:
        means = torch.stack([each.loss.reshape(()) for each in unread]).tolist()
        steps += [
            _Totals(mean * each.items, each.items, each.samples, each.checksum)
            for mean, each in zip(means, unread, strict=True)
        ]
    return tuple(sum(column) for column in zip(*steps, strict=True))


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
