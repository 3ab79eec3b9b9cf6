"""Blocks in the batch system: submitted, followed, ended."""
