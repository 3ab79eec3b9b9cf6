"""A thread that is blocked in torch.distributed is detected from another thread.

The collective is a fake that acquires a lock, in a file name inside torch.distributed; the tests of
sharding use real collectives.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch.distributed as dist

from freetrain_parsl.training.group.blocked_thread import BlockedThread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FAKE = """
def collective(begun, lock):
    begun.release()
    lock.acquire()
"""


class Held:
    """A thread that acquires a lock held by the test; it runs until the test releases the lock."""

    def __init__(self, take: Callable[[Any, Any], Any]) -> None:
        self.lock, begun = threading.Lock(), threading.Semaphore(0)
        self.lock.acquire()
        self.thread = threading.Thread(target=take, args=(begun, self.lock), daemon=True)
        self.thread.start()
        begun.acquire()
        self.now = 100.0
        self.blocked = BlockedThread(self.thread.ident or 0, lambda: self.now)

    def looks(self, times: int) -> list[float]:
        """Call `seconds` every five seconds of the test's clock; return the results."""
        seen = []
        for _ in range(times):
            seen.append(self.blocked.seconds())
            self.now += 5.0
        return seen

    def release(self) -> None:
        self.lock.release()
        self.thread.join()


def fake(file: str) -> Any:
    """Return the fake compiled with a file name inside torch.distributed."""
    namespace: dict[str, Any] = {}
    exec(compile(FAKE, str(Path(dist.__file__).parent / file), "exec"), namespace)
    return namespace["collective"]


@pytest.fixture
def collective() -> Iterator[Held]:
    held = Held(fake("fake.py"))
    yield held
    if held.thread.is_alive():
        held.release()


def test_a_thread_in_a_collective_that_does_not_end_is_blocked_for_as_long_as_one_looks(collective: Held) -> None:
    collective.looks(100)  # at the first observation it may not have reached the lock
    first, *_, last = collective.looks(10)
    assert last - first == 45.0


def test_a_thread_that_has_ended_is_not_blocked(collective: Held) -> None:
    collective.looks(10)
    collective.release()
    assert collective.looks(3) == [0.0, 0.0, 0.0]


def wait(begun: Any, lock: Any) -> None:
    begun.release()
    lock.acquire()


@pytest.mark.parametrize("take", [wait, fake("checkpoint/fake.py")], ids=["user code", "writing a checkpoint"])
def test_a_thread_that_waits_for_something_else_is_not_blocked(take: Any) -> None:
    held = Held(take)
    assert held.looks(10) == [0.0] * 10
    held.release()
