"""The pause of a sharded training job that changes or loses processes, in place and otherwise.

Use ``--quick`` for a small model, ``--json FILE`` to save the figures, and ``--changes 2-3 3-2`` or ``--failures
replica`` for a part of them.

*In place*: from the boundary to the next batch, on the slowest process; newcomers have prepared before, as always.
*Checkpoint*: `torch.distributed.checkpoint` saves and loads the same state in the processes that there are after the
change, in the page cache, without checksums or ``fsync``: less than a restart from a checkpoint is. *torchrun*: as many
processes from nothing until they have a sharded model; nothing is loaded. Bytes are those of all processes together;
the least is what has to move.

``--gpu``: on a GPU that all processes share, over NCCL: needs ``NCCL_MULTI_RANK_GPU_ENABLE=1`` and NCCL 2.30.

*Failures*: see `_lost_process`; the neighbour is a process that has a copy of the part of the lost one. With a replica,
see `_lost_replica`, no step is repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from _lost_process import failure
from _lost_replica import lost_replica
from _report import report
from _rescale_crew import Crew
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

WIDTH, INNER, BLOCKS, QUICK_BLOCKS = 512, 2048, 16, 2
CHANGES = ("2-3", "3-2", "4-8", "8-4")
FAILURES = ("replica", "neighbour", "checkpoint")
ROUNDS = 2
FAILURE_WIDTH, QUICK_WIDTH = 2048, 256  # 33.6 million parameters
_PATIENCE = 120.0


def make_net(blocks: int) -> nn.Sequential:
    """Return a network of linear layers."""
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, INNER), nn.ReLU(), nn.Linear(INNER, WIDTH)) for _ in range(blocks))
    )


def shard(net: nn.Sequential, mesh: Any) -> nn.Sequential:
    """Shard it as usual."""
    from torch.distributed.fsdp import fully_shard

    for block in net:
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net


class Data:
    """Seeded vectors."""

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, position: int) -> torch.Tensor:
        return torch.randn(WIDTH, generator=torch.Generator().manual_seed(position))


def train(session: Any, directory: str) -> None:
    """Train until stopped; after each change write what moved, and save and load once for comparison."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    root = Path(directory)
    net = shard(make_net(int((root / "blocks").read_text())), session.mesh)
    model, optimizer = session.prepare(net, torch.optim.AdamW, lr=1e-4)
    data = session.loader(Data(), 8)
    seen = 0
    for _ in session.epochs(1 << 20):
        for x in data:
            session.step(model(x).square().mean())
            group = session._runtime.members.group  # noqa: SLF001 - what moved is not public
            if group.generation == seen:
                time.sleep(0.01)
                continue
            seen, moved = group.generation, session._runtime.extension.resharding.moved  # noqa: SLF001
            began = time.monotonic()
            model_state, optimizer_state = get_state_dict(model, optimizer)
            states = {"model": model_state, "optimizer": optimizer_state}
            path = root / f"dcp-{seen}"
            dcp.save(states, checkpoint_id=path)
            dcp.load(states, checkpoint_id=path)
            set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
            took = time.monotonic() - began
            traffic = None if moved is None else vars(moved.traffic)
            row = {"checkpoint_s": took, "traffic": traffic, "sharding_s": moved and moved.seconds}
            (root / f"row-{seen}-{session.rank}.part").write_text(json.dumps(row))
            (root / f"row-{seen}-{session.rank}.part").rename(root / f"row-{seen}-{session.rank}.json")


def least_bytes(state: float, old: int, new: int) -> float:
    """Return what has to move if those that stay, here of the first ranks, get the ranks at which they keep most."""
    best = [0.0] * (new + 1)  # by dynamic programming: kept with the first ranks of the new group
    for i in range(min(old, new)):
        row = [0.0] * (new + 1)
        for rank in range(new):
            overlap = max(0.0, min((i + 1) / old, (rank + 1) / new) - max(i / old, rank / new))
            row[rank + 1] = max(row[rank], best[rank] + overlap)
        best = row
    return state * (1 - best[new])


def measure(changes: Sequence[str], blocks: int, rounds: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each change."""
    with tempfile.TemporaryDirectory() as scratch:
        for old, new in (map(int, change.split("-")) for change in changes):
            root = Path(scratch) / f"{old}-{new}"
            root.mkdir()
            (root / "blocks").write_text(str(blocks))
            yield {**change(root, old, new, blocks, rounds), "torchrun_s": torchrun(new, blocks)}


def change(root: Path, old: int, new: int, blocks: int, rounds: int) -> dict[str, Any]:
    """Change from the one to the other number of processes and back several times."""
    state = 3 * 4 * sum(p.numel() for p in make_net(blocks).parameters())
    pauses, checkpoints, traffic, forming = [], [], [], []
    with Crew(root, max(old, new), train) as crew:
        crew.start(old)
        rows_of(root, 1, old)
        for number in range(rounds):
            reports = crew.resize(new)
            generation = 2 + 2 * number
            rows = rows_of(root, generation, new)
            pauses.append(max(one.paused for one in reports))
            forming.append(pauses[-1] - max(one.transferred for one in reports))
            checkpoints.append(max(row["checkpoint_s"] for row in rows))
            traffic.append([row["traffic"] for row in rows])
            if number + 1 < rounds:
                crew.resize(old)
                rows_of(root, generation + 1, old)
    return {
        "change": f"{old}->{new}",
        "state_mb": state / 1e6,
        "in_place_s": statistics.median(pauses),
        "forming_s": statistics.median(forming),
        "checkpoint_s": statistics.median(checkpoints),
        "moved_mb": max(sum(one["received"] for one in each) for each in traffic) / 1e6,
        "least_mb": least_bytes(state, old, new) / 1e6,
        "staging_mb": max(one["staging"] for each in traffic for one in each) / 1e6,
    }


def rows_of(root: Path, generation: int, size: int) -> list[dict[str, Any]]:
    """Wait for what the members of a group have written."""
    files = [root / f"row-{generation}-{rank}.json" for rank in range(size)]
    deadline = time.monotonic() + _PATIENCE
    while not all(file.exists() for file in files):
        if time.monotonic() > deadline:
            raise TimeoutError(f"group {generation} of {size} did not train")
        time.sleep(0.01)
    return [json.loads(file.read_text()) for file in files]


def torchrun(size: int, blocks: int) -> float:
    """Return the seconds in which torchrun starts processes with a sharded model and an optimizer."""
    began = time.monotonic()
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={size}", "--standalone", __file__]
    subprocess.run([*command, "--cold", str(blocks)], check=True, capture_output=True, timeout=280)
    return time.monotonic() - began


def cold(blocks: int) -> None:
    """Begin a training job under torchrun."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(0)  # the mesh would take one for each process
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    net = shard(make_net(blocks), init_device_mesh("cuda" if on_gpu else "cpu", (dist.get_world_size(),)))
    torch.optim.AdamW(net.parameters())
    dist.destroy_process_group()


def main() -> None:
    """Measure, and report."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--changes", nargs="*", choices=CHANGES, metavar="OLD-NEW")
    parser.add_argument("--failures", nargs="*", choices=FAILURES)
    parser.add_argument("--cold", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.cold is not None:
        cold(options.cold)
        return
    if not options.gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a session uses a GPU wherever there is one
    if options.changes is None and options.failures is None:
        options.changes, options.failures = CHANGES, FAILURES
    blocks, rounds, width = (QUICK_BLOCKS, 1, QUICK_WIDTH) if options.quick else (BLOCKS, ROUNDS, FAILURE_WIDTH)
    rows = list(measure(options.changes or (), blocks, rounds))
    losses = {"replica": lost_replica, "neighbour": partial(failure, copies=True), "checkpoint": failure}
    rows += [losses[name](width) for name in options.failures or ()]
    report("Sharded training jobs change and lose processes", rows, ["torch"], options.json)


if __name__ == "__main__":
    main()
