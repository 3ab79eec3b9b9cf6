"""Trackers: where the values of `session.log` go, one run for each training, whatever it took to train it."""
