"""Training on the compute node: sessions, process groups, data and checkpoints. Uses torch, but not Parsl."""
