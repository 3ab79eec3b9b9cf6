"""The port for kinds of jobs: their interface for the driver's manager, slots and commands.

A job is one trainer of the planner: a training job by itself, or training jobs that a kind of jobs runs together. Kinds
are found by their entry points in the group ``freetrain.jobs``; a training job that none of them takes is a job of its
own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol

from freetrain_parsl.entry_points import EntryPoints, subclass_of
from freetrain_parsl.protocol import messages
from freetrain_parsl.protocol.codec import by_type

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
    from concurrent.futures import Future
    from datetime import timedelta

    from freetrain_parsl.executor.driver.slot_registry import SlotRegistry
    from freetrain_parsl.executor.jobs.commands import Addressed, OwnCommand
    from freetrain_parsl.executor.jobs.curve_learning import CurveLearning
    from freetrain_parsl.executor.jobs.events import Event
    from freetrain_parsl.executor.jobs.request import SharedSettings, Training, TrainingRequest
    from freetrain_parsl.executor.payloads.value_files import ValueFiles
    from freetrain_parsl.executor.slot.output import OutputCapture
    from freetrain_parsl.planning.model import CostsInSeconds, PlannedJob
    from freetrain_parsl.protocol.journal import Record
    from freetrain_parsl.protocol.messages import RunEnded, RunMessage, RunStart, StoreReply, ToDriver

__all__ = ["JOBS", "TO_DRIVER", "TO_SLOT", "HeldJob", "JobKind", "Jobs", "Run", "kind_of"]


class HeldJob(Protocol):
    """One trainer of the planner: events in, commands out. Pure: no clock, thread, socket or file."""

    @property
    def name(self) -> str:
        """Name for the planner, slots and the journal; unique among the jobs that are not over."""

    @property
    def states_curve(self) -> bool:
        """Whether it states its own curve; otherwise the curve is learned from its measurements."""

    @property
    def ended(self) -> bool:
        """Whether no training job of it is pending, and no run left."""

    @property
    def idle(self) -> bool:
        """Whether it neither runs nor has nodes assigned."""

    @property
    def waits_for_nodes(self) -> bool:
        """Whether only an event can change it, so that it rarely gets `TimePassed`."""

    @property
    def settled(self) -> bool:
        """Whether it trains undisturbed on the nodes that it is assigned, so that only events can soon change it."""

    @property
    def forming(self) -> int | None:
        """Number of the group whose rendezvous it watches."""

    def run_in(self, slot: str) -> int | None:
        """Return the number of its run in a slot."""

    def submit(self) -> Sequence[Addressed]:
        """Return the commands for a new job."""

    def handle(self, event: Event, registry: SlotRegistry, now: float) -> Sequence[Addressed]:
        """Handle an event, and return the resulting commands.

        Parameters
        ----------
        event
            The event.
        registry
            The connected slots; only read.
        now
            Seconds.
        """


class Jobs(Protocol):
    """The job manager's interface for kinds of jobs."""

    settings: SharedSettings
    registry: SlotRegistry
    curves: CurveLearning
    numbers: Iterator[int]
    """Numbers that are unique within the driver."""

    def clock(self) -> float:
        """Return seconds since the epoch, never stepped."""

    def offer(self, training: Training, after: JobKind | None = None) -> None:
        """Offer a training job to the kinds, or to those after one of them."""

    def hold(self, kind: JobKind, job: HeldJob, trainings: Iterable[Training]) -> None:
        """Hold a new job of these training jobs."""

    def extend(self, job: HeldJob, trainings: Sequence[Training]) -> None:
        """Add training jobs to a job."""

    def log(self, entry: Record) -> None:
        """Write a record to the journal and, if a user should know it, to the log."""


class RunMailbox(Protocol):
    """Messages from a slot to its run."""

    def close_after(self, remaining: timedelta | None) -> None:
        """Set the time until the node closes; ``None`` if it is unknown or no longer known."""

    def end(self) -> None:
        """Request a pause: the slot leaves."""

    def waited(self) -> float:
        """Return the seconds for which this process has been waiting for other members."""


class Run(ABC):
    """The execution of a `RunStart` command in a slot.

    Parameters
    ----------
    command
        The command.
    send
        Sends a message to the driver; may be called from any thread.
    files
        Storage of large results; ``None``: all results are sent in messages.
    """

    mailbox: RunMailbox
    """Takes the slot's messages about the process."""

    def __init__(self, command: RunStart, send: Callable[[ToDriver], None], files: ValueFiles | None = None) -> None:
        self.number = command.run
        self.output: OutputCapture | None = None
        """Captures the output, while it runs."""
        self._training = command.training
        self._send = send
        self._files = files

    @property
    @abstractmethod
    def source(self) -> str:
        """The initial source of its output; see `attribute`."""

    @property
    @abstractmethod
    def label(self) -> str:
        """What it is, for people and for the other slots of its node: equal for the processes of one job only."""

    @property
    @abstractmethod
    def expendable(self) -> bool:
        """Whether no work would be lost if this process ended now."""

    @abstractmethod
    def end_over_share(self, reason: str) -> Sequence[ToDriver]:
        """Return what to report if this process is ended for the memory that it takes from the others of its node.

        Called by another thread than `perform`.

        Parameters
        ----------
        reason
            Where it is ended, and why: the end of a sentence on the job.
        """

    @abstractmethod
    def perform(self) -> RunEnded:
        """Run to the end, in the main thread; return the message that reports it."""

    @abstractmethod
    def handle(self, message: RunMessage | StoreReply) -> bool:
        """Handle a message from the driver, in the channel's thread; return false if it is for another run."""

    @abstractmethod
    def deliver(self, source: str, lines: bytes) -> None:
        """Pass on printed lines."""

    @abstractmethod
    def close(self) -> None:
        """Wait for nothing more: the driver has failed, or the run is over."""

    def attribute(self, source: str) -> None:
        """Set the source of the output from now on."""
        if self.output is not None:
            self.output.attribute(source)


class JobKind:
    """A kind of jobs, in one driver; the classes of its messages and its runs are also used in slots.

    Parameters
    ----------
    jobs
        Holds the driver's jobs.
    """

    to_slot: ClassVar[tuple[type[RunMessage], ...]] = ()
    """Its own messages that the driver sends."""
    to_driver: ClassVar[tuple[type[RunMessage], ...]] = ()
    """Its own messages that slots send."""

    def __init__(self, jobs: Jobs) -> None:
        self.jobs = jobs

    # In the driver.

    @property
    def gathers(self) -> bool:
        """Whether it has training jobs that are in no job yet."""
        return False

    def submit(self, training: Training) -> bool:
        """Take a training job, or leave it to other kinds."""
        raise NotImplementedError

    def withdraw(self, future: Future[Any] | None) -> list[Training]:  # noqa: ARG002
        """Give back the training job with this future, or all (``None``), if it is in no job yet."""
        return []

    def advance(self) -> None:
        """Make jobs of the training jobs that it has taken: `Jobs.hold` or `Jobs.extend`."""

    def carry_out(self, job: Any, training: Training | None, command: OwnCommand) -> None:
        """Carry out a command of one of its jobs that no other kind has."""
        raise NotImplementedError

    # In a slot.

    @classmethod
    def run(cls, command: Any, send: Callable[[ToDriver], None], files: ValueFiles | None) -> Run:
        """Return the execution of a `RunStart` of this kind; see `Run`."""
        raise NotImplementedError

    # In ``freetrain plan``.

    @classmethod
    def key(cls, request: TrainingRequest) -> Hashable | None:  # noqa: ARG003
        """Return a key, equal for training jobs that would form one job; ``None``: it would not take this one."""
        return None

    @classmethod
    def planned(
        cls, number: int, requests: Sequence[TrainingRequest], costs: CostsInSeconds, submitted: float
    ) -> tuple[PlannedJob, str]:
        """Return a job of several training jobs as the planner would see it, and a note for the user.

        Parameters
        ----------
        number
            Number of the job, from 1.
        requests
            Its training jobs, of one key.
        costs
            Rescale costs if the requests do not state them.
        submitted
            When it was submitted, seconds.
        """
        raise NotImplementedError


JOBS: Final = EntryPoints[type[JobKind]]("freetrain.jobs", "kind of job", subclass_of(JobKind))
"""Name -> kind of jobs, besides training jobs by themselves."""


def kind_of(command: RunStart) -> type[JobKind]:
    """Return the kind of a command that begins a run."""
    return next(kind for kind in JOBS.usable() if isinstance(command, kind.to_slot))


class _Messages(dict[str, type]):
    """Message classes by their name on the wire; those of kinds of jobs are added when an unknown name is met."""

    def __init__(self, core: Mapping[str, type], of_kind: Callable[[type[JobKind]], Sequence[type]]) -> None:
        super().__init__(core)
        self._of_kind = of_kind
        self._is_complete = False

    def __contains__(self, name: object) -> bool:
        if not (self._is_complete or super().__contains__(name)):
            of_kinds = [message for kind in JOBS.usable() for message in self._of_kind(kind)]
            self.update({**by_type(*of_kinds), **self})
            self._is_complete = True
        return super().__contains__(name)


TO_SLOT: Final = _Messages(messages.TO_SLOT, lambda kind: kind.to_slot)
"""Messages that the driver may send."""

TO_DRIVER: Final = _Messages(messages.TO_DRIVER, lambda kind: kind.to_driver)
"""Messages that a slot may send."""
