"""The executor's real Parsl on a real embedded cluster, and a crew of warm processes, for integrations too."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.executor.conftest import start
from tests.training.conftest import _one_thread, crew

# The members of the crew import the trainings of this folder by name.
sys.path.insert(0, str(Path(__file__).parent))

__all__ = ["_one_thread", "crew", "start"]
