"""Whether old and new shards of a change in place fit into the memory of each node and device together."""

from __future__ import annotations

import re
import socket
from collections import Counter
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import psutil
import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from freetrain_parsl.extensions.sharding.rounds import Layout

__all__ = ["Need", "free_memory", "host_of_this_process", "needs", "shortage"]

Need: TypeAlias = tuple[tuple[str, int | str], int, int]
"""A memory (of a device that one process has, or of a host), and its bytes that are needed and free."""


def needs(layouts: Sequence[Layout], size: int, rank: int, budget: int) -> list[Need]:
    """Return what a member needs beside its present shards.

    Parameters
    ----------
    layouts
        Of the tensors.
    size
        Number of members of the next group.
    rank
        Of this member, in the present one.
    budget
        See `move`.
    """
    found: list[Need] = []
    for device in sorted({layout.device for layout in layouts}):
        shards = (prod(each.local_shape(0, size)) * each.dtype.itemsize for each in layouts if each.device == device)
        where = host_of_this_process() if device == "cpu" else rank
        found.append(((device, where), sum(shards) + 2 * budget, free_memory(device)))
    return found


def shortage(of_members: Iterable[Iterable[Need]]) -> str | None:
    """Return what the needs of all members together lack; ``None`` if nothing."""
    needed: Counter[tuple[str, int | str]] = Counter()
    free: dict[tuple[str, int | str], int] = {}
    for of_member in of_members:
        for memory, here, left in of_member:
            needed[memory] += here
            free[memory] = min(free.get(memory, left), left)
    for memory, total in needed.items():
        if total > (left := free[memory]):
            return f"the new shards need {total >> 20} MiB beside the old ones, and {left >> 20} MiB are free"
    return None


def host_of_this_process() -> str:
    """Return what identifies the host whose memory this process uses; containers on it have names of their own."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    except OSError:  # not on Linux
        return socket.gethostname()


def free_memory(device: str) -> int:
    """Return the bytes that this process can still allocate on a type of device, as far as it can tell."""
    if device == "cuda":
        free, _ = torch.cuda.mem_get_info()
        return int(free) + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    free = psutil.virtual_memory().available
    with suppress(OSError, ValueError):  # not in a control group, or without a limit
        group = Path("/sys/fs/cgroup")
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        cache = re.search(r"^inactive_file (\d+)", (group / "memory.stat").read_text(), re.MULTILINE)
        free = min(free, limit - used + (int(cache[1]) if cache else 0))
    return int(free)
