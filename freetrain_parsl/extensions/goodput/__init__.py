"""Goodput: throughput times statistical efficiency as a curve, objectives and policies for it."""
