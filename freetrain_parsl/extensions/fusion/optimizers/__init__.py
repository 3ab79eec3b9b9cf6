"""Optimizers over the rows of all members."""
