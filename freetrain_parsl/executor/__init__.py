"""Acting through Parsl: the executor, its driver thread, the batch desk, and the slots."""
