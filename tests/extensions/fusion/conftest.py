"""What the tests of fusion share, also with those of training."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from freetrain_parsl.executor.journal import Journal
from tests.extensions.fusion.array_world import ArrayWorld
from tests.training.conftest import _one_thread, controlled, crew

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

__all__ = ["_one_thread", "controlled", "crew"]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., ArrayWorld]]:
    """Return a function that makes a world for the training manager."""
    journals: list[Journal] = []

    def new(**options: int) -> ArrayWorld:
        journals.append(Journal(tmp_path / f"journal-{len(journals)}.sqlite"))
        return ArrayWorld(tmp_path, journals[-1], **options)

    yield new
    for journal in journals:
        journal.close()
