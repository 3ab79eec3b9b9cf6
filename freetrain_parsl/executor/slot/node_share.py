"""What a slot takes of a node that it shares with other slots: its accelerator, cores, threads and host memory.

Parsl's worker pool gives each worker an accelerator. Its own ``cpu_affinity`` is not used here: it fails where there
are more workers than cores, deals out hyperthreads of one core to different workers, and makes OpenMP bind the first
thread of every process that a job starts, such as data workers, to the same core.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Collection, MutableMapping, Sequence

__all__ = [
    "CoreShare",
    "Lane",
    "core_share",
    "fields_of",
    "memory_of_node",
    "number_visible_devices",
    "physical_cores",
]

_SYSTEM: Final = Path("/sys/devices/system")
_RESERVE: Final = 0.05  # of the memory of a node: for the system and the worker pool
_LARGEST_RESERVE: Final = 4 << 30  # bytes
_KIB: Final = 1024
_FIELD: Final = re.compile(r"^(\w+):?\s+(\d+)( kB)?$", re.MULTILINE)


@dataclass(frozen=True)
class Lane:
    """Which of the slots of a node this process is.

    Parameters
    ----------
    rank
        Its number, from 0.
    count
        The number of slots on the node.
    """

    rank: int = 0
    count: int = 1

    @classmethod
    def of_worker(cls) -> Lane:
        """Return that of a worker of Parsl's pool, from its environment."""
        rank, count = (os.environ.get(f"PARSL_WORKER_{name}", "") for name in ("RANK", "COUNT"))
        if not (rank.isdecimal() and count.isdecimal() and int(rank) < int(count)):
            return cls()
        return cls(int(rank), int(count))


@dataclass(frozen=True)
class CoreShare:
    """The cores of one slot.

    Parameters
    ----------
    cpus
        Numbers of the processors, hyperthreads included, on which it may run; empty: it is not bound.
    threads
        Number of threads with which it computes: one for each core.
    """

    cpus: frozenset[int]
    threads: int

    def take(self) -> None:
        """Bind this thread, and the processes that it forks, to the cores, and tell torch and OpenMP their number.

        A number of threads in the environment is the site's, or the user's, and stays.
        """
        import torch

        with suppress(OSError, AttributeError):  # the site has changed the processors meanwhile; not Linux
            if self.cpus:
                os.sched_setaffinity(0, self.cpus)
        if "OMP_NUM_THREADS" not in os.environ:  # read when OpenMP was loaded: from now on, by other programs only
            os.environ["OMP_NUM_THREADS"] = str(self.threads)
            torch.set_num_threads(self.threads)


def core_share(lane: Lane, cores: Sequence[Sequence[int]]) -> CoreShare | None:
    """Return the share of a slot of the node's cores; ``None`` if it has the node for itself, or nothing is known.

    All slots have the same number of cores, as members of one job that compute with different numbers of threads wait
    for each other and may differ in the last bit. The cores of a slot follow each other. Slots start where the cores
    divide evenly, so that two halves of a node (its sockets) are not mixed, even if cores are left over in each.

    Parameters
    ----------
    lane
        The slot.
    cores
        The processors of each physical core, in the order of the node's memory.
    """
    if lane.count == 1 or not cores:
        return None
    each = len(cores) // lane.count
    if not each:
        return CoreShare(frozenset(), 1)
    first = lane.rank * len(cores) // lane.count
    return CoreShare(frozenset(cpu for core in cores[first : first + each] for cpu in core), each)


def physical_cores(allowed: Collection[int] | None = None, system: Path = _SYSTEM) -> list[tuple[int, ...]]:
    """Return the processors of each core on which this process may run, by NUMA node; empty where that is not known.

    Parameters
    ----------
    allowed
        Numbers of the processors; ``None``: those of this process.
    system
        The directory of the kernel's description.
    """
    if allowed is None:
        if not hasattr(os, "sched_getaffinity"):
            return []
        allowed = os.sched_getaffinity(0)
    memory = {}
    for node in system.glob("node/node[0-9]*"):
        for cpu in _numbers(node / "cpulist"):
            memory[cpu] = int(node.name.removeprefix("node"))
    cores: dict[tuple[int, int], list[int]] = {}
    for cpu in sorted(allowed):
        siblings = _numbers(system / f"cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.setdefault((memory.get(cpu, 0), min(siblings, default=cpu)), []).append(cpu)
    return [tuple(cores[key]) for key in sorted(cores)]


def _numbers(path: Path) -> list[int]:
    """Read a list of numbers in the kernel's notation, such as ``0-3,8``; empty if there is none."""
    found: list[int] = []
    with suppress(OSError, ValueError):
        for part in path.read_text(encoding="ascii").strip().split(","):
            first, _, last = part.partition("-")
            found.extend(range(int(first), int(last or first) + 1))
    return found


def number_visible_devices(environment: MutableMapping[str, str]) -> None:
    """Make HIP count the accelerators of a slot from 0.

    Parsl's worker pool names the accelerator of a worker in ``CUDA_VISIBLE_DEVICES``, ``ROCR_VISIBLE_DEVICES`` and
    ``ZE_AFFINITY_MASK``. On AMD's, ``ROCR_VISIBLE_DEVICES`` hides the others from HIP, which then looks for the number
    in ``CUDA_VISIBLE_DEVICES`` among what is left, and finds none unless it is 0; ``HIP_VISIBLE_DEVICES`` comes first.
    """
    if left := environment.get("ROCR_VISIBLE_DEVICES"):
        environment["HIP_VISIBLE_DEVICES"] = ",".join(str(number) for number, _ in enumerate(left.split(",")))


def memory_of_node(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> tuple[int, int] | None:
    """Return the bytes of host memory that the slots of this node may use, and those still available.

    That is the machine's, or what the batch system's control groups leave of it, less a reserve for the system. Memory
    that the kernel only uses to keep files counts as available. ``None`` where nothing is known.
    """
    fields = fields_of(proc / "meminfo")
    total, available = fields.get("MemTotal"), fields.get("MemAvailable")
    if total is None or available is None:
        return None
    for group in _groups(proc, cgroups):
        limit, used = _limit(group)
        if limit is not None and used is not None and limit < total:
            total, available = limit, min(available, max(0, limit - used))
    return total - min(int(_RESERVE * total), _LARGEST_RESERVE), available


def _groups(proc: Path, cgroups: Path) -> list[Path]:
    """Return the directories of this process's memory control groups, with those that contain them."""
    found: list[Path] = []
    with suppress(OSError):
        for line in (proc / "self/cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            root = cgroups / "memory" if controllers else cgroups
            inner = root / path.lstrip("/")
            found += [inner, *(parent for parent in inner.parents if parent.is_relative_to(root))]
    return found


def _limit(group: Path) -> tuple[int | None, int | None]:
    """Return the limit of a control group and what is used of it, without what the kernel can reclaim."""
    for limit, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
        with suppress(OSError, ValueError):  # of the other version; "max"
            most, now = (int((group / name).read_text(encoding="ascii")) for name in (limit, used))
            stat = fields_of(group / "memory.stat")
            return most, max(0, now - stat.get("inactive_file", 0) - stat.get("active_file", 0))
    return None, None


def fields_of(path: Path) -> dict[str, int]:
    """Return the fields of a file in ``/proc``, or of a control group, that are numbers, in bytes; none without it."""
    with suppress(OSError):  # such as of a process that has ended
        text = path.read_text(encoding="utf-8", errors="replace")
        return {name: int(value) * (_KIB if unit else 1) for name, value, unit in _FIELD.findall(text)}
    return {}
