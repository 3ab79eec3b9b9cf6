"""The report of a replay as one HTML page."""
