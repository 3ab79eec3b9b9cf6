"""The time zone of recorded answers."""

from __future__ import annotations

from tests.windows.conftest import utc

__all__ = ["utc"]
