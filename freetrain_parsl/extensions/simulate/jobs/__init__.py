"""The stream of jobs of a simulation."""
