"""What user code exchanges between the processes of a training job: sums, concatenations, values of the first one."""
