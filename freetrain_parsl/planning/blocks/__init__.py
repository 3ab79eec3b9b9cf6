"""Decide which blocks to request and when to release them."""
