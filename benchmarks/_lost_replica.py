"""How a sharded training job continues when one of its replicas has lost a process, and how it is built again.

Two replicas of two processes each train with FSDP2 and AdamW on one machine. A process of the first is killed in the
middle of a backward pass; the second continues in the same processes. Two new processes then join as the first replica.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import multiprocessing.connection
import os
import signal
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from _lost_process import LAYERS, Data, sharded_net
from torch.distributed import TCPStore
from torch.nn.functional import mse_loss

from freetrain_parsl.errors import PeerFailed
from freetrain_parsl.protocol.options import SessionOptions
from freetrain_parsl.protocol.reports import Joined, Ready
from freetrain_parsl.training.fragment import run_fragment
from freetrain_parsl.training.mailbox import ControlMailbox, Membership, Regroup

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

KILL_AT, STEPS = 5, 10
_SPAWN = multiprocessing.get_context("spawn")


def train(session: Any, *, width: int, dies: bool) -> dict[str, Any]:
    """Train until all have made `STEPS` steps as four again; return the times of the steps, and the bytes of a part."""
    net = sharded_net(session, width)
    model, _ = session.prepare(net, torch.optim.AdamW, lr=1e-4)
    data = session.loader(Data(width), 24)
    ended: list[tuple[int, int, float]] = []  # step, members, time
    net[LAYERS // 2].register_full_backward_pre_hook(
        lambda *_: os.kill(os.getpid(), signal.SIGKILL) if dies and session.metrics["steps"] == KILL_AT else None
    )
    after = session.state(rebuilt=0)
    for _ in session.epochs(1 << 20):
        for x in data:
            if after.rebuilt == STEPS:
                size = sum(p.to_local().nbytes for p in net.parameters()) * 3
                return {"ended": ended, "bytes": size}
            before = session.metrics["steps"]
            session.step(mse_loss(model(x), x))
            if session.metrics["steps"] > before:
                ended.append((session.metrics["steps"], session.world_size, time.monotonic()))
                after.rebuilt += session.metrics["steps"] > KILL_AT and session.world_size == 4
    raise AssertionError("there are more epochs than steps")


def serve(channel: Connection, port: int) -> None:
    """Run one fragment, and pass its reports and commands on."""
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False)
    membership, options, arguments = channel.recv()
    mailbox = ControlMailbox()

    def listen() -> None:
        with contextlib.suppress(EOFError, ConnectionResetError):
            while True:
                mailbox.post(channel.recv())

    threading.Thread(target=listen, daemon=True).start()
    with contextlib.suppress(PeerFailed):  # in the broken replica
        end: Any = run_fragment(
            train, (), arguments, options=options, membership=membership, meet=lambda _: store, mailbox=mailbox,
            report=lambda item: channel.send(item) if isinstance(item, (Joined, Ready)) else None, next_size=2,
        )  # fmt: skip
        channel.send(getattr(end, "value", None))


def lost_replica(width: int, killed: int = 1) -> dict[str, Any]:
    """Kill one of four processes, of rank `killed`; let two others take the place of its replica.

    The time begins when the death of the process has been noticed, and ends with the first step of the last survivor.
    ``paused_ms`` and ``moved_ms`` are what the processes report of a change: without training, and in which the state
    moved.
    """
    port_store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    channels = []
    for _ in range(6):
        ours, theirs = _SPAWN.Pipe()
        _SPAWN.Process(target=serve, args=(theirs, port_store.port), daemon=True).start()
        theirs.close()
        channels.append(ours)

    def places(generation: int, size: int, replicas: int) -> list[Membership]:
        return [Membership("net", generation, rank, size, replicas, interface="lo") for rank in range(size)]

    def await_reports(members: list[int], kind: type, generation: int = 0) -> list[Any]:
        found = []
        for member in members:
            while not isinstance(told := channels[member].recv(), kind) or getattr(told, "generation", 9) < generation:
                pass
            found.append(told)
        return found

    with tempfile.TemporaryDirectory() as root:
        options = SessionOptions("net", Path(root), replicas=2)
        for rank, place in enumerate(places(1, 4, 2)):
            channels[rank].send((place, options, {"width": width, "dies": rank == killed}))
        for newcomer in (4, 5):
            channels[newcomer].send((None, options, {"width": width, "dies": False}))
        await_reports([4, 5], Ready)
        multiprocessing.connection.wait([channels[killed]])  # nothing but its end
        noticed = time.monotonic()
        first = killed // 2 * 2
        survivors = [member for member in range(4) if member // 2 != killed // 2]
        channels[first + 1 - killed % 2].send(Regroup(None, abort=True))
        for member, place in zip(survivors, places(2, 2, 1), strict=True):
            channels[member].send(Regroup(place, abort=True))
        continued = await_reports(survivors, Joined, 2)
        members = [*survivors, 4, 5]
        for member, place in zip(members, places(3, 4, 2), strict=True):
            channels[member].send(Regroup(place))
        rebuilt = await_reports(members, Joined, 3)
        answers = [await_reports([member], dict)[0] for member in survivors]
    made = answers[0]["ended"]
    return {
        "failure": "replica",
        "continues_s": max(next(at for step, _, at in one["ended"] if step > KILL_AT) for one in answers) - noticed,
        "steps_repeated": len(made) - len({step for step, _, _ in made}),
        "part_mb": answers[0]["bytes"] / 1e6,
        "step_s": statistics.median(b[2] - a[2] for a, b in itertools.pairwise(made)),
        "paused_ms": max(told.paused for told in continued) * 1e3,
        "rebuild_paused_ms": max(told.paused for told in rebuilt[:2]) * 1e3,
        "rebuild_moved_ms": max(told.transferred for told in rebuilt[:2]) * 1e3,
    }
