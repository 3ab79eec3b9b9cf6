"""Training on the compute node: sessions, process groups, data and checkpoints. Torch, but not Parsl."""
