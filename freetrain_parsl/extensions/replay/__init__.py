"""Replay: the planner driven by the recorded idle nodes of a machine, in simulated time."""
