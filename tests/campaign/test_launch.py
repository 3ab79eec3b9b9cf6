"""Detached processes of a site: in a session of their own, without secrets, and what has become of them."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from freetrain_parsl.campaign.launch import LOG, launch, process_of


def ended(directory: Path):
    end = time.monotonic() + 60
    while (process := process_of(directory)).exit_code is None:
        assert time.monotonic() < end
        time.sleep(0.05)
    return process


@pytest.mark.smoke
@pytest.mark.slow
def test_a_process_is_nobodys_child_and_its_end_is_recorded(tmp_path, monkeypatch):
    monkeypatch.setenv("GLOBUS_COMPUTE_CLIENT_SECRET", "the-secret")
    assert process_of(tmp_path) is None
    launch(tmp_path, ["status", str(tmp_path)], tmp_path)
    started = process_of(tmp_path)
    environment = Path(f"/proc/{started.pid}/environ").read_text()
    assert os.getsid(started.pid) not in (os.getsid(0), 0)
    assert "the-secret" not in environment
    assert started.command == ("status", str(tmp_path))
    process = ended(tmp_path)
    assert (process.exit_code, process.running) == (2, False)
    assert "is not a run directory" in (tmp_path / LOG).read_text()
    assert (tmp_path / LOG).stat().st_mode & 0o077 == 0


@pytest.mark.slow
def test_the_end_of_an_earlier_process_is_not_that_of_a_later_one(tmp_path):
    launch(tmp_path, ["status", str(tmp_path)], tmp_path)
    earlier = process_of(tmp_path)
    launch(tmp_path, ["--version"], tmp_path)
    assert ended(tmp_path).exit_code == 0
    assert process_of(tmp_path).pid != earlier.pid


@pytest.mark.slow
def test_a_killed_process_has_no_exit_code_and_does_not_run(tmp_path):
    launch(tmp_path, ["--version"], tmp_path)
    os.kill(process_of(tmp_path).pid, signal.SIGKILL)
    end = time.monotonic() + 30
    while process_of(tmp_path).running:
        assert time.monotonic() < end
        time.sleep(0.05)
    assert process_of(tmp_path).exit_code is None


@pytest.mark.slow
def test_an_interrupt_comes_after_the_process_has_recorded_itself(tmp_path, monkeypatch):
    """The next cell finds it, and starts no other one."""
    interrupts = iter([KeyboardInterrupt])

    def look(directory):
        for interrupt in interrupts:
            raise interrupt
        return process_of(directory)

    with monkeypatch.context() as patched:
        patched.setattr("freetrain_parsl.campaign.launch.process_of", look)
        with pytest.raises(KeyboardInterrupt):
            launch(tmp_path, ["--version"], tmp_path)
    assert process_of(tmp_path) is not None
    assert ended(tmp_path).exit_code == 0
