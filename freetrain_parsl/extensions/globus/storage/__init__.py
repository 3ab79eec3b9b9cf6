"""Checkpoints on Globus collections: carried between sites, each training owned by one site at a time."""
