"""The control loop of the executor and what it decides."""
