"""Logs of clusters, read for a replay."""
