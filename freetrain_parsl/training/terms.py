"""What passes between a slot and the training inside it. Importable anywhere: no torch here."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from freetrain_parsl.errors import InvalidSettings
from freetrain_parsl.training.code_change import OnCodeChange, check_on_code_change

if TYPE_CHECKING:
    from freetrain_parsl.training.identity import Code

Clock = Callable[[], float]
"""Seconds on a clock that never goes back; injected wherever time matters."""


class PauseReason(str, Enum):
    """Why a fragment ended before its training was done; the value is the sentence that the log shows."""

    REQUESTED = "a pause was requested"
    CLOSING = "a node is about to close"
    LEFT = "the others go on without this process"


@dataclass(frozen=True)
class SessionOptions:
    """How one training keeps its state.

    Parameters
    ----------
    name
        The trainer's name; its checkpoints are in a directory of that name.
    checkpoint_root
        Where the directories of all trainers are. Every node must see it.
    seed
        Start of every random number of the training.
    checkpoint_interval
        Time between periodic checkpoints; ``None``: from what they cost and how often members are lost (Young/Daly).
    mean_time_between_losses
        Observed, of the training as a whole; for that.
    keep
        How many checkpoints stay; two leave one to fall back on.
    save_margin
        How long before a node's closing the last checkpoint must be complete.
    threads
        CPU threads of torch in this process; ``None`` leaves torch's own choice.
    epochs
        Default of ``session.epochs()``.
    root_identity
        Tells the checkpoint root from another directory of its name, see `identify_root`; empty: not known.
    code
        The training's code; ``None``: not known, and not compared with that of checkpoints.
    on_code_change
        What becomes of the training if its newest checkpoint was written by other code, see `OnCodeChange`.
    call
        How names begin that were derived from this function and these arguments; empty: the name was given.

    Raises
    ------
    InvalidSettings
        A value is out of range.
    """

    name: str
    checkpoint_root: Path
    seed: int = 0
    checkpoint_interval: timedelta | None = None
    mean_time_between_losses: timedelta = timedelta(hours=1)
    keep: int = 2
    save_margin: timedelta = timedelta(seconds=2)
    threads: int | None = None
    epochs: int | None = None
    root_identity: str = ""
    code: Code | None = None
    on_code_change: OnCodeChange = "refuse"
    call: str = ""

    def __post_init__(self) -> None:
        who = f"trainer {self.name!r}"
        object.__setattr__(self, "checkpoint_root", Path(self.checkpoint_root))
        if self.seed < 0:
            raise InvalidSettings(f"{who}: seed must be zero or more, got {self.seed}")
        if self.checkpoint_interval is not None and self.checkpoint_interval <= timedelta(0):
            raise InvalidSettings(f"{who}: checkpoint_interval must be positive, got {self.checkpoint_interval}")
        if self.keep < 1:
            raise InvalidSettings(f"{who}: keep must be at least 1 checkpoint, got {self.keep}")
        if self.save_margin < timedelta(0):
            raise InvalidSettings(f"{who}: save_margin must not be negative, got {self.save_margin}")
        check_on_code_change(self.on_code_change)
        if self.threads is not None and self.threads < 1:
            raise InvalidSettings(f"{who}: threads must be at least 1, got {self.threads}")


@dataclass(frozen=True)
class Membership:
    """One process's place among the processes that train together.

    Parameters
    ----------
    trainer
        Name of the training.
    generation
        Number of the fragment: never used twice in one training, so that a process of an earlier
        fragment cannot meet those of this one.
    rank, world_size
        This process's number, from 0, and how many there are.
    timeout
        How long a collective waits for a silent peer, if nobody breaks it off before: a peer that dies is noticed at
        once, and one that hangs by whoever sends orders (`Notice.waited`, `Regroup.abort`).
    meeting
        How long the members wait for each other when they form the group.
    interface
        Network interface that carries the collectives, such as ``"ib0"``; ``None`` lets the library choose.
    address
        This process's IP address at that interface; the members check there that they reach each other before they
        form the group. ``None``: they do not check. Either all members have one or none has.
    admission
        How long the members wait for each other's proofs of membership once all are connected.

    Raises
    ------
    InvalidSettings
        The rank is not one of the group's.
    """

    trainer: str
    generation: int = 0
    rank: int = 0
    world_size: int = 1
    timeout: timedelta = timedelta(minutes=30)
    meeting: timedelta = timedelta(minutes=1)
    interface: str | None = None
    address: str | None = None
    admission: timedelta = timedelta(seconds=30)

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise InvalidSettings(f"trainer {self.trainer!r}: rank {self.rank} is not in a group of {self.world_size}")


@dataclass(frozen=True)
class Regroup:
    """An order to go on, in place, in another process group.

    Parameters
    ----------
    membership
        This process's place in the new group; ``None``: the others go on without it, and its fragment ends.
    abort
        A member of the present group is lost: do not wait for a boundary that all agree on, leave the group at once.
    """

    membership: Membership | None
    abort: bool = False


class Notice:
    """What the slot tells the training while it runs: pause, regroup, and when the node closes.

    Thread-safe; the training reads it at step boundaries.

    Parameters
    ----------
    clock
        Seconds on a clock that never goes back.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._closes: float | None = None
        self._changed = threading.Condition()
        self._order: Regroup | None = None
        self._ended = False
        self._waiting_since: float | None = None
        self.pause_requested = threading.Event()
        """Set it to end the fragment at the next step boundary, after a checkpoint."""
        self.underway = threading.Event()
        """Set by the training after its first step: until then the fragment can be dropped and nothing is lost."""
        self.blocked: Callable[[], float] = lambda: 0.0
        """Set by the training: seconds for which its main thread has been blocked in a collective, as far as seen."""
        self.on_abort: Callable[[], None] = lambda: None
        """Set by the training: breaks the collectives that its main thread may wait in."""

    def close_after(self, remaining: timedelta | None) -> None:
        """Say that the node closes that long from now; ``None`` if that is not known (any more)."""
        self._closes = None if remaining is None else self._clock() + remaining.total_seconds()

    def closes_in(self) -> float | None:
        """Seconds until the node closes, negative once past; ``None`` if unknown."""
        closes = self._closes
        return None if closes is None else closes - self._clock()

    def order(self, regroup: Regroup) -> None:
        """Give an order; one that has not been carried out yet is replaced."""
        with self._changed:
            self._order = regroup
            self._changed.notify_all()
        if regroup.abort:
            self.on_abort()

    @property
    def pending(self) -> Regroup | None:
        """The order that waits to be carried out."""
        return self._order

    def take_order(self, timeout: float | None = 0.0) -> Regroup | None:
        """Take the order out, waiting for one; ``None`` after `timeout` seconds, or once a pause is asked for."""
        with self._changed:
            self._changed.wait_for(lambda: self._order is not None or self._ended, timeout)
            order, self._order = self._order, None
            return order

    def end(self) -> None:
        """Ask for a pause and end all waiting for orders: the slot leaves, or the training is over."""
        self.pause_requested.set()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Mark the time in which this process does nothing but wait for the other members."""
        self._waiting_since = self._clock()
        try:
            yield
        finally:
            self._waiting_since = None

    def waited(self) -> float:
        """Seconds for which it has been waiting for the other members, zero if it is not.

        To be called about once a second: waits in collectives of user code are only seen then.
        """
        since, blocked = self._waiting_since, self.blocked()
        return blocked if since is None else self._clock() - since


@dataclass(frozen=True)
class Progress:
    """How far a training has come. All values can go into JSON.

    Parameters
    ----------
    step
        Optimizer steps done, in all fragments.
    epoch
        Number of the current epoch, from 0.
    samples
        Samples processed, in all fragments.
    samples_total
        Samples of the whole training, if its length is known.
    slot_seconds
        Time spent in the steps that count, in all fragments, times the slots that took part.
    loss
        Mean loss a sample of the current epoch so far; ``None`` before its first step.
    rate
        Recent throughput of this fragment, samples a second, without checkpoint writes; ``None`` at its
        start.
    samples_lost, duplicate_samples
        Samples never, or more than once, trained on in an epoch; counted over the finished epochs.
    checkpoint_step
        Step of the newest durable checkpoint; ``None`` before the first.
    resumed_from
        Step of the checkpoint that this fragment started from; ``None`` if it started afresh.
    write_seconds
        Estimated time to write a checkpoint, seconds.
    refused_checkpoints
        Paths of damaged checkpoints that were passed over when this fragment started.
    in_place
        Whether the training can change its group in place; one whose state is sharded over the members cannot.
    storage_problem
        The condition of a checkpoint directory in which nothing can be saved for now; empty while saving works.
    next_save
        Seconds until the next periodic save is due, then.
    code_note
        What the user should know about a change of the training's code; empty: nothing.
    """

    step: int = 0
    epoch: int = 0
    samples: int = 0
    samples_total: int | None = None
    slot_seconds: float = 0.0
    loss: float | None = None
    rate: float | None = None
    samples_lost: int = 0
    duplicate_samples: int = 0
    checkpoint_step: int | None = None
    resumed_from: int | None = None
    write_seconds: float = 0.0
    refused_checkpoints: tuple[str, ...] = ()
    in_place: bool = True
    storage_problem: str = ""
    next_save: float = 0.0
    code_note: str = ""


@dataclass(frozen=True)
class Ready:
    """A newcomer has everything but the state, and waits for a `Regroup` that takes it in."""


@dataclass(frozen=True)
class Stranded:
    """A survivor has left the group of a lost member, and waits for a `Regroup` (with ``abort``).

    Parameters
    ----------
    reason
        What the lost group's collective said.
    unreachable
        Pairs of ranks that do not reach each other, where the group could not form because of that.
    """

    reason: str
    unreachable: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Regrouped:
    """A member goes on in its new group.

    Parameters
    ----------
    generation
        The new group's.
    paused
        Seconds for which it made no progress: from the boundary, or from the loss of a member, to the next batch.
    transferred
        Seconds of these that went into passing the state on.
    """

    generation: int
    paused: float
    transferred: float


Report: TypeAlias = "Progress | Ready | Stranded | Regrouped"
"""What a training tells its slot while it runs."""


@dataclass(frozen=True)
class Finished:
    """A fragment that ended because the training is done.

    Parameters
    ----------
    value
        What the user's function returned, on this rank.
    progress
        The last state.
    checkpoint
        Directory of the final checkpoint; ``None`` if the function never prepared a model.
    """

    value: Any
    progress: Progress
    checkpoint: Path | None = None


@dataclass(frozen=True)
class Paused:
    """A fragment that ended early; its state is in the checkpoint.

    Parameters
    ----------
    reason
        Why.
    progress
        The state at the end.
    checkpoint
        Directory of the checkpoint to go on from; ``None`` for a member that left while the others go on.
    """

    reason: PauseReason
    progress: Progress = field(default_factory=Progress)
    checkpoint: Path | None = None
