"""Simulation of a shared cluster: many users' jobs arrive over time and are judged by their completion times."""
