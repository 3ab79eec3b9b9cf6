"""Deciding, pure: no clock, no I/O, no Parsl, no torch."""
