"""The campaign file, and what is in it."""
