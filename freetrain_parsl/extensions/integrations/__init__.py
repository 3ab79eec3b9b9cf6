"""Trainers and searches that people have, with trainings of this package."""
