"""Cost and speed of a checkpoint, compared to plain ``torch.save`` with ``fsync``.

Use ``--quick`` for a short run, ``--json FILE`` to save the figures, ``--directory DIR`` to measure another file
system. A state is a model with Adam: 12 bytes per parameter. `blocked` is the time for which a training job is blocked,
`write` the time until the checkpoint is durable, with its checksums. Each figure is a median of several checkpoints
after one warm-up; ours and the plain ones alternate. Sharded states are written by two processes with FSDP2, which wait
for the write.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from _report import report
from torch import nn

from freetrain_parsl.protocol.options import SessionOptions
from freetrain_parsl.report.output import write_output
from freetrain_parsl.training.checkpoints.loading import Restoration
from freetrain_parsl.training.checkpoints.manager import CheckpointManager
from freetrain_parsl.training.extension import SessionExtension, extension_for
from freetrain_parsl.training.group.process_group import Group

MILLIONS = [2, 8, 21, 60]
LAYERS = 8
RANKS = 2


@dataclass(frozen=True)
class Round:
    """Seconds of one checkpoint."""

    blocked: float
    write: float
    restore: float
    bytes: int


def make_objects(parameters: int, device: torch.device, *, shard: bool) -> dict[str, Any]:
    """Make a model of about this many parameters, and Adam with its state."""
    width = int((parameters / LAYERS) ** 0.5)
    net = nn.Sequential(*[nn.Linear(width, width) for _ in range(LAYERS)]).to(device)
    if shard:
        from torch.distributed.fsdp import fully_shard

        for layer in net:
            fully_shard(layer)
        fully_shard(net)
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.randn(2, width, device=device)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return {"model": net, "optimizer": optimizer}


def state_of(objects: dict[str, Any]) -> dict[str, Any]:
    return {"objects": {name: target.state_dict() for name, target in objects.items()}}


def synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Bench:
    """Successive checkpoints of one state."""

    def __init__(self, root: Path, objects: dict[str, Any], group: Group) -> None:
        self.objects = objects
        self.group = group
        self.checkpoint_manager = CheckpointManager(SessionOptions("net", root), lambda: group)
        self.checkpoint_manager.restore()
        self.checkpoint_manager.choose_saver(extension_for(objects, SessionExtension()))
        self._root = root
        self._step = 0

    def checkpoint(self) -> Round:
        """Write a checkpoint, and restore the objects from it."""
        self._step += 1
        synchronise()
        begun = time.perf_counter()
        self.checkpoint_manager.save(
            lambda: state_of(self.objects), step=self._step, epoch=0, reason="benchmark", wait=False
        )
        blocked = time.perf_counter() - begun
        while self.checkpoint_manager.busy:
            time.sleep(0.002)
            self._continue()
        write = time.perf_counter() - begun
        entry = self.checkpoint_manager.newest
        assert entry is not None
        assert entry.step == self._step
        size = json.loads((entry.path / "manifest.json").read_text(encoding="utf-8"))["bytes"]
        return Round(blocked, write, self._restore(), size)

    def _continue(self) -> None:
        """Do what a training job does between two steps."""
        ready = torch.tensor([float(self.checkpoint_manager.ready)])
        if self.group.sum(ready) == self.group.size:
            self.checkpoint_manager.advance()
        else:
            self.checkpoint_manager.poll()

    def plain(self) -> float:
        """Write the same state durably with plain torch; return the seconds."""
        path = self._root / "plain.pt"
        synchronise()
        begun = time.perf_counter()
        with path.open("wb") as file:
            torch.save(state_of(self.objects), file)
            file.flush()
            os.fsync(file.fileno())
        seconds = time.perf_counter() - begun
        path.unlink()
        return seconds

    def _restore(self) -> float:
        begun = time.perf_counter()
        restored = CheckpointManager(SessionOptions("net", self._root), lambda: self.group).restore()
        assert restored is not None
        Restoration(restored).load(self.objects, self.objects)
        synchronise()
        seconds = time.perf_counter() - begun
        self.checkpoint_manager.close()  # the other checkpoint manager has taken over
        self.checkpoint_manager.restore()
        return seconds


def measure(kind: str, millions: int, rounds: list[Round], plain: list[float] | None) -> dict[str, Any]:
    """Make a row of the table."""
    write = statistics.median(item.write for item in rounds)
    size = rounds[0].bytes
    reference = statistics.median(plain) if plain else None
    return {
        "state": kind,
        "parameters_M": millions,
        "size_MB": size / 1e6,
        "blocked_s": statistics.median(item.blocked for item in rounds),
        "write_s": write,
        "blocked_share": statistics.median(item.blocked / item.write for item in rounds),
        "write_MB_s": size / 1e6 / write,
        "plain_save_s": reference,
        "write_ratio": None if reference is None else write / reference,
        "blocked_ratio": None if reference is None else statistics.median(r.blocked for r in rounds) / reference,
        "restore_s": statistics.median(item.restore for item in rounds),
    }


def measure_plain(millions: int, repeats: int, directory: Path) -> dict[str, Any]:
    """Measure a state written by one process."""
    root = Path(tempfile.mkdtemp(dir=directory))
    try:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        bench = Bench(root, make_objects(millions * 1_000_000, device, shard=False), Group())
        bench.checkpoint()
        rounds, plain = [], []
        for _ in range(repeats):
            rounds.append(bench.checkpoint())
            plain.append(bench.plain())
        bench.checkpoint_manager.close()
    finally:
        shutil.rmtree(root)
    return measure("plain", millions, rounds, plain)


def sharded_member(rank: int, root: Path, millions: int, repeats: int) -> None:
    """Take part in the checkpoints of a sharded state; the first process writes its figures to a file."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # torch's, about its experimental features
    dist.init_process_group("gloo", init_method=f"file://{root / 'store'}", rank=rank, world_size=RANKS)
    bench = Bench(root, make_objects(millions * 1_000_000, torch.device("cpu"), shard=True), Group(rank, RANKS))
    rounds = [bench.checkpoint() for _ in range(repeats + 1)][1:]
    bench.checkpoint_manager.close()
    if rank == 0:
        (root / "rounds.json").write_text(json.dumps([vars(item) for item in rounds]), encoding="utf-8")
    dist.destroy_process_group()


def measure_sharded(millions: int, repeats: int, directory: Path) -> dict[str, Any]:
    """Measure a state written by two processes."""
    root = Path(tempfile.mkdtemp(dir=directory))
    try:
        torch.multiprocessing.spawn(sharded_member, (root, millions, repeats), nprocs=RANKS)
        rounds = [Round(**item) for item in json.loads((root / "rounds.json").read_text(encoding="utf-8"))]
    finally:
        shutil.rmtree(root)
    return measure(f"sharded, {RANKS} processes", millions, rounds, None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two sizes, fewer repeats")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")
    parser.add_argument("--directory", type=Path, default=Path(), help="where to write (default: current directory)")
    options = parser.parse_args()
    sizes, repeats = (MILLIONS[:2], 3) if options.quick else (MILLIONS, 5)
    plain = [measure_plain(millions, repeats, options.directory.absolute()) for millions in sizes]
    sharded = [measure_sharded(millions, repeats, options.directory.absolute()) for millions in sizes[:3]]
    report("checkpoints", [*plain, *sharded], ["freetrain-parsl", "torch"])
    if options.json is not None:
        typical = plain[sizes.index(21)] if 21 in sizes else plain[-1]
        figures = {
            "blocked_share": typical["blocked_share"],
            "write_mb_s": typical["write_MB_s"],
            "restore_s": typical["restore_s"],
            "parameters_millions": typical["parameters_M"],
            "machine": {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()},
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
            "command": [Path(sys.executable).name, *sys.argv],
            "rows": [*plain, *sharded],
        }
        write_output(options.json, json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
