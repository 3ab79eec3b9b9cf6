"""torchrun: elastic jobs of one to four nodes, as many as Slurm has when they start, with snapshots.

As in https://docs.pytorch.org/tutorials/beginner/ddp_series_fault_tolerance.html and
https://github.com/pytorch/examples/blob/main/distributed/ddp-tutorial-series/slurm/sbatch_run.sh
"""

import os
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from _peers_ways import Request, main
from _peers_workload import BATCH, Job, Numbered, Record, model_of, pretend
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

SAVE_SECONDS = 5.0  # as in the tutorial, nothing is saved at a signal


def train(job: Job, directory: str) -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    record = Record(directory, job)
    model = model_of(job)
    optimizer = torch.optim.SGD(model.parameters(), lr=job.lr, momentum=0.9)
    snapshot = Path(directory, f"{job.name}.pt")
    start, begun = 0, 0
    if snapshot.exists():
        saved = torch.load(snapshot, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        start, begun = saved["epoch"], saved["batch"]
    parallel = DistributedDataParallel(model)
    samples = Numbered(job.kind)
    sampler = DistributedSampler(samples)
    data = DataLoader(samples, batch_size=BATCH // size, sampler=sampler)
    last_save = time.monotonic()
    for epoch in range(start, job.epochs):
        sampler.set_epoch(epoch)
        for batch, (x, y, numbers) in enumerate(data):
            if epoch == start and batch < begun:  # the same samples, on any number of nodes
                continue
            pretend(len(x))
            optimizer.zero_grad()
            cross_entropy(parallel(x), y).backward()
            optimizer.step()
            record.trained(epoch, numbers)
            if rank == 0 and time.monotonic() - last_save > SAVE_SECONDS:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                aside = snapshot.with_suffix(".new")
                torch.save({**state, "epoch": epoch, "batch": batch + 1}, aside)
                aside.replace(snapshot)
                last_save = time.monotonic()
    if rank == 0:
        record.finished(model)
    dist.destroy_process_group()


def submit(request: Request) -> None:
    torchrun = f"{os.path.dirname(sys.executable)}/torchrun"
    for number, _ in enumerate(request.jobs):
        endpoint = f"{request.address}:{29500 + number}"  # all nodes have this address here, elsewhere the first node's
        script = f"""#!/bin/bash
#SBATCH --partition={request.partition} --requeue --nodes=1-4 --exclusive --open-mode=append
#SBATCH --time={request.minutes} --output={number}.out --signal=B:USR1@15
trap 'scontrol requeue $SLURM_JOB_ID' USR1
# Not --ntasks-per-node above: with it, Slurm gives the fewest nodes.
srun --ntasks=$SLURM_JOB_NUM_NODES --ntasks-per-node=1 \\
    {torchrun} --nnodes=1:$SLURM_JOB_NUM_NODES --nproc-per-node=1 --max-restarts=1000 \\
    --rdzv-id=$SLURM_JOB_ID-$SLURM_RESTART_COUNT --rdzv-backend=c10d --rdzv-conf=last_call_timeout=5 \\
    --rdzv-endpoint={endpoint} {__file__} --train {number} {request.file} &
wait
"""
        subprocess.run(["sbatch"], input=script, text=True, check=True)


if __name__ == "__main__":
    main(submit, train)
