"""Throughput as a function of the number of nodes."""
