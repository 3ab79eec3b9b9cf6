"""The values of ``session.log``, and their delivery to trackers, exactly once."""
