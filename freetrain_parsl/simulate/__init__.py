"""Simulation: the planner driven by jobs that share a cluster, instead of by a recorded log."""
