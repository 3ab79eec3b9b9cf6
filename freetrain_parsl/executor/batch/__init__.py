"""Submission, monitoring and cancellation of blocks in the batch system."""
