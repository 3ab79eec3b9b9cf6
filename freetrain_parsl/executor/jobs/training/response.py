"""The response of a training's state machine to an event."""

from __future__ import annotations

from typing import TYPE_CHECKING

from freetrain_parsl.executor.jobs.training import commands as do

if TYPE_CHECKING:
    from freetrain_parsl.executor.jobs.training.commands import Command
    from freetrain_parsl.planning import events as planner
    from freetrain_parsl.protocol.journal import Record

__all__ = ["Response"]


class Response:
    """Collects the commands in response to an event; shared by the parts of a training's state machine.

    Attributes
    ----------
    now
        Time of the event, seconds.
    """

    def __init__(self, now: float) -> None:
        self.now = now
        self._commands: list[Command] = []

    def do(self, command: Command) -> None:
        """Add a command."""
        self._commands.append(command)

    def log(self, entry: Record) -> None:
        """Add a record of the journal."""
        self.do(do.Log(entry))

    def inform(self, event: planner.Event) -> None:
        """Add an event of the planner."""
        self.do(do.Inform(event))

    def take(self) -> list[Command]:
        """Return the commands, and start with none again."""
        commands, self._commands = self._commands, []
        return commands
