"""Exact solvers of the allocation problems."""
