"""Replays of several sites."""
