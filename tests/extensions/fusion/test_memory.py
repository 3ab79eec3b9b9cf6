"""Large blocks that are freed and asked for again, as the stacks of an array in each step."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest
import torch

from freetrain_parsl.extensions.fusion.engine.memory import freed_memory_kept

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
        assert torch.ones(3).sum() == 3
