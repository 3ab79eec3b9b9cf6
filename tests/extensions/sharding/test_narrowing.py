"""Shards that become smaller stay in their place, and the memory around them is given back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from freetrain_parsl.extensions.sharding import narrowing
from freetrain_parsl.extensions.sharding.narrowing import Narrowing

if TYPE_CHECKING:
    import pytest


def _whole(part: torch.Tensor) -> torch.Tensor:
    """Return the storage of which a tensor is a part."""
    return torch.empty(0, dtype=part.dtype).set_(part.untyped_storage())


def test_the_memory_around_a_part_is_given_back_and_the_part_stays() -> None:
    """Twice: the part of a part has the same storage."""
    places, old = Narrowing(), torch.arange(4 << 20, dtype=torch.float32).view(-1, 64) + 1
    wanted, address = old.clone(), old.data_ptr()
    part = places.part_of(old, 1 << 14, (1 << 15, 64))
    assert part is not None
    del old
    places.settle([part])
    assert part.data_ptr() == address + (1 << 14) * 64 * 4
    assert torch.equal(part, wanted[1 << 14 : 3 << 14])
    unused = torch.cat([_whole(part)[: 1 << 19], _whole(part)[-(1 << 19) :]])
    assert unused.count_nonzero() < 4 * 1024, "the system has cleared the pages that it got"

    assert places.part_of(part, 0, (1, 64)) is None, "of two tensors with the same memory only one stays there"
    places.begin()
    smaller = places.part_of(part, 100, (1 << 13, 64))
    assert smaller is not None
    places.settle([smaller])
    assert torch.equal(smaller, wanted[(1 << 14) + 100 : (1 << 14) + 100 + (1 << 13)])
    assert _whole(smaller)[-(2 << 20) :].count_nonzero() < 2 * 1024


def test_what_others_may_use_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard in a storage that it does not fill, and that no change has made so."""
    monkeypatch.setattr(narrowing, "_LEAST", 256 << 10)  # other tests lower it
    flat = torch.ones(2 << 20)
    assert Narrowing().part_of(flat[: 1 << 20], 0, (1 << 19,)) is None
    assert Narrowing().part_of(torch.ones(64), 0, (32,)) is None, "too small to give anything back"


def test_a_part_that_is_not_used_leaves_the_old_shard_as_it_was() -> None:
    """The change has failed."""
    places, old = Narrowing(), torch.ones(1 << 20)
    assert places.part_of(old, 0, (1 << 19,)) is not None
    places.settle([old])
    assert torch.equal(old, torch.ones(1 << 20))
