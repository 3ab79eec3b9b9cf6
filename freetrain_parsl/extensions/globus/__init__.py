"""Globus: checkpoints on its collections, campaigns through its Compute, several sites."""
