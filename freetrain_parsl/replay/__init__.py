"""Replay: a planner driven by what a machine's idle nodes really did, in simulated time."""
