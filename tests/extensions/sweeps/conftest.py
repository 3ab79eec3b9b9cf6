"""The executor's real Parsl on a real embedded cluster, for searches too."""

from __future__ import annotations

from tests.executor.conftest import start

__all__ = ["start"]
