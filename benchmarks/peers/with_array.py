"""An ``sbatch`` array of preemptible jobs without checkpoints: each begins again when it is requeued."""

import subprocess
import sys

import torch
from _peers_ways import Request, main
from _peers_workload import BATCH, Job, Numbered, Record, model_of, pretend
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader


def train(job: Job, directory: str) -> None:
    record = Record(directory, job)
    model = model_of(job)
    optimizer = torch.optim.SGD(model.parameters(), lr=job.lr, momentum=0.9)
    data = DataLoader(Numbered(job.kind), batch_size=BATCH, shuffle=True)
    for epoch in range(job.epochs):
        for x, y, numbers in data:
            pretend(len(x))
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
            record.trained(epoch, numbers)
    record.finished(model)


def submit(request: Request) -> None:
    script = f"""#!/bin/bash
#SBATCH --partition={request.partition} --requeue --nodes=1 --exclusive --open-mode=append
#SBATCH --array=0-{len(request.jobs) - 1} --time={request.longest_minutes} --output=%A-%a.out
exec {sys.executable} {__file__} --train $SLURM_ARRAY_TASK_ID {request.file}
"""
    subprocess.run(["sbatch"], input=script, text=True, check=True)


if __name__ == "__main__":
    main(submit, train)
