"""A training as the driver knows it: what was submitted, and the slots that run it now, in which group."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from freetrain_parsl.errors import InvalidSettings, InvalidTrainer
from freetrain_parsl.planning.model import RescaleCosts, Trainer
from freetrain_parsl.training.code_change import OnCodeChange, check_on_code_change

if TYPE_CHECKING:
    from concurrent.futures import Future
    from datetime import timedelta
    from pathlib import Path

    from freetrain_parsl.planning.scaling import ScalingCurve
    from freetrain_parsl.training.identity import Code

__all__ = ["Change", "Generation", "Loss", "Participant", "Role", "Training", "TrainingRequest", "TrainingSettings"]


@dataclass(frozen=True)
class TrainingRequest:
    """What ``@training_app`` asks of the executor, for one call.

    Parameters
    ----------
    name
        Names the training and its checkpoints; letters, digits, ``.``, ``_`` and ``-``.
    min_nodes, max_nodes
        Bounds on its number of nodes.
    scaling
        Samples per second against number of nodes.
    priority
        Positive weight for the objectives that use one.
    samples
        Work in all, in samples; ``None`` until the session knows it from its loader and epochs.
    epochs
        Default of ``session.epochs()``.
    costs
        What a rescale costs; ``None``: the executor's own.
    seed
        Of everything random in the training.
    checkpoint_interval
        Between periodic checkpoints; ``None``: the executor's own.
    code
        Of the function, to compare with that of its checkpoints; ``None``: not known.
    on_code_change
        What becomes of it if its newest checkpoint was written by other code, see `OnCodeChange`.
    call
        How names begin that are derived from this function and these arguments; empty: the name was given.
    """

    name: str
    min_nodes: int
    max_nodes: int
    scaling: ScalingCurve
    priority: float = 1.0
    samples: int | None = None
    epochs: int | None = None
    costs: RescaleCosts | None = None
    seed: int = 0
    checkpoint_interval: timedelta | None = None
    code: Code | None = None
    on_code_change: OnCodeChange = "refuse"
    call: str = ""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", self.name):
            raise InvalidTrainer(
                f"training name {self.name!r} must be 1 to 128 letters, digits, '.', '_' or '-', "
                "the first a letter or digit"
            )
        for word, value in (("samples", self.samples), ("epochs", self.epochs)):
            if value is not None and value <= 0:
                raise InvalidTrainer(f"training {self.name!r}: {word} must be positive, got {value}")
        try:
            check_on_code_change(self.on_code_change)
        except InvalidSettings as error:
            raise InvalidTrainer(f"training {self.name!r}: {error}") from None
        self.trainer()  # its own checks

    def trainer(self, costs: RescaleCosts | None = None, submitted: float = 0.0) -> Trainer:
        """Describe it to the planner."""
        return Trainer(
            name=self.name,
            min_nodes=self.min_nodes,
            max_nodes=self.max_nodes,
            curve=self.scaling,
            costs=self.costs or costs or RescaleCosts(),
            work_left=float("inf") if self.samples is None else float(self.samples),
            priority=self.priority,
            submitted=submitted,
        )


@dataclass(frozen=True)
class TrainingSettings:
    """How trainings are treated that do not say otherwise; times in seconds.

    Parameters
    ----------
    checkpoint_root
        Where trainings keep their checkpoints; reachable from the nodes.
    checkpoint_interval, keep, save_margin
        See ``training.terms.SessionOptions``.
    costs
        Rescale costs of trainings that state none, until they are measured.
    threads
        Threads of each slot's torch; ``None``: torch's own choice.
    loss_timeout
        Members that do nothing but wait for each other for so long have lost each other; and members that should end
        after a loss must within this time.
    meeting_timeout
        How long the members of a new group wait for each other.
    max_restarts
        Crashes, on nodes that nobody took, that a training may answer without reaching a further step.
    root_identity
        Tells the checkpoint root from another directory of its name, see `storage.posix.identify_root`.
    """

    checkpoint_root: Path
    checkpoint_interval: float | None = None
    keep: int = 2
    save_margin: float = 2.0
    costs: RescaleCosts = field(default_factory=RescaleCosts)
    threads: int | None = None
    loss_timeout: float = 10.0
    meeting_timeout: float = 60.0
    max_restarts: int = 3
    root_identity: str = ""


class Role(Enum):
    """What a slot that runs a training is to it."""

    MEMBER = "one of the present group, or ordered into the next"
    NEWCOMER = "warms up, to be taken in"
    LEAVER = "was told to leave"


@dataclass
class Participant:
    """A slot that runs a training.

    Parameters
    ----------
    slot, node
        Where.
    run
        Names the order by which it runs it; no two are ever confused.
    role
        See `Role`.
    has_state
        It could pass the training's state on.
    began
        When it was told to run the training, seconds since the epoch.
    ready
        When a newcomer said that it lacks nothing but the state, seconds since the epoch.
    stranded
        When it left a group that had lost a member, seconds since the epoch; ``None`` while it trains.
    complaint
        What its collective said then.
    waited
        Seconds for which it had been waiting for the other members, when it told last.
    deadline
        By when it must have ended, or have gone on, or its process is ended; seconds since the epoch.
    """

    slot: str
    node: str
    run: int
    role: Role
    has_state: bool = False
    began: float = 0.0
    ready: float | None = None
    stranded: float | None = None
    complaint: str = ""
    waited: float = 0.0
    deadline: float | None = None
    cut_off: bool = False
    """Others of its group do not reach it: they go on without it."""

    def goes_on(self) -> None:
        """Note that it is a member of a group that works."""
        self.role, self.has_state = Role.MEMBER, True
        self.stranded, self.waited, self.deadline = None, 0.0, None


@dataclass
class Generation:
    """One fragment of a training: one process group on one set of slots.

    Parameters
    ----------
    number
        Counts the groups of all trainings of this driver, from 1: no two are ever confused.
    nodes
        Where it runs.
    ranks
        Its slots in order of rank.
    began
        When it was ordered, seconds since the epoch.
    running
        Those of its slots that have not ended.
    pausing
        Its members were told to stop, or stop by themselves.
    reported
        Its first member has told where it began.
    lost
        It lost members.
    """

    number: int
    nodes: frozenset[str]
    ranks: tuple[str, ...]
    began: float
    running: set[str] = field(default_factory=set)
    pausing: bool = False
    reported: bool = False
    lost: bool = False

    def __post_init__(self) -> None:
        self.running.update(self.ranks)

    @property
    def first(self) -> str:
        """The slot of rank 0."""
        return self.ranks[0]

    def key(self, training: str) -> str:
        """Name its rendezvous store."""
        return f"{training}/{self.number}"


@dataclass
class Change:
    """An order to regroup that is being carried out.

    Parameters
    ----------
    before, after
        The generations.
    abort
        It answers a loss.
    grows
        It takes newcomers in.
    waiting
        Slots of the new group that have not said that they go on in it.
    paused
        Longest pause that one of them told, seconds.
    begun
        One of them has said so: the training goes on in the new group.
    """

    before: Generation
    after: Generation
    abort: bool
    grows: bool
    waiting: set[str]
    paused: float = 0.0
    begun: bool = False


@dataclass(frozen=True)
class Loss:
    """A member that is gone; a `crash` is a loss that nobody outside caused."""

    reason: str
    crash: bool


@dataclass
class Training:
    """A training between its submission and the end of its last slot."""

    request: TrainingRequest
    payload: bytes
    future: Future[Any]
    trainer: Trainer | None = None
    """As the planner knows it."""
    costs: RescaleCosts = field(default_factory=RescaleCosts)
    """Of its rescales, as measured so far."""
    desired: frozenset[str] = frozenset()
    crew: dict[str, Participant] = field(default_factory=dict)
    """Every slot that runs it, by name."""
    generation: Generation | None = None
    change: Change | None = None
    in_place: bool = True
    """Its group can change while it runs."""
    checkpoint_step: int | None = None
    furthest: int = 0
    """The furthest step reached."""
    first_step: int | None = None
    """The step that it stood at when this run began with it; -1 without a checkpoint."""
    code_note: str = ""
    """What the user should know about a change of its code."""
    restarts: int = 0
    """Crashes since that step was reached."""
    last_crash: str = ""
    losses: list[Loss] = field(default_factory=list)
    """Not answered yet."""
    cancelled: bool = False
    """It is to end as soon as its slots have saved its state."""
    storage_problem: str = ""
    """Why it cannot save or, if it is `withheld`, cannot start: the condition of the checkpoint directory."""
    withheld: bool = False
    """It gets no nodes until the checkpoint directory can be used again."""
    last_lost: float = 0.0
    waiting_since: float = 0.0
    """Since when it has had no group, seconds since the epoch."""
    stall_told: str = ""
    """Why it does not get on, as the journal has it; empty if it does."""

    @property
    def name(self) -> str:
        """The training's name."""
        return self.request.name

    @property
    def over(self) -> bool:
        """Whether it has finished or failed."""
        return self.future.done()

    @property
    def trained(self) -> bool:
        """Whether a step was made in this run."""
        return self.first_step is None or self.furthest > self.first_step

    def members(self) -> list[Participant]:
        """List the members of the present group that have not ended, in order of rank."""
        ranks = self.generation.ranks if self.generation is not None else ()
        return [self.crew[slot] for slot in ranks if slot in self.crew and self.crew[slot].role is Role.MEMBER]

    def newcomers(self) -> list[Participant]:
        """List those who warm up or wait to be taken in."""
        return [one for one in self.crew.values() if one.role is Role.NEWCOMER]

    def take(self, progress: dict[str, Any]) -> bool:
        """Note what a progress report says; whether there is a new checkpoint."""
        self.in_place = progress["in_place"]
        if self.first_step is None:
            self.first_step = -1 if progress["resumed_from"] is None else progress["resumed_from"]
        if progress["step"] > self.furthest:
            self.furthest, self.restarts = progress["step"], 0
        before, self.checkpoint_step = self.checkpoint_step, progress["checkpoint_step"]
        return self.checkpoint_step is not None and self.checkpoint_step != before

    def count(self, loss: Loss) -> None:
        """Count a loss as a restart without progress, if it is a crash."""
        if loss.crash:
            self.restarts += 1
            self.last_crash = loss.reason
