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

import fake_nccl
from controlled_manager import ControlledManager
from crew import Crew

from freetrain_parsl.training.group import gpus

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def crew() -> Iterator[Crew]:
    crew = Crew()
    yield crew
    crew.close()


@pytest.fixture(scope="session")
def nccl_crew(request: pytest.FixtureRequest) -> Iterator[Crew]:
    """Return one whose groups use NCCL, on a GPU that all share, or ``fake_nccl``; see `OVER_NCCL`."""
    if request.param == "nccl" and not (torch.cuda.is_available() and gpus.facts()[1]):
        pytest.skip("needs a GPU (-m gpu), NCCL_MULTI_RANK_GPU_ENABLE=1 and NCCL 2.30")
    crew = Crew() if request.param == "nccl" else Crew(loop=fake_nccl.member_loop)
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
