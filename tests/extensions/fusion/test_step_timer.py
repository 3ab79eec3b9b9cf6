"""How long a step takes."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
import torch

from freetrain_parsl.extensions.fusion.slot.sizing import StepTimer

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def rival() -> Iterator[None]:
    """Share one processor with a process that never waits."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})  # its child inherits it
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()
        os.sched_setaffinity(0, allowed)


def hash_much(_number: int) -> None:
    """Compute without Python's lock."""
    hashlib.sha256(bytes(1 << 25)).digest()


def compute(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_a_rival_for_the_processor_does_not_count() -> None:
    with torch_threads(1), rival():
        time.sleep(0.2)
        timer, begin = StepTimer(), time.perf_counter()
        compute(0.4)
        took, lasted = timer.seconds(), time.perf_counter() - begin
    assert lasted > 0.6
    assert took == pytest.approx(0.4, abs=0.1)


def test_what_a_step_waits_for_counts() -> None:
    with torch_threads(1):
        timer = StepTimer()
        time.sleep(0.3)
        assert 0.28 < timer.seconds() < 0.4


def test_threads_that_wait_for_a_processor_at_once_do_not_make_a_step_shorter_than_it_computes() -> None:
    with torch_threads(1), rival(), ThreadPoolExecutor(8) as pool:
        timer, begin = StepTimer(), time.process_time()
        list(pool.map(hash_much, range(8)))
        computed = time.process_time() - begin
        assert timer.seconds() >= computed


def test_with_several_threads_it_is_the_time_on_the_wall() -> None:
    """Their times of waiting for processors overlap."""
    with torch_threads(2), rival():
        timer, begin = StepTimer(), time.perf_counter()
        compute(0.2)
        assert timer.seconds() == pytest.approx(time.perf_counter() - begin, abs=0.02)
