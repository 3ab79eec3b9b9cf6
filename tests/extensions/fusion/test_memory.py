"""Large blocks that are freed and asked for again, as the stacks of an array in each step."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from freetrain_parsl.extensions.fusion.engine.memory import (
    freed_memory_kept,
    memory_limit,
    return_freed_memory,
    used_memory,
)

BLOCK = 64 << 20
PROGRAM = """
import resource, torch
from freetrain_parsl.extensions.fusion.engine.memory import freed_memory_kept

with freed_memory_kept():
    for _ in range(20):
        torch.ones(96 << 20, dtype=torch.uint8)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt * resource.getpagesize() >> 20)
"""


@pytest.mark.slow  # a process of its own that imports torch
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="not the C library of Linux")
def test_freed_memory_is_used_again() -> None:
    """Instead of coming page by page twenty times; in a process whose heap has no other history."""
    found = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert int(found.stdout) < 15 * 96


def test_other_c_libraries_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _name: object())
    with freed_memory_kept():
        return_freed_memory()
        assert torch.ones(3).sum() == 3


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="not the C library of Linux")
def test_blocks_between_others_that_stay_are_returned() -> None:
    """As the bases that members have loaded, between their adapters."""

    def resident() -> int:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        return next(int(line.split()[1]) >> 10 for line in lines if line.startswith("VmRSS:"))

    with freed_memory_kept():
        large, small = [], []
        for _ in range(32):
            large.append(torch.ones(2 << 20, dtype=torch.uint8))
            small.append(torch.ones(1000))
        full = resident()
        large.clear()
        kept = resident()
        return_freed_memory()
        returned = resident()
    assert len(small) == 32
    assert kept > full - 16
    assert returned < full - 48


@pytest.mark.skipif(torch.cuda.is_available(), reason="there, the accelerator's memory counts")
def test_the_memory_of_a_host_is_what_this_process_uses_and_its_slots_share(monkeypatch: pytest.MonkeyPatch) -> None:
    before = used_memory()
    block = torch.ones(BLOCK, dtype=torch.uint8)
    assert used_memory() - before > 0.9 * block.nbytes
    whole = memory_limit()
    monkeypatch.setenv("PARSL_WORKER_RANK", "1")
    monkeypatch.setenv("PARSL_WORKER_COUNT", "4")
    assert whole > memory_limit() == pytest.approx(whole / 4, rel=0.01)
