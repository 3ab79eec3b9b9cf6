"""The process group of a training, and how it changes."""
