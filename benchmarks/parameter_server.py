"""Parameter servers against all-reduce, in gloo on one machine: are slots worth more as servers than as workers.

Every row trains with the same number of slots. ``all-reduce``: all are workers, each with the whole optimizer.
``sharded``: all are workers; gradients of each shard of the parameters are reduced to one of them, which has its
optimizer state, steps, and broadcasts the shard. ``servers``: the same, but the owners of the shards are slots that do
nothing else, and workers only hold parameters. ``fewer``: all-reduce on as many workers as ``servers`` has, as if the
servers' slots were free.

The batch of a worker is constant, so that samples per second compare. ``measured`` is on this machine, whose cores the
processes share. ``own cores`` is of a step that takes the median processor time of the busiest process: what slots with
cores of their own could reach if all of their work overlapped, which flatters servers.
``difference`` is the largest between the parameters and those of all-reduce on as many workers, after equal steps.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from _report import report
from torch import nn
from torch.multiprocessing.spawn import spawn

from freetrain_parsl.report.output import write_output

SLOTS = 4
SHAPES = {  # name -> sizes of the layers, batch of a worker
    "computation": ([256, 512, 512, 10], 512),
    "balanced": ([784, 1024, 1024, 10], 128),
    "parameters": ([1024, 4096, 2048, 10], 4),
}
OPTIMIZERS = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}


@dataclass(frozen=True)
class Layout:
    """Which ranks are workers, and which rank owns each shard of the optimizer; no owners: every worker all of it."""

    name: str
    workers: int
    owners: tuple[int, ...] = ()

    @property
    def ranks(self) -> int:
        """Number of ranks that take part."""
        return max(self.workers, *(owner + 1 for owner in self.owners), 0)


LAYOUTS = (
    Layout("all-reduce", 4),
    Layout("sharded", 4, (0, 1, 2, 3)),
    Layout("fewer", 3),
    Layout("servers", 3, (3,)),
    Layout("fewer", 2),
    Layout("servers", 2, (2, 3)),
)


class Replica:
    """The parameters of one process as one vector, and the part of the optimizer that it has."""

    def __init__(self, rank: int, layout: Layout, sizes: list[int], optimizer: str, groups: list[Any]) -> None:
        torch.manual_seed(1)
        layers = [nn.Linear(a, b) for a, b in pairwise(sizes)]
        self.model = nn.Sequential(*(part for layer in layers for part in (layer, nn.Tanh())))
        self.rank, self.layout, self.groups = rank, layout, groups
        parameters = list(self.model.parameters())
        self.values = torch.cat([parameter.detach().flatten() for parameter in parameters])
        self.gradients = torch.zeros_like(self.values)
        begin = 0
        for parameter in parameters:
            part = slice(begin, begin + parameter.numel())
            parameter.data = self.values[part].view_as(parameter)
            parameter.grad = self.gradients[part].view_as(parameter)
            begin = part.stop
        number = len(layout.owners) or 1
        bounds = [len(self.values) * shard // number for shard in range(number + 1)]
        self.shards = [slice(a, b) for a, b in pairwise(bounds)]
        mine = [s for s, owner in zip(self.shards, layout.owners, strict=False) if owner == rank] or self.shards[:1]
        self.own = nn.Parameter(self.values[mine[0]])
        self.own.grad = self.gradients[mine[0]]
        self.optimizer = OPTIMIZERS[optimizer]([self.own], lr=1e-3, fused=True)
        self.steps_own = not layout.owners or rank in layout.owners

    def step(self, batch: torch.Tensor | None) -> None:
        """Make a step; servers have no batch."""
        self.gradients.zero_()
        if batch is not None:
            self.model(batch).square().mean().backward()
        if not self.layout.owners:
            dist.all_reduce(self.gradients, group=self.groups[0])
        else:
            self._each(dist.reduce, self.gradients)
        self.gradients /= self.layout.workers
        if self.steps_own:
            self.optimizer.step()
        if self.layout.owners:
            self._each(dist.broadcast, self.values)

    def _each(self, collective: Any, vector: torch.Tensor) -> None:
        """Exchange every shard with its owner, all at the same time."""
        handles = [
            collective(vector[shard], owner, group=group, async_op=True)
            for shard, owner, group in zip(self.shards, self.layout.owners, self.groups, strict=True)
            if self.rank < self.layout.workers or self.rank == owner
        ]
        for handle in handles:
            handle.wait()


def run(rank: int, port: int, steps: int, results: str) -> None:
    """Measure all shapes and layouts in one process; rank 0 writes the rows."""
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=SLOTS)
    rows = []
    for shape, (sizes, batch_size) in SHAPES.items():
        for optimizer in OPTIMIZERS:
            alone: dict[int, torch.Tensor] = {}
            for layout in LAYOUTS:
                members = list(range(layout.workers))
                groups = [dist.new_group(sorted({*members, owner})) for owner in layout.owners]
                groups = groups or [dist.new_group(members)]
                replica = Replica(rank, layout, sizes, optimizer, groups)
                takes_part = rank < layout.ranks
                batches = [
                    torch.randn(batch_size, sizes[0], generator=torch.Generator().manual_seed(100 * rank + number))
                    for number in range(4)
                ]
                walls: list[float] = []
                used: list[float] = []
                dist.barrier()
                for number in range(steps + 2):
                    begin, begin_used = time.perf_counter(), time.process_time()
                    if takes_part:
                        replica.step(batches[number % 4] if rank < layout.workers else None)
                    if number >= 2:
                        walls.append(time.perf_counter() - begin)
                        used.append(time.process_time() - begin_used)
                busiest = torch.tensor([median(used) if takes_part else 0.0], dtype=torch.float64)
                dist.all_reduce(busiest, dist.ReduceOp.MAX)
                samples = layout.workers * batch_size
                reference = alone.setdefault(layout.workers, replica.values.clone())
                if rank == 0:
                    rows.append(
                        {
                            "shape": shape,
                            "parameters": len(replica.values),
                            "optimizer": optimizer,
                            "layout": layout.name,
                            "workers": layout.workers,
                            "servers": layout.ranks - layout.workers,
                            "measured": samples / median(walls),
                            "own_cores": samples / busiest.item(),
                            "difference": float((replica.values - reference).abs().max()),
                        }
                    )
                dist.barrier()
    if rank == 0:
        Path(results).write_text(json.dumps(rows), encoding="utf-8")
    dist.destroy_process_group()


def main(arguments: list[str]) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args(arguments)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    write_output(options.json, "[]\n")
    spawn(run, (port, options.steps, str(options.json)), nprocs=SLOTS)
    rows = json.loads(options.json.read_text(encoding="utf-8"))
    report("Parameter servers against all-reduce", rows, ["torch"], options.json)
    return 0 if all(row["difference"] < 1e-3 for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
