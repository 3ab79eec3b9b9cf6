"""Checkpoint storage."""
