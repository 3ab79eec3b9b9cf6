"""A process of a sharded training job is killed: how the others continue, from copies in memory or a checkpoint.

The processes are on one machine, each as if on a node of its own.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import TCPStore
from torch.nn.functional import mse_loss

from freetrain_parsl.errors import PeerFailed
from freetrain_parsl.protocol.options import SessionOptions
from freetrain_parsl.training.fragment import run_fragment
from freetrain_parsl.training.mailbox import ControlMailbox, Membership
from freetrain_parsl.training.node_memory import NodeMemory

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

EVERY = 5
KILL_AT = 13
AFTER = 2  # steps that are not repeated
LAYERS = 8
_SPAWN = multiprocessing.get_context("spawn")


class Data:
    """Seeded vectors."""

    def __init__(self, width: int) -> None:
        self.x = torch.randn(1024, width, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, position: int) -> torch.Tensor:
        return self.x[position]


def sharded_net(session: Any, width: int) -> torch.nn.Sequential:
    """Make a network of which each layer is sharded."""
    from torch.distributed.fsdp import fully_shard

    net = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(LAYERS)])
    for layer in net:
        fully_shard(layer, mesh=session.mesh)
    fully_shard(net, mesh=session.mesh)
    return net


def train(
    session: Any, *, width: int, steps: int, kill: bool = False, alternate: bool = False, pause: float = 0.0
) -> dict[str, Any]:
    """Train for some steps; return the times of the steps, and the processor time of the blocks without and with."""
    net = sharded_net(session, width)
    model, _ = session.prepare(net, torch.optim.AdamW, lr=1e-4)
    data = session.loader(Data(width), 24)
    ended: list[float] = []
    used: dict[bool, list[float]] = {False: [], True: []}
    begun = time.process_time()
    for _ in session.epochs(1 << 20):
        for x in data:
            done = session.metrics["steps"]
            if done == steps:
                size = sum(p.to_local().nbytes for p in net.parameters()) * 3
                return {"ended": ended, "used": used, "costs": costs(session), "bytes": size}
            if kill and done == KILL_AT and session.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            session.step(mse_loss(model(x), x))
            ended.append(time.monotonic())
            time.sleep(pause)
            if alternate and session.metrics["steps"] % EVERY == 0:
                block = session.metrics["steps"] // EVERY
                if block > 2:  # the first ones are slower
                    used[block % 2 == 0].append((time.process_time() - begun) / EVERY)
                # The copy begins at the next boundary, and belongs to the next block, which is an even one.
                copies_of(session).next_step = session.metrics["steps"] if block % 2 == 1 else 1 << 60
                begun = time.process_time()
    raise AssertionError("there are more epochs than steps")


def copies_of(session: Any) -> Any:
    """Return the copies of this process; ``None``: there are none."""
    return session._runtime.extension.copies  # noqa: SLF001 - their costs are in no report


def costs(session: Any) -> dict[str, float]:
    """Return the seconds of the last copy."""
    copies = copies_of(session)
    return {} if copies is None else {"blocked": copies.blocked_seconds, "transfer": copies.transfer_seconds}


def serve(number: int, channel: Connection, port: int) -> None:
    """Run fragments as commanded, in one process, which keeps the copies."""
    torch.set_num_threads(1)
    memory = NodeMemory(f"node-{number}", "", lambda: (1 << 40, 1 << 40))
    store = TCPStore("127.0.0.1", port, is_master=False)
    while (command := channel.recv()) is not None:
        membership, options, arguments = command
        failed = None
        try:
            end: Any = run_fragment(
                train, (), arguments, options=options, membership=membership, meet=lambda _: store,
                mailbox=ControlMailbox(), report=lambda _: None, memory=memory,
            )  # fmt: skip
            value = end.value
        except PeerFailed:
            value, failed = None, time.monotonic()
        channel.send((value, failed))


class Processes:
    """Warm processes."""

    def __init__(self, count: int) -> None:
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._generation = 0
        self._members = []
        for number in range(count):
            ours, theirs = _SPAWN.Pipe()
            process = _SPAWN.Process(target=serve, args=(number, theirs, self._store.port), daemon=True)
            process.start()
            theirs.close()
            self._members.append((process, ours))

    def run(self, numbers: list[int], options: SessionOptions, **arguments: Any) -> list[Any]:
        """Run a fragment in these processes; ``None`` for one that died."""
        self._generation += 1
        for rank, number in enumerate(numbers):
            place = Membership("net", self._generation, rank, len(numbers), interface="lo")
            self._members[number][1].send((place, options, arguments))
        return [self._answer(number) for number in numbers]

    def _answer(self, number: int) -> Any:
        try:
            return self._members[number][1].recv()
        except EOFError:
            return None

    def close(self) -> None:
        """End them."""
        for process, channel in self._members:
            with contextlib.suppress(BrokenPipeError):
                channel.send(None)
            process.join(10)


def failure(width: int, *, copies: bool = False) -> dict[str, Any]:
    """Kill one of three processes in a step; return when the others have made their next step, and from where.

    They form a group in the same, warm processes, call the function again, and load the state from the copies or, for
    comparison, from a checkpoint of the same step in the page cache. The time begins when they have been told of the
    failure, and ends with their first step.
    """
    processes = Processes(3)
    with tempfile.TemporaryDirectory() as root:
        options = SessionOptions("net", Path(root), snapshot_every=EVERY if copies else None)
        if not copies:  # a checkpoint of the same step as the newest copy
            processes.run([0, 1, 2], options, width=width, steps=KILL_AT // EVERY * EVERY)
        lost = processes.run([0, 1, 2], options, width=width, steps=1 << 30, kill=True)
        told = max(one[1] for one in lost if one is not None)
        answers = processes.run([0, 2], options, width=width, steps=KILL_AT + AFTER)
    processes.close()
    return {
        "failure": "neighbour" if copies else "checkpoint",
        "continues_s": max(one[0]["ended"][0] for one in answers) - told,
        "steps_repeated": len(answers[0][0]["ended"]) - AFTER,
    }
