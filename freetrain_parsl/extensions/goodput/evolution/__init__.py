"""Evolutionary search: an engine for allocations whose value does not separate into values of counts."""
