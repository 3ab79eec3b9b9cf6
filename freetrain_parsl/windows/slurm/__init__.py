"""Windows of Slurm."""
