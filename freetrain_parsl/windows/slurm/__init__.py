"""Windows on Slurm."""
