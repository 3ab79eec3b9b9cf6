"""What a driver shows cannot end it."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from freetrain_parsl.campaign.run import contained

if TYPE_CHECKING:
    import pytest


def test_a_log_on_a_full_disk_does_not_end_the_run(caplog: pytest.LogCaptureFixture) -> None:
    shown: list[str] = []

    def report(line: str) -> None:
        if line == "lost":
            raise OSError(errno.ENOSPC, "No space left on device")
        shown.append(line)

    harmless = contained(report)
    for line in ("first", "lost", "lost", "last"):
        harmless(line)
    assert shown == ["first", "last"]
    assert caplog.text.count("the run cannot be shown") == 1
