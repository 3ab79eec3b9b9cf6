"""Random faults at random times on random targets, reproducible from a seed."""

from __future__ import annotations

import heapq
import itertools
import logging
import math
import random
import threading
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeAlias

from freetrain_parsl.errors import UsageError, did_you_mean
from freetrain_parsl.testing.faults.connections import cut, partition
from freetrain_parsl.testing.faults.files import corrupt_checkpoint, fill_disk
from freetrain_parsl.testing.faults.processes import is_alive, kill, kill_all, slow, stopped

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path
    from types import TracebackType

    from typing_extensions import Self

    from freetrain_parsl.executor.journal import JournalEntry
    from freetrain_parsl.testing.faults.files import Damage

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Target:
    """A process that may be hit.

    Parameters
    ----------
    slot
        Its name: ``node/anything``; processes of one node are killed together.
    pid
        Its id on this machine.
    """

    slot: str
    pid: int

    @property
    def node(self) -> str:
        """The node, whose failure ends this process too."""
        return self.slot.partition("/")[0]


@dataclass(frozen=True)
class Strike:
    """The argument of a fault.

    Parameters
    ----------
    victim
        Target of the fault.
    others
        All other targets.
    rng
        Random generator of this strike only, reproducible from the seed.
    """

    victim: Target
    others: tuple[Target, ...]
    rng: random.Random

    @property
    def peers(self) -> list[int]:
        """Process ids of the others."""
        return [other.pid for other in self.others]


Fault: TypeAlias = "Callable[[Strike], AbstractContextManager[object] | None]"
"""Injects the fault; a returned context manager is entered, and exited at the end of the fault."""


@dataclass(frozen=True)
class InjectedFault:
    """A fault injected by the injector.

    Parameters
    ----------
    at
        Seconds after its start, as planned.
    fault
        Name of the fault.
    victim
        Slot that was hit; ``None`` if there was no target.
    pid
        Its process.
    lasts
        Seconds after which it is undone, if possible.
    outcome
        Empty, or why it had no effect.
    """

    at: float
    fault: str
    victim: str | None
    pid: int | None
    lasts: float
    outcome: str = ""


def _kill_node(strike: Strike) -> None:
    kill_all(target.pid for target in (strike.victim, *strike.others) if target.node == strike.victim.node)


PROCESS_FAULTS: Mapping[str, Fault] = MappingProxyType(
    {
        "kill": lambda strike: kill(strike.victim.pid),
        "kill_node": _kill_node,
        "stop": lambda strike: stopped(strike.victim.pid),
        "slow": lambda strike: slow(strike.victim.pid, strike.rng.uniform(0.1, 0.6)),
        "cut": lambda strike: _done(cut(strike.victim.pid, strike.peers)),
        "partition": lambda strike: partition(strike.victim.pid, strike.peers),
    }
)
"""Faults of processes and connections; add `corrupting` and `filling` for those of files."""


def _done(_: object) -> None:
    return None


def corrupting(directory: Path, how: Damage | None = None) -> Fault:
    """Make a fault that damages a checkpoint in a directory; it ignores the victim. See `corrupt_checkpoint`."""
    return lambda strike: _done(corrupt_checkpoint(directory, strike.rng, how))


def filling(directory: Path, limit: int) -> Fault:
    """Make a fault that fills the file system of a directory. See `fill_disk`."""
    return lambda _: fill_disk(directory, limit)


class Injector:
    """Injects faults; times, faults and victims follow from a seed.

    Each strike has its own random generator: the sequence does not depend on the effects of the faults, and the
    victims depend only on the existing slots. As a context manager it works in a thread until the block ends; `run`
    works in the caller's thread. In both cases it leaves nothing stopped, slowed, partitioned or full.

    ::

        with Injector(7, targets, every=timedelta(seconds=20)) as injector:
            result = future.result()
        print(injector.records)

    Parameters
    ----------
    seed
        Determines the sequence.
    targets
        Called at each strike; returns process ids by slot (``node/anything``).
    faults
        The faults, by name.
    every
        Mean time between strikes (a Poisson process). Give this or `schedule`.
    schedule
        Planned faults: (time after the start, name of the fault), in order.
    lasting
        Mean duration of lasting faults; drawn between 0.5 and 1.5 times this.
    clock
        Monotonic clock, seconds.
    sleep
        Waits for a number of seconds; by default also until the end of the context manager's block.

    Raises
    ------
    UsageError
        Both or none of `every` and `schedule` are given, a fault is unknown, or a time is not positive.
    """

    def __init__(
        self,
        seed: int,
        targets: Callable[[], Mapping[str, int]],
        *,
        faults: Mapping[str, Fault] = PROCESS_FAULTS,
        every: timedelta | None = None,
        schedule: Sequence[tuple[timedelta, str]] | None = None,
        lasting: timedelta = timedelta(seconds=2),
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] | None = None,
    ) -> None:
        if (every is None) == (schedule is None):
            raise UsageError("Injector: give either every or schedule")
        if every is not None and every <= timedelta(0):
            raise UsageError(f"Injector: every must be positive, got {every}")
        if not faults:
            raise UsageError("Injector: give at least one fault")
        for _, name in schedule or ():
            if name not in faults:
                raise UsageError(f"Injector: there is no fault {name!r}{did_you_mean(name, faults)}")
        self.records: list[InjectedFault] = []
        self._seed = seed
        self._targets = targets
        self._faults = dict(faults)
        self._every = every
        self._schedule = schedule
        self._lasting = lasting.total_seconds()
        self._clock = clock
        self._over = threading.Event()
        self._sleep = sleep or self._over.wait
        self._thread: threading.Thread | None = None
        self._problem: BaseException | None = None

    def run(self, duration: timedelta | None = None) -> list[InjectedFault]:
        """Inject faults for this long, or to the end of the schedule and of its last fault; return the records.

        Raises
        ------
        UsageError
            A fault is not possible here, such as `cut` where the kernel forbids it.
        """
        begun = self._clock()
        end = math.inf if duration is None else begun + duration.total_seconds()
        undoings: list[tuple[float, int, ExitStack]] = []
        try:
            for number, (after, name, rng) in enumerate(self._moments()):
                self._wait(min(begun + after, end), undoings)
                if self._over.is_set() or begun + after >= end:
                    break
                lasts = self._lasting * rng.uniform(0.5, 1.5)
                undoing = self._strike(after, name, lasts, rng)
                heapq.heappush(undoings, (begun + after + lasts, number, undoing))
            self._wait(min(max((moment for moment, _, _ in undoings), default=0.0), end), undoings)
        finally:
            with ExitStack() as all_of_them:
                for _, _, undoing in undoings:
                    all_of_them.push(undoing)
        return self.records

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._run_in_thread, name="fault-injector", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._thread is not None
        self._over.set()
        self._thread.join()
        if self._problem is not None and error is None:
            raise self._problem

    def _run_in_thread(self) -> None:
        try:
            self.run()
        except BaseException as problem:  # noqa: BLE001 - raised to the caller at the end of the block
            self._problem = problem

    def _moments(self) -> Iterator[tuple[float, str, random.Random]]:
        """Yield (seconds after the start, fault, generator of the strike)."""
        if self._schedule is not None:
            for number, (after, name) in enumerate(self._schedule):
                yield after.total_seconds(), name, random.Random(f"{self._seed}/{number}")
            return
        assert self._every is not None
        moment = 0.0
        for number in itertools.count():
            rng = random.Random(f"{self._seed}/{number}")
            moment += rng.expovariate(1 / self._every.total_seconds())
            yield moment, rng.choice(sorted(self._faults)), rng

    def _wait(self, moment: float, undoings: list[tuple[float, int, ExitStack]]) -> None:
        """Wait until a given time; undo faults that end in the meantime."""
        while not self._over.is_set():
            due = min(moment, undoings[0][0]) if undoings else moment
            if (left := due - self._clock()) > 0:
                self._sleep(left)
            if self._over.is_set():
                return
            while undoings and undoings[0][0] <= due:
                heapq.heappop(undoings)[2].close()
            if due >= moment:
                return

    def _strike(self, after: float, name: str, lasts: float, rng: random.Random) -> ExitStack:
        undoing = ExitStack()
        targets = [Target(slot, pid) for slot, pid in sorted(self._targets().items())]
        if not targets:
            self._keep(InjectedFault(after, name, None, None, lasts, "no process to hit"))
            return undoing
        victim = targets[int(rng.random() * len(targets))]
        others = tuple(target for target in targets if target is not victim)
        outcome = ""
        try:
            lasting = self._faults[name](Strike(victim, others, rng))
            if lasting is not None:
                undoing.enter_context(lasting)
        except (ProcessLookupError, FileNotFoundError) as error:  # too late or too early
            outcome = str(error)
        self._keep(InjectedFault(after, name, victim.slot, victim.pid, lasts, outcome))
        return undoing

    def _keep(self, record: InjectedFault) -> None:
        self.records.append(record)
        logger.info("injected at %.2f s: %s", record.at, record)


def slots_on_this_machine(entries: Iterable[JournalEntry]) -> dict[str, int]:
    """Return the process ids of an executor's live slots, by ``node/number``, from the entries of its journal.

    For executors whose nodes are processes of this machine, such as those of an embedded cluster::

        from freetrain_parsl.executor.journal import read_journal

        def targets():
            return slots_on_this_machine(entry for _, entry in read_journal(executor.journal_path))
    """
    slots: dict[str, tuple[str, int]] = {}
    for entry in entries:
        if entry.kind == "slot_joined":
            slots[entry.subject] = (entry.detail["node"], entry.detail["pid"])
        elif entry.kind == "slot_lost":
            slots.pop(entry.subject, None)
    numbers: Counter[str] = Counter()
    living = {}
    for node, pid in slots.values():
        if is_alive(pid):
            living[f"{node}/{numbers[node]}"] = pid
            numbers[node] += 1
    return living
