"""What tests of extensions share with those of the core: command line, campaigns, a planner, and a real Parsl."""

from __future__ import annotations

from tests.campaign.conftest import shell
from tests.cli.conftest import command
from tests.executor.conftest import stage, start
from tests.planning.conftest import planner
from tests.windows.conftest import utc

__all__ = ["command", "planner", "shell", "stage", "start", "utc"]
