"""A training goes on, and ends as if nothing had been, whatever a batch system does to its blocks."""

from __future__ import annotations

import time


def test_the_main_queue_has_its_nodes_within_the_grace_and_the_training_goes_on(start, backend) -> None:
    """The slots save and leave at the first signal; the training is resumed when the main job has ended."""
    driver = start()
    future = driver.train(nodes=2)
    driver.until_step()
    saved = driver.step
    main = backend.submit_main(nodes=backend.nodes, seconds=2)
    submitted = time.monotonic()
    driver.until(lambda _: backend.has_started(main), seconds=15)
    assert time.monotonic() - submitted < backend.grace
    driver.until_block_ended("preempted")
    driver.finish(future)
    assert driver.run.fragments[-1].resumed_from >= saved


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
    driver.until_step(driver.step + 40)  # of a tenth of a second
    assert 1 <= backend.times_asked() <= 3
    assert time.monotonic() - broken > 3.5, "a round a second would be more"
    backend.mend()
    driver.finish(future)
    assert driver.run.blocks_ended == []
    assert len(driver.run.fragments) == 1
