"""Sweeps: many training jobs of one function with different arguments, and searches among them."""
