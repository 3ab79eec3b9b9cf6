"""The data of a training: the order of the samples, each exactly once per epoch."""
