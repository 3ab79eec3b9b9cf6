"""A Slurm whose jobs are completing for a while after they have ended."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from freetrain_parsl.errors import BatchSystemError
from freetrain_parsl.executor.journal import read_journal
from tests.batch_systems.backends import Slurm
from tests.batch_systems.driving import RATE_LIMITS, loaded_drivers
from tests.support.slurm.loopback import LoopbackSlurm

pytestmark = pytest.mark.slurm


def test_blocks_that_fail_at_once_and_are_completing_when_first_seen_are_counted(tmp_path, monkeypatch) -> None:
    """Such a job has nodes and an end in the past, as a block that leaves its window; those are submitted again."""
    epilog = tmp_path / "epilog"
    epilog.write_text("#!/bin/sh\nsleep 2\n")
    epilog.chmod(0o755)
    with LoopbackSlurm(nodes=2, bf_interval=1, extra=[f"Epilog={epilog}"]) as cluster:
        for name in ("PATH", "SLURM_CONF"):
            monkeypatch.setenv(name, cluster.environment[name])
        slurm = Slurm(cluster)
        provider = slurm.provider()
        provider.worker_init += "\nexit 3"
        monkeypatch.setattr(slurm, "provider", lambda: provider)
        with loaded_drivers(tmp_path) as load:
            driver = load(
                slurm, rate_limits=replace(RATE_LIMITS, max_failed_blocks=3, poll_interval=timedelta(seconds=0.5))
            )
            with pytest.raises(BatchSystemError, match=r"3 attempts in a row to start a block failed.*exit code 3"):
                driver.train().result(timeout=100)
            kinds = [entry.kind for _, entry in read_journal(driver.executor.journal_path)]
    assert (kinds.count("block_submitted"), kinds.count("starts_failed")) == (3, 3)
