"""The data of a training job: the order of the samples, each exactly once per epoch."""
