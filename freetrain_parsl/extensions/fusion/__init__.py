"""Horizontal fusion: training jobs with models of equal structure compute as one, each member with its own numbers."""
