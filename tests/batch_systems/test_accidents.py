"""Blocks are cancelled and batch systems break down; the training ends as if nothing had been, on each of them."""

from __future__ import annotations

import time


def test_a_block_that_the_administrator_cancels_is_told_apart_and_the_training_goes_on(start, backend) -> None:
    driver = start()
    future = driver.train()
    driver.until_step()
    backend.cancel(backend.running())
    driver.until_block_ended("cancelled")
    driver.finish(future)


def test_a_batch_system_that_is_down_costs_nothing_but_time(start, backend) -> None:
    """The training goes on in its block; while nobody answers, the batch system is asked less and less often."""
    driver = start()
    future = driver.train()
    driver.until_step()
    backend.break_down()
    broken = time.monotonic()
    driver.until_step(driver.step + 60)  # of a tenth of a second
    assert time.monotonic() - broken > 5, "a round a second would be more"
    assert 1 <= backend.times_asked() <= 3
    backend.mend()
    driver.finish(future)
    assert driver.run.blocks_ended == []
    assert len(driver.run.fragments) == 1
