"""One crew of warm processes for all tests that need several processes, and a controlled checkpoint manager."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch

# The members of the crew import helper modules of this folder by name; they inherit sys.path.
sys.path.insert(0, str(Path(__file__).parent))

from typing import TYPE_CHECKING

from controlled_manager import ControlledManager
from crew import Crew

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def crew() -> Iterator[Crew]:
    crew = Crew()
    yield crew
    crew.close()


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Fix the order of sums, whatever the machine's number of cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def controlled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ControlledManager]:
    controlled = ControlledManager(tmp_path, monkeypatch, checkpoint_interval=timedelta(seconds=10))
    controlled.manager.restore()
    yield controlled
    controlled.may_write.set()
    controlled.problem = None
    controlled.manager.close()
