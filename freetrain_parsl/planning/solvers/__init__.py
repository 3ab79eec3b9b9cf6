"""Exact solvers for the allocation problems."""
