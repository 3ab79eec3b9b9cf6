"""The driver's side of a crew: starts processes, sends them training jobs and commands, and handles failures."""

from __future__ import annotations

import itertools
import multiprocessing
import multiprocessing.connection
import os
import signal
import tempfile
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training_crew import DictionaryServer, classify, member_loop
from warm_processes import forked_warm

from freetrain_parsl.protocol.reports import GroupFailed, Joined, Progress, Ready
from freetrain_parsl.training.fragment import Finished, Membership
from freetrain_parsl.training.mailbox import Regroup

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.context import BaseContext

    from training_crew import Outcome


class Member:
    """One process of the crew."""

    def __init__(self, process: Any, pipe: Connection) -> None:
        self.process = process
        self.pipe = pipe
        self.reports: list[Any] = []
        self.outcome: Outcome | None = None
        self.lost = False
        self.numbers = itertools.count(1)
        self.number = 0
        """Number of the last training job sent to it."""
        self.unheard = 0
        """Number of messages about this training job that it has not confirmed yet."""

    @property
    def is_idle(self) -> bool:
        """Whether it has no training job."""
        return self.number == 0 or self.outcome is not None

    def receive(self) -> tuple[str, Any]:
        """Receive a message, and record it if it is about the current training job."""
        number, what, content = self.pipe.recv()
        if number != self.number:
            return "", None
        if what == "report":
            self.reports.append(content)
        elif what == "heard":
            self.unheard -= 1
        elif what == "ended":
            self.outcome = content
        return what, content

    def tell(self, what: str, content: Any = None) -> None:
        self.unheard += 1
        with suppress(BrokenPipeError):  # it has just been killed
            self.pipe.send((what, content))

    @property
    def has_heard(self) -> bool:
        """Whether it has confirmed all messages, or has failed."""
        return self.unheard == 0 or self.lost or self.outcome is not None

    def last(self, kind: type) -> Any:
        """Return its last report of this type."""
        return next((report for report in reversed(self.reports) if isinstance(report, kind)), None)


class Crew:
    """Processes that stay warm between training jobs; a killed process is replaced at its next use.

    Parameters
    ----------
    context
        Starts them; default: forked, with the environment of this process when the first was forked.
    loop
        What they run.
    """

    def __init__(self, context: BaseContext | None = None, loop: Any = member_loop) -> None:
        self._loop = loop
        self._context: Any = context or forked_warm()
        self._server = DictionaryServer(("127.0.0.1", 0), b"crew", ctx=self._context)
        self._server.start()
        self.dictionary: Any = self._server.dictionary()
        """In which the members of a group meet."""
        self._members: list[Member] = []
        self.generations = itertools.count(1)

    def start(self, world_size: int, root: Path, function: Any = classify, **settings: Any) -> CrewRun:
        """Start a training job on `world_size` members; see `CrewRun`."""
        self._members = [member for member in self._members if member.process.is_alive()]
        return CrewRun(self, world_size, root, function, **settings)

    def run(self, world_size: int, root: Path, function: Any = classify, **settings: Any) -> list[Outcome | None]:
        """Run a training job on `world_size` members; the result is ``None`` for a member that died."""
        return self.start(world_size, root, function, recover=False, **settings).outcomes()

    def warm(self, count: int) -> None:
        """Start processes up to this number."""
        with tempfile.TemporaryDirectory() as scratch:
            self.run(count, Path(scratch), classify, epochs=1)

    def idle(self, count: int, busy: list[Member]) -> list[Member]:
        """Return `count` idle members that are not among `busy`."""
        for member in self._members:
            if (
                member not in busy and not member.is_idle
            ):  # the message about the end of its last training job is pending
                with suppress(EOFError, ConnectionResetError):
                    while member.pipe.poll(5) and member.receive()[0] != "ended":
                        pass
                if not member.is_idle:  # left waiting by a failed test
                    member.process.kill()
                    member.process.join()
        free = [m for m in self._members if m not in busy and m.is_idle and m.process.is_alive()]
        while len(free) < count:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(
                target=self._loop, args=(theirs, self._server.address, b"crew"), daemon=True
            )
            process.start()
            theirs.close()
            self._members.append(Member(process, ours))
            free.append(self._members[-1])
        return free[:count]

    def close(self) -> None:
        """Stop all members."""
        for member in self._members:
            member.pipe.close()
            member.process.join(10)
            if member.process.is_alive():
                member.process.kill()
        self._server.shutdown()


class CrewRun:
    """One training job of a crew, with the role of the driver: start newcomers, send commands, handle failures.

    Parameters
    ----------
    crew, world_size, root, function, kwargs
        The crew, its number of members, the checkpoint directory, and the training job.
    recover
        Whether the other members are commanded to continue after a failure.
    without_ended
        Whether they are also commanded to continue without members that have ended with it, as the driver does.
    replicas
        Number of replicas of a sharded model; after a failure, those continue of which no member has failed.
    """

    def __init__(
        self,
        crew: Crew,
        world_size: int,
        root: Path,
        function: Any,
        *,
        timeout: float = 60,
        name: str = "net",
        session_options: dict[str, Any] | None = None,
        recover: bool = True,
        without_ended: bool = False,
        replicas: int = 1,
        **kwargs: Any,
    ) -> None:
        self._crew = crew
        self._settings = {"root": root, "name": name, **(session_options or {})}
        self._name, self._timeout = name, timeout
        self._function, self._kwargs = function, kwargs
        self._recover = recover
        self._without_ended = without_ended
        self._replicas = replicas
        self.gone: list[Member] = []
        self.newcomers: list[Member] = []
        self.members = crew.idle(world_size, [])
        for member, membership in zip(self.members, self._memberships(world_size), strict=True):
            self._begin(member, membership)

    @property
    def progress(self) -> Progress | None:
        """The last progress that any member reported."""
        told = [member.last(Progress) for member in (*self.members, *self.gone)]
        return max((progress for progress in told if progress), key=lambda progress: progress.step, default=None)

    def until(self, condition: Any, seconds: float = 180.0) -> Any:
        """Process messages until `condition` holds, and return its value."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._pump()
            if value := condition():
                return value
        raise TimeoutError(f"not within {seconds} s; {[m.reports[-2:] for m in self.members]}")

    @property
    def ended(self) -> bool:
        """Whether all members have ended."""
        return all(member.outcome or member.lost for member in self.members)

    def regroup(self, size: int, *, replace: int = 0, replicas: int | None = None, release: Any = lambda: None) -> None:
        """Continue with `size` members; at least `replace` of the current ones leave.

        `release` is called when all members have their commands.
        """
        self._replicas = replicas or self._replicas
        stay = self.members[: max(1, min(size, len(self.members) - replace))]
        self.gone = [member for member in self.gone if not member.outcome and not member.lost]
        self.newcomers = self._crew.idle(size - len(stay), [*self.members, *self.gone])
        for member in self.newcomers:
            self._begin(member, None, size // self._replicas)
        self.until(lambda: self.ended or all(member.last(Ready) for member in self.newcomers))
        newcomers, self.newcomers = self.newcomers, []
        leavers = [member for member in self.members if member not in stay]
        self.order([*stay, *newcomers], leavers, release=release)

    def order(
        self, members: list[Member], leavers: list[Member], *, abort: bool = False, release: Any = lambda: None
    ) -> None:
        """Command a regroup and wait until it is done."""
        memberships = self._memberships(len(members))
        generation = memberships[0].generation
        for member in leavers:
            member.tell("order", Regroup(None, abort))
        for member, membership in zip(members, memberships, strict=True):
            member.tell("order", Regroup(membership, abort))
        self.members = members
        self.gone += leavers
        self._wait_until_heard()
        if abort:
            self._crew.dictionary.abandon(generation)
        release()
        self.until(
            lambda: (
                self.ended
                or all(
                    m.outcome or m.lost or ((told := m.last(Joined)) and told.generation >= generation)
                    for m in self.members
                )
            )
        )

    def pause(self, release: Any = lambda: None) -> list[Outcome | None]:
        """Pause the training job."""
        self._tell_all("pause")
        self._wait_until_heard()
        release()
        return self.outcomes()

    def kill(self, rank: int) -> None:
        """SIGKILL a member."""
        os.kill(self.members[rank].process.pid, signal.SIGKILL)

    def outcomes(self) -> list[Outcome | None]:
        """Wait for the end and return the outcomes; ``None`` for a member that died."""
        self.until(lambda: self.ended)
        return [member.outcome for member in self.members]

    def _memberships(self, size: int) -> list[Membership]:
        generation = next(self._crew.generations)
        meeting = timedelta(seconds=self._timeout)
        return [
            Membership(self._name, generation, rank, size, self._replicas, meeting=meeting, interface="lo")
            for rank in range(size)
        ]

    def _begin(self, member: Member, membership: Membership | None, next_size: int | None = None) -> None:
        member.reports, member.outcome, member.lost, member.number = [], None, False, next(member.numbers)
        member.unheard = 0
        options = {**self._settings, "membership": membership, "next_size": next_size}
        member.tell("run", (member.number, self._function, self._kwargs, options))

    def _wait_until_heard(self) -> None:
        """Wait until all messages are confirmed: a late message could take effect after the next gate."""
        self.until(lambda: all(member.has_heard for member in (*self.members, *self.gone)))

    def _pump(self) -> None:
        known = {m.pipe: m for m in (*self.members, *self.newcomers, *self.gone) if not m.lost}
        for pipe in multiprocessing.connection.wait(known, 0.05):
            member = known[pipe]
            try:
                what, content = member.receive()
            except (EOFError, ConnectionResetError):
                self._lose(member)  # processes messages itself: the others may no longer be ready
                return
            if what == "ended":
                failed = content.error and not content.error.startswith(("PeerFailed", "OutOfSync"))
                if failed or isinstance(content.end, Finished):
                    self._tell_all("end")
        if self._without_ended:
            self._continue_without_the_ended()

    def _continue_without_the_ended(self) -> None:
        waiting = [member for member in self.members if not member.lost and not member.outcome]
        ended = [one for one in self.members if one.outcome and not isinstance(one.outcome.end, Finished)]
        waits = all(member.reports and isinstance(member.reports[-1], GroupFailed) for member in waiting)
        if ended and waiting and waits:
            self.gone += ended
            self.order(waiting, [], abort=True)

    def _lose(self, member: Member) -> None:
        member.lost = True
        if member in (*self.members, *self.gone) and self._recover:
            survivors = [other for other in self.members if not other.lost and not other.outcome]
            leavers = []
            if self._replicas > 1:
                leavers = survivors
                size = len(self.members) // self._replicas
                replicas = [self.members[first : first + size] for first in range(0, len(self.members), size)]
                intact = [each for each in replicas if not any(other.lost or other.outcome for other in each)]
                survivors, self._replicas = [other for each in intact for other in each], max(1, len(intact))
                leavers = [other for other in leavers if other not in survivors]
            self.members = [other for other in self.members if other is not member]
            if survivors:
                self.order(survivors, leavers, abort=True)
        elif member in self.members:
            self._tell_all("end")

    def _tell_all(self, what: str) -> None:
        for member in (*self.members, *self.newcomers):
            if not member.lost and not member.outcome:
                member.tell(what)
