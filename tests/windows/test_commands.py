"""Commands of the batch system are run as programs; failures to start are reported in one line."""

from __future__ import annotations

import errno
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from freetrain_parsl.errors import BatchSystemError
from freetrain_parsl.windows.commands import COMMAND_COUNTS, CommandCounts, Commands

if TYPE_CHECKING:
    from pathlib import Path


def test_a_process_without_descriptors_fails_for_now(monkeypatch: pytest.MonkeyPatch) -> None:
    def lack(*_: Any, **__: Any) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(subprocess, "run", lack)
    with pytest.raises(BatchSystemError, match="squeue could not be started: Too many open files"):
        Commands()("squeue")


def test_names_that_are_cut_within_a_character_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Squeue cuts names by bytes, and anybody may name a job."""
    command(tmp_path, monkeypatch, r"printf '\350\256\255\347\273\tname\n'")
    assert Commands()("squeue") == "\u8bad\ufffd\tname\n"


def test_what_a_user_wants_to_see_does_not_hide_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``export SQUEUE_USERS=$USER`` is common: without other users' jobs no block would make way for them."""
    for name in ("SQUEUE_USERS", "SQUEUE_PARTITION", "SCANCEL_STATE", "SINFO_PARTITION", "SACCT_FORMAT"):
        monkeypatch.setenv(name, "mine")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm.conf")
    command(tmp_path, monkeypatch, "env")
    seen = Commands()("squeue").splitlines()
    assert not [line for line in seen if line.endswith("=mine")]
    assert "SLURM_CONF=/etc/slurm.conf" in seen


def command(directory: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    file = directory / "squeue"
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o700)
    monkeypatch.setenv("PATH", str(directory), prepend=":")


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
