"""What a newcomer can leave alone: everything here uses the core, which does not know it."""
