"""What goes on behind a session: agreeing, saving and restoring.

Decisions to stop or to save are taken at *boundaries*: when the next batch or the next epoch is asked for.
All that the user's loop does after a step is then done, and the state is whole. At a boundary the members of
a group add up one small vector, so that all of them decide the same; a group of one does not communicate.
"""

from __future__ import annotations

import logging
import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import torch

from freetrain_parsl.errors import CheckpointError, CheckpointMismatch, UsageError
from freetrain_parsl.training import rng
from freetrain_parsl.training.books import Books
from freetrain_parsl.training.keeper import Keeper
from freetrain_parsl.training.pace import Pace
from freetrain_parsl.training.terms import Clock, Notice, PauseReason, Progress, SessionOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from freetrain_parsl.training.checkpoint import Restored
    from freetrain_parsl.training.loader import Order, Share
    from freetrain_parsl.training.membership import Group

logger = logging.getLogger(__name__)

_REPORT_SECONDS = 0.5  # least time between two reports


class Unwind(BaseException):
    """Carries a pause through the user's function; no Exception, so that no ``except Exception`` stops it."""

    def __init__(self, reason: PauseReason) -> None:
        super().__init__(reason.value)
        self.reason = reason


class Stateful(Protocol):
    """Anything that can be saved: models, optimizers, schedulers, gradient scalers, averages."""

    def state_dict(self) -> Any:
        """Return the state."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Take a state over."""


class Engine:
    """One member's part in one fragment of a training.

    Parameters
    ----------
    options
        How the training keeps its state.
    group
        The fragment's members.
    notice
        What the slot tells.
    report
        Gets the progress, on the first member; must not block.
    clock
        Seconds on a clock that never goes back.

    Raises
    ------
    DamagedCheckpoint, CheckpointMismatch, CheckpointError
        The training has a state that cannot be used.
    """

    def __init__(
        self,
        options: SessionOptions,
        group: Group,
        notice: Notice,
        report: Callable[[Progress], None],
        clock: Clock,
    ) -> None:
        self.options = options
        self.group = group
        self.books = Books()
        self.device = torch.device("cpu")
        if torch.cuda.is_available():
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.unwinding: PauseReason | None = None
        self.keeper = Keeper(options, group)

        self._notice = notice
        self._report = report
        self._clock = clock
        self._objects: dict[str, Stateful] = {}
        self._order: Order | None = None
        self._total_epochs: int | None = None
        self._position = 0  # batches of this epoch that are behind us
        self._pass_ended = False  # whether this epoch has had all its batches
        self._pass_ended_here = False  # … in this fragment
        self._in_hand: tuple[int, Share] | None = None
        self._has_gradients = False
        self._pace = Pace()
        self._paced_samples = 0  # samples at the last boundary
        self._write_seconds = 0.0
        now = clock()
        self._boundary_time = self._save_time = now
        self._report_time = -math.inf
        self._saved_at: tuple[int, int, int, bool] | None = None

        self._restored = self.keeper.restore()
        self._resumed_from: int | None = None
        self._refused: tuple[str, ...] = ()
        if self._restored is not None:
            self._take_over(self._restored)
        self._started = False

    @property
    def user_directory(self) -> Path:
        """Where the user's function may keep files of its own."""
        return self.keeper.path / "files"

    # ── before the loop ───────────────────────────────────────────────────────────────────────────

    def register(self, objects: Mapping[str, Stateful], size: int) -> None:
        """Save these objects from now on, and restore them, in this order, if there is a state.

        Parameters
        ----------
        objects
            Name -> object.
        size
            Estimated bytes of a checkpoint.

        Raises
        ------
        CheckpointMismatch
            The checkpoint is of other objects.
        """
        if self._objects:
            raise UsageError("call session.prepare once, with everything that has a state")
        self._objects = dict(objects)
        self.keeper.assume_size(size)
        if self._restored is None:
            return
        states = self._restored.state["objects"]
        if list(states) != list(objects):
            self._mismatch(f"it holds {', '.join(states)}, but session.prepare got {', '.join(objects)}")
        for name, target in objects.items():
            self._load(name, target, states[name])

    def use(self, order: Order) -> None:
        """Train on a dataset in that order.

        Raises
        ------
        CheckpointMismatch
            The checkpoint is of another dataset or batch size.
        """
        if self._order is not None:
            raise UsageError("a session has one loader; for other data, as in validation, use a torch DataLoader")
        self._order = order
        self.books.keep_ledger(order.length)
        if self._restored is None or self._restored.state["order"] is None:
            return
        for name, before in self._restored.state["order"].items():
            if getattr(order, name) != before:
                self._mismatch(f"it was trained with {name} {before!r}, now it is {getattr(order, name)!r}")
        if self.group.is_first:
            self.books.load_ledger(self._restored.state["books"])

    def start(self, total_epochs: int) -> None:
        """Begin to train: from here on each member draws random numbers of its own.

        Until here all members, in all fragments, draw the same, so that what the user's function makes
        before its loop (initial weights, a random split) does not depend on the fragment.
        """
        if not self._objects:
            raise UsageError("call session.prepare(model, optimizer) before session.epochs()")
        self._total_epochs = total_epochs
        if self._started:
            return
        self._started = True
        states = self._restored.state["rng"] if self._restored else []
        if self.group.rank < len(states):
            rng.restore(states[self.group.rank])
        else:
            rng.seed_all(self.options.seed, self.books.step, self.group.rank)
        self._restored = None  # everything in it is in place now
        # From here on: the time before the loop made nothing that a periodic checkpoint could save.
        self._boundary_time = self._save_time = self._clock()
        self._tell(at_once=True)

    # ── in the loop ───────────────────────────────────────────────────────────────────────────────

    def boundary(self) -> None:
        """Decide, together with the others, whether to stop or to save here.

        Raises
        ------
        Unwind
            Stop: the state is saved.
        PeerLost
            A member is gone.
        """
        self.check_running()
        if self.books.samples > self._paced_samples:
            seconds = self._clock() - self._boundary_time
            self._pace.add(self.books.samples - self._paced_samples, seconds)
            self.books.slot_seconds += seconds * self.group.size
            self._notice.underway.set()
            self._paced_samples = self.books.samples
        reason, save_due = self._decide()
        if reason is not None:
            self._pause(reason)
        if save_due:
            self._save_periodically()
        self._tell()
        self._boundary_time = self._clock()

    def check_running(self) -> None:
        """Go on unwinding if the user's function held up the first attempt."""
        if self.unwinding is not None:
            raise Unwind(self.unwinding)

    def begin_pass(self) -> int | None:
        """Begin, or go on with, the batches of this epoch.

        Returns
        -------
        first
            The batch to begin with; ``None`` if an earlier fragment has done them all.
        """
        self.check_running()
        if not self._started:
            raise UsageError("iterate over the session's loader inside `for epoch in session.epochs(…)`")
        if self._pass_ended_here:
            raise UsageError(
                "the session's loader gives its batches once an epoch; go over them again with a DataLoader"
            )
        return None if self._pass_ended else self._position

    def hand_out(self, batch: int, share: Share) -> None:
        """Note what the user's code is going to train on."""
        self._in_hand = (batch, share)
        self._has_gradients = False

    def take_back(self) -> None:
        """Note that the user's code is done with a batch, whether it made a step or not."""
        if self._in_hand is not None:
            self._position = self._in_hand[0] + 1
            self._in_hand = None

    def weigh(self, loss: torch.Tensor) -> torch.Tensor:
        """Scale this member's mean loss so that the group's mean gradient is that of the global batch.

        Parameters
        ----------
        loss
            Mean over this member's share, a scalar.
        """
        self.check_running()
        if self._in_hand is None:
            raise UsageError("session.step() goes once with each batch of `for … in session.loader(…)`")
        if self._has_gradients:
            raise UsageError("session.backward() goes once with each batch; add several losses up before it")
        self._has_gradients = True
        _, share = self._in_hand
        self.books.add_loss(loss, share)
        if self.group.size == 1:
            return loss
        return loss * (self.group.size * share.weight / share.batch)

    def check_gradients(self) -> None:
        """Refuse a step that no loss was given for."""
        self.check_running()
        if self._in_hand is None or not self._has_gradients:
            raise UsageError("session.step() needs a loss: session.step(loss), or session.backward(loss) before it")

    def count_step(self) -> None:
        """Count the optimizer's step on the batch in hand."""
        assert self._in_hand is not None
        self.books.count_step(self._in_hand[1])
        self.take_back()

    def end_pass(self, expected: torch.Tensor) -> None:
        """Close the books of an epoch that has had all its batches, which has the positions `expected`."""
        self.check_running()
        self.books.close_pass(self.group, expected)
        self._pass_ended = self._pass_ended_here = True

    def log(self, values: Mapping[str, Any]) -> None:
        """Put values of the user's own into the history."""
        if not self._started:  # what stands there runs again in each fragment
            raise UsageError("call session.log inside or after `for epoch in session.epochs(…)`")
        self.books.log(values)

    def end_epoch(self) -> None:
        """Go on to the next epoch."""
        self.check_running()
        self.books.close_epoch(self.group)
        self._position = 0
        self._pass_ended = self._pass_ended_here = False
        self._in_hand = None

    # ── the end ───────────────────────────────────────────────────────────────────────────────────

    def finish(self) -> None:
        """Save the final state."""
        if self._objects:
            self._save("the training is done")
        self._tell(at_once=True)

    def progress(self) -> Progress:
        """Return how far the training is."""
        total = None
        if self._total_epochs is not None and self._order is not None:
            total = self._total_epochs * self._order.samples
        return Progress(
            step=self.books.step,
            epoch=self.books.epoch,
            samples=self.books.samples,
            samples_total=total,
            slot_seconds=self.books.slot_seconds,
            loss=self.books.mean_loss if self.books.mean_loss is not None else self.books.metrics["loss"],
            rate=self._pace.rate,
            samples_lost=self.books.audit.samples_lost,
            duplicate_samples=self.books.audit.duplicate_samples,
            checkpoint_step=self.keeper.newest.step if self.keeper.newest else None,
            resumed_from=self._resumed_from,
            write_seconds=self.keeper.write_seconds_estimate,
            refused_checkpoints=self._refused,
        )

    # ── deciding ──────────────────────────────────────────────────────────────────────────────────

    def _decide(self) -> tuple[PauseReason | None, bool]:
        if self.group.is_first:
            self._write_seconds = self.keeper.write_seconds_estimate
        requested: float = self._notice.pause_requested.is_set()
        closing: float = self._closing()
        save_due: float = self.group.is_first and self._save_due()
        if self.group.size > 1:
            # One sum over: votes, losses, and the first member's estimate, which only it can learn.
            estimate = self._write_seconds if self.group.is_first else 0.0
            votes = [requested, closing, save_due, *self.books.pending(), estimate]
            requested, closing, save_due, loss_sum, samples, self._write_seconds = self.group.sum(
                torch.tensor(votes, dtype=torch.float64)
            ).tolist()
            self.books.settle(loss_sum, int(samples))
        if closing:
            return PauseReason.CLOSING, False
        if requested:
            return PauseReason.REQUESTED, False
        return None, bool(save_due)

    def _closing(self) -> bool:
        """Whether one more step would leave too little time for the last checkpoint."""
        closes_in = self._notice.closes_in()
        if closes_in is None:
            return False
        margin = self.options.save_margin.total_seconds()
        return closes_in <= self._write_seconds + margin + self._pace.longest_step

    def _save_due(self) -> bool:
        return self._clock() - self._save_time >= self.options.checkpoint_interval.total_seconds()

    def _pause(self, reason: PauseReason) -> NoReturn:
        self._save(reason.value)
        self.unwinding = reason
        self._tell(at_once=True)
        raise Unwind(reason)

    def _tell(self, *, at_once: bool = False) -> None:
        now = self._clock()
        if not self.group.is_first or (not at_once and now - self._report_time < _REPORT_SECONDS):
            return
        self._report_time = now
        if self.group.size == 1:
            self.books.settle_with(self.group)
        self._report(self.progress())

    # ── saving and restoring ──────────────────────────────────────────────────────────────────────

    def _save(self, reason: str) -> None:
        """Save now, unless this very state is saved already; all members call this.

        Raises
        ------
        CheckpointError
            It could not be written.
        """
        here = (self.books.step, self.books.epoch, self._position, self._pass_ended)
        if here == self._saved_at:
            return
        self.keeper.save(self._state(), step=self.books.step, epoch=self.books.epoch, reason=reason)
        self._save_time = self._clock()
        self._saved_at = here

    def _save_periodically(self) -> None:
        """Save, but let the training go on if that is impossible for now: the one before is still good."""
        try:
            self._save("periodic")
        except CheckpointError as error:
            self._save_time = self._clock()
            logger.warning("%s; training goes on, next try in %s", error, self.options.checkpoint_interval)
        else:
            self._tell(at_once=True)

    def _state(self) -> dict[str, Any]:
        return {
            "seed": self.options.seed,
            "objects": {name: target.state_dict() for name, target in self._objects.items()},
            "books": self.books.state(self.group),
            "position": self._position,
            "pass_ended": self._pass_ended,
            "rng": self.group.gather(rng.capture()),
            "order": asdict(self._order) if self._order else None,
        }

    def _take_over(self, restored: Restored) -> None:
        state = restored.state
        if state["seed"] != self.options.seed:
            self._mismatch(f"it was trained with seed {state['seed']}, now it is {self.options.seed}")
        self.books.load(state["books"])
        self._position, self._pass_ended = state["position"], state["pass_ended"]
        self._refused = restored.refused
        self._resumed_from = self.books.step
        self._paced_samples = self.books.samples
        self._saved_at = (self.books.step, self.books.epoch, self._position, self._pass_ended)

    def _load(self, name: str, target: Stateful, state: Any) -> None:
        try:
            target.load_state_dict(state)
        except (RuntimeError, ValueError, KeyError, TypeError) as error:
            self._mismatch(f"its {name} does not fit: {' '.join(str(error).split())}", error)

    def _mismatch(self, difference: str, cause: Exception | None = None) -> NoReturn:
        where = self.keeper.newest.path if self.keeper.newest else self.keeper.path
        raise CheckpointMismatch(
            f"checkpoint {where} is of another training: {difference}; "
            "undo the change, or use another trainer name or checkpoint directory"
        ) from cause
