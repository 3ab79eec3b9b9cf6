"""Trainers and searches that people have, with training jobs of this package."""
