"""The control loop of the executor and the components that it owns."""
