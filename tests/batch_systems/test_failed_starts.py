"""A block whose script ends with an error before a worker connects: few jobs, and a message with the reason."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import timedelta

import pytest

from freetrain_parsl.errors import BatchSystemError
from freetrain_parsl.executor.journal import read_journal
from tests.batch_systems.driving import RATE_LIMITS


def test_blocks_that_cannot_start_end_the_training_with_their_own_words(backend, start) -> None:
    """Each attempt waits twice as long as the previous one."""
    provider = backend.provider
    backend.provider = lambda: _with_worker_init(provider(), "echo $'no \\e[31mmodule\\e[0m today' >&2; exit 3")
    driver = start(rate_limits=replace(RATE_LIMITS, max_failed_blocks=3, poll_interval=timedelta(seconds=0.5)))
    future = driver.train()
    with pytest.raises(BatchSystemError) as failed:
        future.result(timeout=400)
    message = str(failed.value)
    assert re.match(
        r"3 attempts in a row to start a block failed; the last, block \S+ \(job \S+\) "
        r"(failed|ended).*; exit code 3; its stderr ends with '.*no module today.*'; see /\S+$",
        message,
    ), message
    entries = [entry for _, entry in read_journal(driver.executor.journal_path)]
    failures = [entry for entry in entries if entry.kind == "starts_failed"]
    assert [entry.detail["count"] for entry in failures] == [1, 2, 3]
    assert failures[-1].detail["next_attempt"] is None
    requested = [entry.time for entry in entries if entry.kind == "block_submitted"]
    assert len(requested) == 3
    assert requested[2] - failures[1].time >= 2.0 - 0.5
    assert backend.jobs() == {}


def _with_worker_init(provider, commands):
    provider.worker_init = f"{provider.worker_init}\n{commands}"
    return provider
