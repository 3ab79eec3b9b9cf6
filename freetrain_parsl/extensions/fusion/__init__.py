"""Horizontal fusion: trainings with models of equal structure compute as one, each member with its own numbers."""
