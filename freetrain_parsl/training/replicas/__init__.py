"""Comparing the replicas of a training: every member has the whole state, and all have the same."""
