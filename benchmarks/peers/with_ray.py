"""Ray Train: elastic jobs on a Ray cluster whose workers are preemptible jobs of one node.

As in https://docs.ray.io/en/latest/cluster/vms/user-guides/community/slurm.html,
https://docs.ray.io/en/latest/train/user-guides/fault-tolerance.html and
https://docs.ray.io/en/latest/train/user-guides/elastic-training.html
"""

import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ray
import ray.train
import ray.train.torch
import torch
from _peers_ways import Request, main
from _peers_workload import BATCH, Job, Numbered, Record, model_of, pretend
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler

PORT = 6399
WORKERS = 8  # as many as the cluster has nodes
SAVE_BATCHES = 4
AT_ONCE = 4  # training jobs: each has a process of its own on the submitting host, and up to four workers


def train(config) -> None:
    job, directory = Job(**config["job"]), config["directory"]
    record = Record(directory, job)
    model = model_of(job)
    optimizer = torch.optim.SGD(model.parameters(), lr=job.lr, momentum=0.9)
    start, begun = 0, 0
    checkpoint = ray.train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as folder:
            saved = torch.load(Path(folder, "state.pt"), weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        start, begun = saved["epoch"], saved["batch"]
    parallel = ray.train.torch.prepare_model(model)
    size, rank = ray.train.get_context().get_world_size(), ray.train.get_context().get_world_rank()
    samples = Numbered(job.kind)
    sampler = DistributedSampler(samples, num_replicas=size, rank=rank)
    data = DataLoader(samples, batch_size=BATCH // size, sampler=sampler)
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
            if (batch + 1) % SAVE_BATCHES == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                save({**state, "epoch": epoch, "batch": batch + 1}, rank)
    if rank == 0:
        record.finished(model)


def save(state, rank) -> None:
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = None
        if rank == 0:
            torch.save(state, Path(folder, "state.pt"))
            checkpoint = ray.train.Checkpoint.from_directory(folder)
        ray.train.report({}, checkpoint=checkpoint)


def submit(request: Request) -> None:
    program = f"{os.path.dirname(sys.executable)}/ray"
    address = f"{request.address}:{PORT}"
    here = [f"--node-ip-address={request.address}", f"--port={PORT}", f"--temp-dir={request.directory}/r"]
    common = ["--include-log-monitor=false", "--disable-usage-stats", "--object-store-memory=100000000"]
    head = [program, "start", "--head", *here, "--num-cpus=0", "--include-dashboard=false", *common]
    subprocess.run(head, check=True)
    for number in range(WORKERS):
        script = f"""#!/bin/bash
#SBATCH --partition={request.partition} --requeue --nodes=1 --exclusive --open-mode=append
#SBATCH --time={request.minutes} --output=worker-{number}.out --signal=B:USR1@15
trap 'kill $!; wait $!; scontrol requeue $SLURM_JOB_ID; exit' USR1
for attempt in 1 2 3; do  # a busy head may not answer in time
    {program} start --address={address} --num-cpus=1 --block {" ".join(common)} &
    wait
done
"""
        subprocess.run(["sbatch"], input=script, text=True, check=True)
    ray.init(address=address)
    with ThreadPoolExecutor(AT_ONCE) as threads:
        done = [threads.submit(fit, job, request.directory) for job in request.jobs]
    for one in done:
        one.result()


def fit(job: Job, directory: str) -> None:
    trainer = ray.train.torch.TorchTrainer(
        train,
        train_loop_config={"job": vars(job), "directory": directory},
        torch_config=ray.train.torch.TorchConfig(backend="gloo"),
        scaling_config=ray.train.ScalingConfig(
            num_workers=(1, 4), placement_strategy="SPREAD", elastic_resize_monitor_interval_s=10.0
        ),
        run_config=ray.train.RunConfig(
            name=job.name,
            storage_path=f"{directory}/ray",
            failure_config=ray.train.FailureConfig(max_failures=-1),
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
        ),
    )
    trainer.fit()


if __name__ == "__main__":
    main(submit)
