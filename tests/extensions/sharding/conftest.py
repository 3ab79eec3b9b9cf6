"""What the tests of sharded models share with those of training."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.training.conftest import _one_thread, controlled, crew, nccl_crew

__all__ = ["_one_thread", "controlled", "crew", "nccl_crew"]

# The members of the crew import helper modules of this folder by name; they inherit sys.path.
sys.path.insert(0, str(Path(__file__).parent))
