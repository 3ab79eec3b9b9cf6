"""Warm processes that train a sharded model together, with a checkpoint manager but without a runtime."""

from __future__ import annotations

import errno
import os
import threading
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from warm_processes import forked_warm

from freetrain_parsl.errors import CheckpointError
from freetrain_parsl.extensions.sharding.extension import Sharding
from freetrain_parsl.extensions.sharding.write import JointWrite
from freetrain_parsl.protocol.options import Code, SessionOptions
from freetrain_parsl.storage.posix import CheckpointDirectory
from freetrain_parsl.training.checkpoints.loading import Restoration
from freetrain_parsl.training.checkpoints.manager import CheckpointManager
from freetrain_parsl.training.checkpoints.parameters import names_of_groups
from freetrain_parsl.training.extension import SessionExtension, extension_for
from freetrain_parsl.training.group.process_group import Group

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection
    from pathlib import Path

BATCH = 12  # divisible among 1, 2, 3 and 4 processes


def model() -> nn.Module:
    """Return a small network; its 7 and 3 rows do not divide evenly, and it has a buffer that is not sharded."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3), Scale())


class Scale(nn.Module):
    """Counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * 2


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, 6, generator=generator), torch.randn(BATCH, 3, generator=generator)


def train(root: Path, group: Group, *, until: int, shard: bool) -> dict[str, Any]:
    """Resume from the newest checkpoint, train up to a step, save, and return the unsharded parameters."""
    checkpoint_manager = CheckpointManager(
        SessionOptions("net", root, code=Code("tests:train", {"tests.train": "1"})), lambda: group
    )
    restored = checkpoint_manager.restore()
    net = model()
    if shard:
        from torch.distributed.fsdp import fully_shard

        fully_shard(net[0])
        fully_shard(net)
        for module in (net[0], net):
            module.set_force_sum_reduction_for_comms(True)  # as a session does
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
    objects: dict[str, Any] = {"model": net, "optimizer": optimizer, "scheduler": scheduler}
    extension = extension_for(objects, SessionExtension())
    checkpoint_manager.choose_saver(extension)
    step = 0
    if restored is not None:
        Restoration(restored).load(objects, objects)
        step = restored.state["step"]
    while step < until:
        x, y = (part.chunk(group.size)[group.rank] for part in batch(step))
        mse_loss(net(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        step += 1
    state = {
        "objects": {name: target.state_dict() for name, target in objects.items()},
        "groups": names_of_groups(objects),
        "outside": {},
        "step": step,
    }
    checkpoint_manager.save(lambda: state, step=step, epoch=0, reason="test", wait=True)
    checkpoint_manager.close()
    return {
        "parameters": {name: whole(value) for name, value in net.state_dict().items()},
        "newest": None if checkpoint_manager.newest is None else str(checkpoint_manager.newest.path),
        "sharded": isinstance(extension, Sharding),
    }


def whole(value: torch.Tensor) -> list[Any]:
    """Return a whole tensor, sharded or not, in a form that can be sent."""
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).tolist()


def train_on_full_disk(root: Path, group: Group, *, full_rank: int, **options: Any) -> dict[str, Any]:
    """Train where one member's disk is full."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    if group.rank != full_rank:
        return train(root, group, **options)
    problem = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with mock.patch.object(FileSystemWriter, "write_data", side_effect=problem):
        return train(root, group, **options)


def train_on_while_saving(root: Path, group: Group, *, full_rank: int | None = None) -> dict[str, Any]:
    """Make a step while the previous state is being written in the background; save again meanwhile and after."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.fsdp import fully_shard

    checkpoint_manager = CheckpointManager(SessionOptions("net", root), lambda: group)
    checkpoint_manager.restore()
    net = fully_shard(model())
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    checkpoint_manager.choose_saver(Sharding())
    go_on, write_data = threading.Event(), FileSystemWriter.write_data

    def held(writer: Any, plan: Any, planner: Any) -> Any:
        go_on.wait(20)
        if group.rank == full_rank:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write_data(writer, plan, planner)

    def make_a_step() -> None:
        x, y = (part.chunk(group.size)[group.rank] for part in batch(0))
        mse_loss(net(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    def save(step: int, *, wait: bool) -> None:
        checkpoint_manager.save(
            lambda: {"objects": {"model": net.state_dict(), "optimizer": optimizer.state_dict()}, "step": step},
            step=step, epoch=0, reason="test", wait=wait, mark=step,
        )  # fmt: skip

    make_a_step()
    saved = {name: whole(value) for name, value in net.state_dict().items()}
    with mock.patch.object(FileSystemWriter, "write_data", held):
        save(1, wait=False)
        ready = checkpoint_manager.ready
        make_a_step()
        save(2, wait=False)  # skipped
        go_on.set()
        checkpoint_manager.advance()
        if full_rank is None:
            checkpoint_manager.advance()
    newest = None if checkpoint_manager.newest is None else checkpoint_manager.newest.step
    entries = [path.name for path in sorted(checkpoint_manager.path.glob("step-*"))]
    save(2, wait=True)
    checkpoint_manager.close()
    return {
        "ready": ready,
        "saved": saved,
        "newest": newest,
        "entries": entries,
        "last": checkpoint_manager.newest.step,
    }


def save_while_another_takes_over(root: Path, group: Group) -> dict[str, Any]:
    """Save; then another process becomes the writer while the first member's draft is on its way."""
    from torch.distributed.fsdp import fully_shard

    checkpoint_manager = CheckpointManager(SessionOptions("net", root), lambda: group)
    checkpoint_manager.restore()
    checkpoint_manager.choose_saver(Sharding())
    state = {"objects": {"model": fully_shard(model()).state_dict()}}
    other, plan = CheckpointDirectory(root, "net"), JointWrite.__init__
    errors = []

    def planned(*arguments: Any) -> None:
        if group.is_first and not other.is_open:
            other.open(99)
        plan(*arguments)

    checkpoint_manager.save(lambda: state, step=1, epoch=0, reason="test", wait=True)
    with mock.patch.object(JointWrite, "__init__", planned):
        for step in (2, 3):
            checkpoint_manager.save(lambda: state, step=step, epoch=0, reason="test", wait=False)
            try:
                checkpoint_manager.save(lambda: state, step=step, epoch=0, reason="test", wait=True)
            except CheckpointError as error:
                errors.append(str(error))
    entries = [path.name for path in checkpoint_manager.path.glob("step-*")]
    return {"errors": errors, "entries": entries, "other_writes": group.is_first and not other.is_fenced_off}


def member(orders: Connection) -> None:
    """Carry out commands until the connection closes."""
    torch.set_num_threads(1)
    while True:
        try:
            function, store, generation, rank, size, root, options = orders.recv()
        except EOFError:
            return
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
        try:
            orders.send(function(root, Group(rank, size, generation), **options))
        except Exception as error:  # noqa: BLE001 - reported to the test
            orders.send(f"{type(error).__name__}: {error}")
        finally:
            dist.destroy_process_group()


class ShardedCrew:
    """Members that stay warm from one group to the next."""

    def __init__(self, size: int, directory: Path) -> None:
        context = forked_warm()
        self._directory = directory
        self._generation = 0
        self._members = []
        for _ in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=member, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._members.append((process, ours))

    def run(self, size: int, root: Path, function: Callable[..., Any] = train, **options: Any) -> list[Any]:
        """Train on `size` members."""
        self._generation += 1
        store = self._directory / f"store-{self._generation}"
        for rank, (_, pipe) in enumerate(self._members[:size]):
            pipe.send((function, str(store), self._generation, rank, size, root, options))
        return [self._answer(pipe) for _, pipe in self._members[:size]]

    def close(self) -> None:
        """Stop all members."""
        for process, pipe in self._members:
            pipe.close()
            process.join(10)
            if process.is_alive():
                process.kill()

    @staticmethod
    def _answer(pipe: Connection) -> Any:
        if not pipe.poll(60):
            raise TimeoutError("a member did not answer")
        return pipe.recv()
