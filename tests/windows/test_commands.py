"""Commands of the batch system are run as programs; failures to start are reported in one line."""

from __future__ import annotations

import errno
import subprocess
from typing import Any

import pytest

from freetrain_parsl.errors import BatchSystemError
from freetrain_parsl.windows.commands import COMMAND_COUNTS, CommandCounts, Commands


def test_a_process_without_descriptors_fails_for_now(monkeypatch: pytest.MonkeyPatch) -> None:
    def lack(*_: Any, **__: Any) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(subprocess, "run", lack)
    with pytest.raises(BatchSystemError, match="squeue could not be started: Too many open files"):
        Commands()("squeue")


def test_commands_are_counted_by_name_whatever_becomes_of_them() -> None:
    counts = CommandCounts()
    for command in ("squeue", "/usr/bin/squeue", "sbatch"):
        counts.add(command)
    assert counts.take() == {"squeue": 2, "sbatch": 1}
    assert counts.take() == {}
    COMMAND_COUNTS.take()
    Commands()("true")
    with pytest.raises(BatchSystemError):
        Commands()("false")
    assert COMMAND_COUNTS.take() == {"true": 1, "false": 1}
