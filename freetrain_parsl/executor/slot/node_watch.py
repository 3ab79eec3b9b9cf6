"""While a job runs in a slot of a shared node: its memory against its share, and what it and its neighbours still save.

A job that needs more host memory than its slot's share takes what its neighbours may need. It is told once, in its log.
Only if the node is about to run out of memory, where the kernel would end any process of any job, the slot that is the
furthest over its share ends its job, with the reason. It does not start again, as it would need as much again.

When a node closes, its jobs write their checkpoints at the same time to the same storage: each leaves as early as if it
also wrote those of the others.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from freetrain_parsl.executor.slot.neighbours import Neighbour, neighbours_of, publish
from freetrain_parsl.executor.slot.node_share import fields_of, memory_of_node

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from types import TracebackType

    from typing_extensions import Self

    from freetrain_parsl.executor.slot.node_share import Lane

logger = logging.getLogger(__name__)

__all__ = ["NodeWatch", "memory_of", "over_share", "saving_of"]

_PERIOD: Final = 1.0  # seconds between two looks
_EXACT: Final = 10.0  # seconds between exact measurements, which may take a tenth of a second
_LOW: Final = 0.03  # of the node's memory: when less is available, a job is ended
_LARGEST_LOW: Final = 4 << 30  # bytes
_GIB: Final = 1 << 30


def _tree(pid: int, proc: Path) -> list[int]:
    """Return a process and its descendants."""
    found = [pid]
    for one in found:  # grows meanwhile
        with suppress(OSError, ValueError):  # it has ended, or the kernel does not list children
            for children in (proc / str(one) / "task").glob("*/children"):
                found.extend(int(word) for word in children.read_text(encoding="ascii").split())
    return found


def memory_of(place: int, *, exact: bool, proc: Path = Path("/proc")) -> int:
    """Return the bytes of host memory of a slot: of its place and all descendants.

    Parameters
    ----------
    place
        Process id of the slot's place.
    exact
        Whether memory that several processes have in common, such as a data set and the data workers that were forked
        with it, counts once. The kernel then looks at each page; otherwise the result may be too large, never too small
        (but for libraries and other files).
    proc
        The directory of the kernel's description.
    """
    total = 0
    for pid in _tree(place, proc):
        status = fields_of(proc / str(pid) / "status")
        rollup = fields_of(proc / str(pid) / "smaps_rollup") if exact else {}
        shares = rollup.get("Pss_Anon", 0) + rollup.get("Pss_Shmem", 0)
        total += shares or status.get("RssAnon", 0) + status.get("RssShmem", 0)
    return total


def over_share(own: Neighbour, others: Sequence[Neighbour], share: float, used: Callable[[int], float]) -> bool:
    """Return whether a slot is the one whose job is to be ended on a node that is about to run out of memory.

    Never one whose job has the node for itself: there is nobody whom it disturbs.

    Parameters
    ----------
    own, others
        The slot, and the others that run jobs.
    share
        Bytes that each slot may use.
    used
        Returns the bytes that the slot of a place uses.
    """
    if all(other.job == own.job for other in others):
        return False
    amount = used(own.place)
    return amount > share and all((used(other.place), other.place) < (amount, own.place) for other in others)


def saving_of(job: str, others: Collection[Neighbour]) -> float:
    """Return the seconds in which the other jobs of the node write their checkpoints, one after another."""
    longest: dict[str, float] = {}
    for other in others:
        longest[other.job] = max(longest.get(other.job, 0.0), other.save_seconds)
    return sum(seconds for name, seconds in longest.items() if name != job)


class NodeWatch:
    """A thread that looks once a second, during a ``with`` block, at what the job in this slot takes of its node.

    Parameters
    ----------
    job
        The training job, or the array, as people know it.
    lane
        Which slot of the node it runs in.
    pool
        The directory of the worker pool.
    tell
        Called with what the user should know.
    end
        Called once, with the reason, to end the job; it does not return.
    saving
        Called at each look with the seconds in which the neighbours write their checkpoints.
    proc
        The directory of the kernel's description.
    memory
        Returns the bytes that all slots of the node may use, and those still available; ``None``: not known.
    """

    def __init__(
        self,
        job: str,
        lane: Lane,
        pool: Path,
        *,
        tell: Callable[[str], None],
        end: Callable[[str], None],
        saving: Callable[[float], None],
        proc: Path = Path("/proc"),
        memory: Callable[[], tuple[int, int] | None] = memory_of_node,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._thread = threading.Thread(target=self._run, name="freetrain-node-watch", daemon=True)
        self._own = Neighbour(job, os.getppid())
        self._published: Neighbour | None = None
        self._lane = lane
        self._pool = pool
        self._tell = tell
        self._end = end
        self._saving = saving
        self._proc = proc
        self._memory = memory
        self._clock = clock
        self._told = self._is_ending = False
        self._measured = -_EXACT
        self._saves: dict[str, float] = {}  # of the job or, in an array, of its members
        self._closing = threading.Event()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.set()

    def takes(self, seconds: float, member: str = "") -> None:
        """Note in what time the job, or a member of it, writes a checkpoint; called by the thread that trains."""
        self._saves[member] = seconds

    def look(self) -> None:
        """Look once."""
        own = Neighbour(self._own.job, self._own.place, round(sum(list(self._saves.values())), 1))
        if own != self._published:
            publish(self._pool, self._lane.rank, own)
            self._published = own
        others = neighbours_of(self._pool, self._lane.rank)
        self._saving(saving_of(own.job, others))
        memory = self._memory()
        if memory is None or self._is_ending:
            return
        total, available = memory
        share = total / self._lane.count
        is_low = available < min(_LOW * total, _LARGEST_LOW)
        if is_low and over_share(own, others, share, self._used):
            self._is_ending = True
            self._end(
                f"it used {self._used(own.place) / _GIB:.1f} GiB of host memory, its share was {self._share(share)}, "
                f"and the node had {available / _GIB:.1f} GiB left for all; let it use less (fewer data workers, data "
                "that is read when needed), or give it more accelerators"
            )
        elif not self._told and self._exceeds(own.place, share):
            self._told = True
            self._tell(
                f"freetrain: {own.job} uses {self._used(own.place) / _GIB:.1f} GiB of host memory, "
                f"more than its share of {self._share(share)}: if the node runs out of memory, it is ended\n"
            )

    def _share(self, share: float) -> str:
        return f"{share / _GIB:.1f} GiB (1 of {self._lane.count} slots)"

    def _used(self, place: int) -> int:
        return memory_of(place, exact=True, proc=self._proc)

    def _exceeds(self, place: int, share: float) -> bool:
        """Return whether a slot uses more than its share; measured exactly only if it may."""
        if memory_of(place, exact=False, proc=self._proc) <= share or self._clock() - self._measured < _EXACT:
            return False
        self._measured = self._clock()
        return self._used(place) > share

    def _run(self) -> None:
        try:
            while not self._closing.wait(_PERIOD):
                self.look()
        except (
            Exception
        ):  # of the kernel's description, which differs between systems: the job trains without the watch
            logger.exception("cannot watch this slot's share of its node")
