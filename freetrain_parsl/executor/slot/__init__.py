"""The slot: the process on a node that runs what the driver assigns to it."""
