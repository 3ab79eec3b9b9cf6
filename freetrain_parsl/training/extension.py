"""The port of a session: extensions that take part in a training job in this process, and how they are found.

A session has one extension. It is made by the run, such as for training jobs that share a process, or it is found by
the objects given to ``session.prepare``: by its entry point in the group ``freetrain.sessions``, whose name is its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol

from freetrain_parsl.entry_points import EntryPoints, subclass_of
from freetrain_parsl.errors import UsageError
from freetrain_parsl.planning.sizes import ANY_COUNT, AllowedCounts
from freetrain_parsl.training.group.spread_state import SpreadState

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    import torch
    from torch import nn
    from torch.optim import Optimizer

    from freetrain_parsl.protocol.options import SessionOptions
    from freetrain_parsl.training.checkpoints.format import Restored
    from freetrain_parsl.training.checkpoints.saver import Saver, SaverParts
    from freetrain_parsl.training.checkpoints.state import SessionState, Stateful
    from freetrain_parsl.training.data.order import Batch, Order
    from freetrain_parsl.training.group.process_group import Group
    from freetrain_parsl.training.group.regrouping import GroupMember
    from freetrain_parsl.training.node_memory import NodeMemory

__all__ = [
    "SESSIONS",
    "BatchSource",
    "DataSource",
    "SessionExtension",
    "check_extension",
    "extension_for",
    "filled",
    "recalled",
]


@dataclass(frozen=True)
class DataSource:
    """The parameters that determine a loader's batches.

    Parameters
    ----------
    dataset, sampler, collate_fn, num_workers, seed_samples
        As for ``session.loader``.
    order
        The order.
    """

    dataset: Any
    order: Order
    sampler: Any
    collate_fn: Any
    num_workers: int
    seed_samples: bool


class BatchSource(Protocol):
    """Provides the batches of a loader, which fetches one only when it is asked to."""

    def get(self, epoch: int, position: int, fetch: Callable[[], tuple[Batch, Any]]) -> tuple[Batch, Any] | None:
        """Return the batch at a position of an epoch and its data; ``None``: the loader fetches all from here on.

        Parameters
        ----------
        epoch, position
            Where the batch begins.
        fetch
            Fetches the batch.
        """


class SessionExtension(SpreadState):
    """Takes part in a training job in this process; every default leaves all to the session."""

    in_place: bool = True
    """Whether the group may change without a checkpoint."""
    allowed_counts: AllowedCounts = ANY_COUNT
    """Numbers of processes on which the prepared objects can be."""
    sharded_bytes: int = 0
    """Size of the prepared objects' state if it is divided evenly among the processes; 0: each of them has all of it.

    The planner then takes the time of a change to grow with the bytes that it moves."""
    trainings: int = 1
    """Number of training jobs that share this process, and the time of each step."""
    too_late: ClassVar[str] = "session.prepare got the objects before they were complete"
    """What is said if objects need this extension only after they were prepared."""
    computes: bool = False
    """Whether `backward` and `step` make the backward passes and the steps, instead of the session."""

    @classmethod
    def applies(cls, objects: Mapping[str, Stateful]) -> bool:  # noqa: ARG003 - of the port, as below
        """Return whether a training job of these objects needs this extension."""
        return False

    @classmethod
    def fill(cls, saved: Any, target: Stateful, checkpoint: Path) -> Any:  # noqa: ARG003
        """Return an object's saved state as `target` can load it.

        Every known extension is called, since the checkpoint may have been written with another one.

        Parameters
        ----------
        saved
            The state of one object.
        target
            The object.
        checkpoint
            Directory of the checkpoint.

        Raises
        ------
        DamagedCheckpoint
            A file of the extension cannot be read.
        KeyError
            The target has no matching tensor.
        """
        return saved

    @classmethod
    def recall(cls, memory: NodeMemory, options: SessionOptions, group: Group, known: int) -> Restored | None:  # noqa: ARG003
        """Return a state from copies in the members' memory; all members call this, and all get the same, or ``None``.

        Parameters
        ----------
        memory
            This member's.
        options
            Of the training job.
        group
            The members.
        known
            Step of the newest checkpoint, -1 without any, as the first member knows it; an older state is not returned.

        Raises
        ------
        PeerFailed
            A member has failed.
        """
        return None

    def gives_way(self) -> None:
        """Note that the prepared objects need another extension, which takes part from here on instead."""

    def prepared(self, objects: Mapping[str, Stateful], members: GroupMember, device: torch.device) -> None:
        """Note new objects, which are not restored yet; raises UsageError to refuse them."""

    def loaded_again(self) -> None:
        """Note that restored objects have the checkpoint's state again, after user code before its batches."""

    def data(self, source: DataSource) -> BatchSource | None:  # noqa: ARG002
        """Return the source of a loader's batches; ``None``: the loader fetches them."""
        return None

    def started(self, state: SessionState, in_batch: Callable[[], bool]) -> None:
        """Begin the loop over the epochs; raises UsageError to refuse requests that the session got before it.

        Parameters
        ----------
        state
            The requests that the session got.
        in_batch
            Returns whether the user's code has a batch, or a piece of one.
        """

    def boundary(self) -> None:
        """Note a boundary, before the members decide how to continue."""

    def use_replicas(self, members: GroupMember) -> None:  # noqa: ARG002
        """Sum the gradients over the replicas into which the members may be divided; called before `started`.

        Raises
        ------
        UsageError
            Each member has the whole state, or the gradients cannot be summed.
        """
        raise UsageError(
            "replicas is for models that are sharded with fully_shard(…, mesh=session.mesh): without, each process has "
            "the whole state, and replicas is to be left out"
        )

    def use_memory(self, memory: NodeMemory, options: SessionOptions, members: GroupMember) -> None:
        """Keep copies of the state in memory from now on, if the extension does this; called before `started`."""

    def copy_due(self, step: int, now: float) -> bool:  # noqa: ARG002
        """Return whether such a copy is due, after `step` steps; the first member's answer counts."""
        return False

    @property
    def copy_arrived(self) -> bool:
        """Whether this member has a copy of its part and of another member's that not all are known to have."""
        return False

    def copy(self, state: Mapping[str, Any]) -> None:
        """Copy a state, see `SessionState.whole`; all members call this at the same boundary.

        Raises
        ------
        PeerFailed
            A member has failed.
        """

    def copied(self) -> None:
        """Note that the copy has arrived at all members."""

    def backward(self, loss: torch.Tensor, *, steps: bool) -> None:
        """Compute the gradients of a loss, if the extension `computes`; `steps`: or in the `step` that follows."""

    def step(self, optimizers: Sequence[Optimizer]) -> None:
        """Step these optimizers, if the extension `computes`."""

    def spread(self, parameter: nn.Parameter) -> bool:  # noqa: ARG002
        """Return whether the extension averages the gradients of a parameter over the members."""
        return False

    def saver(self, parts: SaverParts) -> Saver | None:  # noqa: ARG002
        """Return the saver of the state; ``None``: the first member writes it."""
        return None

    def acts(self) -> bool:
        """Return whether the code that runs is the function of this training job."""
        return True

    def facts(self) -> Mapping[str, Any]:
        """Return fields of `Progress` that only the extension knows."""
        return {}

    def close(self) -> None:
        """Take part no longer."""


SESSIONS: Final = EntryPoints[type[SessionExtension]](
    "freetrain.sessions", "session extension", subclass_of(SessionExtension)
)
"""Name -> class: those that objects or checkpoints may need."""


def _needed_by(objects: Mapping[str, Stateful]) -> type[SessionExtension] | None:
    return next((each for each in SESSIONS.usable() if each.applies(objects)), None)


def extension_for(objects: Mapping[str, Stateful], present: SessionExtension) -> SessionExtension:
    """Return the extension that a training job of these objects needs; the `present` one if it needs no other."""
    kind = _needed_by(objects)
    if kind is None or isinstance(present, kind):
        return present
    present.gives_way()
    return kind()


def check_extension(objects: Mapping[str, Stateful], present: SessionExtension) -> None:
    """Check that the prepared objects still need this extension.

    Raises
    ------
    UsageError
        They need another one since they were prepared.
    """
    kind = _needed_by(objects)
    if kind is not None and not isinstance(present, kind):
        raise UsageError(kind.too_late)


def recalled(memory: NodeMemory, options: SessionOptions, group: Group, known: int) -> Restored | None:
    """Return a state from copies in the members' memory; see `SessionExtension.recall`."""
    states = (kind.recall(memory, options, group, known) for kind in SESSIONS.usable())
    return next((state for state in states if state is not None), None)


def filled(saved: Any, target: Stateful, checkpoint: Path) -> Any:
    """Return an object's saved state as `target` can load it; see `SessionExtension.fill`."""
    for kind in SESSIONS.usable():
        saved = kind.fill(saved, target, checkpoint)
    return saved
