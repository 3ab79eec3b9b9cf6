"""The slot: the process on a node that runs the trainings and tasks assigned by the driver."""
