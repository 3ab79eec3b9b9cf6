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
    future = driver.train(epochs=40)
    driver.until_step()
    backend.break_down()
    broken = time.monotonic()
    driver.until(lambda _: backend.times_asked())  # the pause before grows with what a round has taken
    driver.until_step(driver.step + 60)  # of a tenth of a second
    lasted = time.monotonic() - broken
    assert backend.times_asked() <= 1 + lasted / 2, "a round a second would be more"
    backend.mend()
    driver.finish(future)
    assert set(driver.run.blocks_ended) <= {"was given back"}, "at most because nothing was left to train"
    assert len(driver.run.fragments) == 1
