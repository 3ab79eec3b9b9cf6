"""torchrun: elastic jobs of one to four nodes, as many as Slurm has when they start, with a snapshot in each epoch.

As in https://docs.pytorch.org/tutorials/beginner/ddp_series_fault_tolerance.html and
https://github.com/pytorch/examples/blob/main/distributed/ddp-tutorial-series/slurm/sbatch_run.sh
"""

import os
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from _peers_ways import Request, main
from _peers_workload import BATCH, Job, Numbered, Record, model_of, pretend
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def train(job: Job, directory: str) -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    record = Record(directory, job)
    model = model_of(job)
    optimizer = torch.optim.SGD(model.parameters(), lr=job.lr, momentum=0.9)
    snapshot = Path(directory, f"{job.name}.pt")
    start = 0
    if snapshot.exists():
        saved = torch.load(snapshot, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        start = saved["epoch"]
    parallel = DistributedDataParallel(model)
    samples = Numbered(job.kind)
    sampler = DistributedSampler(samples)
    data = DataLoader(samples, batch_size=BATCH // size, sampler=sampler)
    for epoch in range(start, job.epochs):
        sampler.set_epoch(epoch)
        for x, y, numbers in data:
            pretend(len(x))
            optimizer.zero_grad()
            cross_entropy(parallel(x), y).backward()
            optimizer.step()
            record.trained(epoch, numbers)
        if rank == 0:
            aside = snapshot.with_suffix(".new")
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1}, aside)
            aside.replace(snapshot)
    if rank == 0:
        record.finished(model)
    dist.destroy_process_group()


def submit(request: Request) -> None:
    for number, _ in enumerate(request.jobs):
        script = f"""#!/bin/bash
#SBATCH --partition={request.partition} --requeue --nodes=1-4 --exclusive --open-mode=append
#SBATCH --ntasks-per-node=1 --time={request.minutes} --output={number}.out --signal=B:USR1@15
trap 'scontrol requeue $SLURM_JOB_ID' USR1
head=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)
srun {os.path.dirname(sys.executable)}/torchrun --nnodes=1:4 --nproc-per-node=1 --max-restarts=1000 \\
    --rdzv-id=$SLURM_JOB_ID-$SLURM_RESTART_COUNT --rdzv-backend=c10d --rdzv-conf=last_call_timeout=5 \\
    --rdzv-endpoint={request.address}:{29500 + number} {__file__} --train {number} {request.file} &
wait
"""
        subprocess.run(["sbatch"], input=script, text=True, check=True)


if __name__ == "__main__":
    main(submit, train)
