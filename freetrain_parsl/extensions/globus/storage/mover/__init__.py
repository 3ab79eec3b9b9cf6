"""The mover, which carries whole checkpoints between collections."""
