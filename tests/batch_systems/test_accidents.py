"""Blocks are cancelled and batch systems break down; the training job is not affected, on each of them."""

from __future__ import annotations

import time

import pytest


@pytest.mark.smoke
def test_a_block_that_the_administrator_cancels_is_told_apart_and_the_training_goes_on(start, backend) -> None:
    driver = start()
    future = driver.train()
    driver.until_step()
    backend.cancel(backend.running())
    driver.until_block_ended("cancelled")
    driver.finish(future)


def test_a_batch_system_that_is_down_costs_nothing_but_time(start, backend) -> None:
    """The training job continues in its block; while the batch system does not respond, it is polled less and less."""
    driver = start()
    future = driver.train(epochs=40)
    driver.until_step()
    backend.break_down()
    broken = time.monotonic()
    driver.until(lambda _: backend.times_asked())  # the pause before grows with the duration of a round
    driver.until_step(driver.step + 60)  # a tenth of a second each
    lasted = time.monotonic() - broken
    assert backend.times_asked() <= 1 + lasted / 2, "one round per second would be more"
    backend.mend()
    driver.finish(future)
    assert set(driver.run.blocks_ended) <= {"was released"}, "only because no training job was left"
    assert len(driver.run.fragments) == 1
