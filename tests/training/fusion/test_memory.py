"""Large blocks that are freed and asked for again, as the stacks of an array in each step."""

from __future__ import annotations

import ctypes
import resource

import pytest
import torch

from freetrain_parsl.training.fusion.memory import freed_memory_kept

PAGES = (96 << 20) // resource.getpagesize()


def faults_of_a_large_block() -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(96 << 20, dtype=torch.uint8)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="not the C library of Linux")
def test_freed_memory_is_used_again_and_returned_at_the_end() -> None:
    with freed_memory_kept():
        assert sum(faults_of_a_large_block() for _ in range(8)) < 4 * PAGES  # the first ones are elsewhere in the heap
    assert faults_of_a_large_block() > PAGES / 10


def test_other_c_libraries_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _name: object())
    with freed_memory_kept():
        assert torch.ones(3).sum() == 3
