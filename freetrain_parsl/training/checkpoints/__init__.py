"""The state of a training job on disk."""
