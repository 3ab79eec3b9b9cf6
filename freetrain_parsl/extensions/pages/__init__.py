"""Shared parts of the pages: run view, markup, charts, time axis."""
