"""What the checkpoint manager requires of an object that writes states."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from freetrain_parsl.storage.entry import Entry
    from freetrain_parsl.storage.posix import CheckpointDirectory
    from freetrain_parsl.training.checkpoints.format import Checkpoints, Facts, State
    from freetrain_parsl.training.checkpoints.save_schedule import Schedule
    from freetrain_parsl.training.checkpoints.writer_claim import WriterClaim
    from freetrain_parsl.training.group.process_group import Group


class SaverParts(NamedTuple):
    """What a saver works with.

    Parameters
    ----------
    directory
        The training's directory.
    checkpoints
        Writes and publishes checkpoints.
    claim
        Taken on the first member before each write.
    schedule
        Receives the measured costs.
    group_of
        Returns the current group.
    """

    directory: CheckpointDirectory
    checkpoints: Checkpoints
    claim: WriterClaim
    schedule: Schedule
    group_of: Callable[[], Group]


class Saver(Protocol):
    """Writes states, one at a time; a failed write raises CheckpointError where its outcome is taken."""

    @property
    def busy(self) -> bool:
        """Whether a state is being written, or the outcome has not been taken yet."""

    @property
    def ready(self) -> bool:
        """Whether this member has done its part and waits for the others: once all are ready, they call `advance`."""

    def takes_part(self, group: Group) -> bool:
        """Return whether this member is needed to write a state; the others do not call `start` and `save`."""

    def start(self, make_state: Callable[[], State], facts: Facts) -> None:
        """Copy a state and start to write it in the background; the saver must not be busy.

        Parameters
        ----------
        make_state
            Returns the state.
        facts
            For the manifest.
        """

    def save(self, make_state: Callable[[], State], facts: Facts) -> Entry:
        """Write a state, see `start`, and return once it is durable."""

    def poll(self) -> Entry | None:
        """Take the outcome without waiting and without communication; return the checkpoint, if there is one."""

    def advance(self) -> Entry | None:
        """Continue the write on all members together; return the checkpoint, once it is durable."""

    def finish(self) -> Entry | None:
        """Wait for the write, on all members that take part; return the checkpoint, if one was being written."""

    def close(self) -> Entry | None:
        """End the write without communication: wait for it, or drop it if it needs other members."""
