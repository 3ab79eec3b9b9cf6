"""Sharded models: each process has a part of the state."""
