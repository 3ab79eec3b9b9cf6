"""What a newcomer can leave alone: everything here uses the core, which does not know it."""

SESSIONS = {"sharding": "freetrain_parsl.extensions.sharding.extension:Sharding"}
"""What takes part in a session, see `freetrain_parsl.training.extension`: name -> class."""
