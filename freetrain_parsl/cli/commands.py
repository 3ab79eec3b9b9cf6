"""The whole ``freetrain`` command, for its documentation and tests."""

from __future__ import annotations

from freetrain_parsl.cli.verbs import app_of

__all__ = ["app"]

app = app_of()
