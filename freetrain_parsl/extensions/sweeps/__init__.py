"""Sweeps: many trainings of one function with different arguments, and searches among them."""
