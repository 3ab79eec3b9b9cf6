"""Memory of a slot that outlives the process of a training job."""

from __future__ import annotations

import os
from contextlib import closing
from typing import TYPE_CHECKING

import pytest
import torch

from freetrain_parsl.training.node_memory import NodeMemory

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def memory() -> Iterator[NodeMemory]:
    with closing(NodeMemory("n0", "b0", lambda: (2000, 1000))) as memory:
        yield memory


def test_a_copy_is_there_once_it_is_sealed(memory: NodeMemory) -> None:
    shelf = memory.shelves[0]
    assert shelf.read() is None
    shelf.open(5).copy_(torch.arange(5))
    assert shelf.read() is None
    shelf.seal(b"what it is")
    head, content = shelf.read() or (b"", torch.empty(0))
    assert (head, content.tolist()) == (b"what it is", [0, 1, 2, 3, 4])
    assert memory.shelves[1].read() is None
    shelf.open(5)
    assert shelf.read() is None, "the next one is on its way"


def test_a_process_that_has_ended_leaves_it_to_the_next_one(memory: NodeMemory) -> None:
    """Larger than before, and empty contents, too."""
    for size in (3, 100_000, 0, 7):
        pid = os.fork()
        if pid == 0:
            memory.shelves[2].open(size).fill_(size % 251)
            memory.shelves[2].seal(b"h" * size)
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        head, content = memory.shelves[2].read() or (b"", torch.ones(1))
        assert (head, content.tolist()) == (b"h" * size, [size % 251] * size)


def test_the_memory_of_empty_shelves_is_given_back(memory: NodeMemory) -> None:
    for shelf in memory.shelves[:2]:
        shelf.open(100_000)
        shelf.seal(b"")
    assert memory.held > 200_000
    memory.shelves[0].empty()
    memory.free()
    assert 100_000 < memory.held < 200_000
    assert memory.shelves[1].read() is not None
    memory.empty()
    memory.free()
    assert memory.held == 0
    memory.shelves[0].open(10).fill_(1)
    memory.shelves[0].seal(b"again")
    assert memory.shelves[0].read() is not None


def test_tries_are_counted_for_each_copy(memory: NodeMemory) -> None:
    shelf = memory.shelves[3]
    assert shelf.tries == 0
    for _ in range(2):
        shelf.open(1)
        shelf.seal(b"")
        assert shelf.tries == 0
        shelf.tried()
        shelf.tried()
        assert shelf.tries == 2


def test_the_available_memory_is_zero_if_unknown(memory: NodeMemory) -> None:
    assert memory.available == 1000
    with closing(NodeMemory("n0", "b0", lambda: None)) as unknown:
        assert unknown.available == 0


def test_registered_memory_is_registered_anew_where_it_is_mapped_anew(
    memory: NodeMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the first registration left, CUDA refuses the second at the same address, and every later call fails."""
    registered: dict[int, int] = {}

    class Cudart:
        @staticmethod
        def cudaHostRegister(begin: int, size: int, _flags: int) -> None:  # noqa: N802 - torch's
            registered[begin] = size

        @staticmethod
        def cudaHostUnregister(begin: int) -> None:  # noqa: N802 - torch's
            del registered[begin]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", Cudart)
    shelf = memory.shelves[0]
    for size in (10, 100_000, 50_000, 1_000_000):
        shelf.open(size)
        shelf.pin()
        (held,) = registered.values()
        assert held > size
    shelf.empty()
    shelf.free()
    assert not registered
