"""The process group of a training job, and how it changes."""
