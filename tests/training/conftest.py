"""One crew for all tests that need several processes; they stay warm."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

# The members of the crew import this folder's helper module by name; they inherit sys.path.
sys.path.insert(0, str(Path(__file__).parent))

from training_crew import Crew  # noqa: E402 - found through the path set above


@pytest.fixture(scope="session")
def crew() -> Iterator[Crew]:
    crew = Crew()
    yield crew
    crew.close()


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Sums in one order: a result must not depend on the machine's number of cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
