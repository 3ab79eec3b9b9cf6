"""Where checkpoints live."""
