"""The slot: the process on a node that runs the training jobs and tasks assigned by the driver."""
