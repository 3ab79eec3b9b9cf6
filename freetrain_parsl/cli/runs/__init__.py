"""The verbs of runs."""
