"""The training job of `rescale` under torchrun, after PyTorch's tutorial on elastic training job: run by `rescale`.

The first rank writes a snapshot every few steps; whenever the number of workers changes, torchrun restarts all of
them, and they resume from the snapshot.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from _rescale_net import BATCH, LEARNING_RATE, MOMENTUM, Data, StepLog, make_net
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

SNAPSHOT_STEPS = 10


def main(directory: Path) -> None:
    """Train until stopped."""
    torch.set_num_threads(1)
    log = StepLog(directory)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    snapshot = directory / "snapshot.pt"
    step = 0
    if snapshot.exists():
        state = torch.load(snapshot, weights_only=True)
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    model = DistributedDataParallel(net)
    data = Data()
    sampler: DistributedSampler[tuple[torch.Tensor, int]] = DistributedSampler(data)
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        for x, y in DataLoader(data, batch_size=BATCH // ranks, sampler=sampler):
            log.write("begin", ranks, rank, step)
            optimizer.zero_grad(set_to_none=True)
            cross_entropy(model(x), y).backward()
            optimizer.step()
            step += 1
            log.write("end", ranks, rank, step)
            if rank == 0 and step % SNAPSHOT_STEPS == 0:
                aside = snapshot.with_suffix(f".{os.getpid()}")
                torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, aside)
                aside.replace(snapshot)
        epoch += 1


if __name__ == "__main__":
    main(Path(sys.argv[1]))
