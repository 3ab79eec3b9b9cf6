"""Checks whether a training function survives being moved: stopped, resumed, and run on other numbers of processes."""
