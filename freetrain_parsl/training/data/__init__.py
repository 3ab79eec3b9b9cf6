"""Which samples, in which order, each exactly once."""
