"""The Parsl executor: its control loop, the job submitter and the slots."""
