"""The training job of `slurm_neighbours.py`: real torch, real gradients, and steps that mostly sleep.

So sixteen virtual nodes fit on two cores, and a sample costs the same node-seconds on any number of nodes. Our
training jobs and those of the requeue alternative use the same numbers.
"""

from __future__ import annotations

BATCH = 48  # samples per step on all nodes together
SAMPLE_NODE_SECONDS = 0.05
SAMPLES = 4800  # samples per epoch
FEATURES = 16
CHECKPOINT_SECONDS = 20.0
SETTINGS = {"batch": BATCH, "cost": SAMPLE_NODE_SECONDS, "samples": SAMPLES, "features": FEATURES}
