"""Training jobs that run fused: which of them, how many together, and on which slots."""
