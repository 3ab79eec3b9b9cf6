"""Asking the batch system: which nodes are idle until when, and what became of our jobs."""
