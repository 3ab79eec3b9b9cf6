"""Which code a checkpoint is of, and what a change of it means."""
