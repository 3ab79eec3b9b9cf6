"""Trackers: where the values of `session.log` go, one run for each training job, whatever it took to train it."""
