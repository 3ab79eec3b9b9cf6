"""What the tests of fusion share with those of training."""

from __future__ import annotations

from tests.training.conftest import _one_thread, controlled, crew

__all__ = ["_one_thread", "controlled", "crew"]
