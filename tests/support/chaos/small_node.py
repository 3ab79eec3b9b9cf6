"""A node with little host memory, which a file makes short of it: nothing of the machine's own memory runs out."""

from __future__ import annotations

import multiprocessing
from typing import TYPE_CHECKING

from freetrain_parsl.executor.slot.node_watch import NodeWatch

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["low_memory_file", "share_small_node"]

_MEMORY = 4 * 250 << 20  # bytes; a training job of an episode needs a tenth of its share unless it leaks


def low_memory_file(pool: Path) -> Path:
    """Return the file that makes the node of a worker pool short of memory while it exists."""
    return pool / "low-memory"


def share_small_node(pool: Path) -> None:
    """Let this slot, and those that name the same directory of a worker pool, share a small node."""
    multiprocessing.current_process()._config["tempdir"] = str(pool)  # type: ignore[attr-defined]
    low = low_memory_file(pool)
    NodeWatch.__init__.__kwdefaults__["memory"] = lambda: (_MEMORY, 0 if low.exists() else _MEMORY)  # type: ignore[index]
