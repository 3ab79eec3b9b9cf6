"""The state of a training on disk."""
