"""One step: batches, gradients, buffers."""
