"""Replays of sweeps, and of arrays."""
