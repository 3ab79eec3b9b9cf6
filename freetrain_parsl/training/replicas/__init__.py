"""Comparing the replicas of a training job: every member has the whole state, and all have the same."""
