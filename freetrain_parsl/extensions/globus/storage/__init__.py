"""Checkpoints on Globus collections: carried between sites, each training job owned by one site at a time."""
