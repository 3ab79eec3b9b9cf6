"""Queries to the batch system: which nodes are idle until when, and the states of our jobs."""
