"""The driver's jobs, and the learning of their scaling curves."""
