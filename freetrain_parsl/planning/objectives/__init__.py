"""Objectives: the value of an allocation."""
