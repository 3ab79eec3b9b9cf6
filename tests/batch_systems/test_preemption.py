"""The main queue takes its nodes, on every batch system."""

from __future__ import annotations

import time

import pytest


@pytest.mark.smoke
@pytest.mark.timed
def test_the_main_queue_has_its_nodes_within_the_grace_and_the_training_goes_on(start, backend) -> None:
    """The slots save and exit at the first signal; the training job resumes when the main job has ended."""
    driver = start()
    future = driver.train(nodes=2)
    driver.until_step()
    driver.until(lambda run: len(run.trainings["t"].nodes) == 2)
    driver.until_step(driver.step + 3)  # by both: before its first step the state of a new group is not confirmed
    saved = driver.step
    main = backend.submit_main(nodes=backend.nodes, seconds=2)
    submitted = time.monotonic()
    driver.until(lambda _: backend.has_started(main), seconds=15)
    assert time.monotonic() - submitted < backend.grace
    driver.until_block_ended("preempted|yielded")  # the latter if our poll of the queue came before its signal
    driver.finish(future)
    (resumed,) = [fragment.resumed_from for fragment in driver.run.fragments if fragment.resumed_from is not None]
    assert resumed >= saved
