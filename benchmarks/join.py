"""Time in which the members of a large training job form a group, and what this costs the driver.

Use ``--members N…`` for other sizes, ``--json FILE`` to save the rows. The members are threads of one process, each
with a slot's channel to a driver in another process, with CurveZMQ. They check that they reach each other, share the
secret, and form a gloo group, as in `freetrain_parsl.training.group.process_group.join`. ``one by one`` reads each key
of another member with a call of its own, as torch's stores do by default: its calls grow with the square of the
members. Times are medians of the repetitions; the driver's are CPU seconds. All threads share this machine's cores, so
that on a cluster the driver's share of the time is larger.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from _report import report
from parsl import curvezmq

from freetrain_parsl.executor.driver.rendezvous import RendezvousServer
from freetrain_parsl.executor.driver.slot_server import SlotServer
from freetrain_parsl.executor.slot.channel import Channel
from freetrain_parsl.executor.slot.training_run import ChannelStore
from freetrain_parsl.protocol.messages import DriverHeartbeat, SlotHeartbeat, StoreReply, StoreRequest
from freetrain_parsl.training.group.admission import Admission
from freetrain_parsl.training.group.joining import gloo_environment
from freetrain_parsl.training.group.reachability import check_reachable
from freetrain_parsl.training.group.rendezvous import RendezvousStore

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from freetrain_parsl.protocol.messages import ToSlot

TIMEOUT = timedelta(minutes=5)


class OneByOneStore(RendezvousStore):
    """Reads each key with a call of its own."""

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Wait for several values, one after another."""
        return [super(OneByOneStore, self).multi_get([key])[0] for key in keys]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait for all keys, one after another."""
        for key in keys:
            super().wait([key], timeout)

    def has_extended_api(self) -> bool:
        """Return false: gloo reads one key at a time."""
        return False


def drive(directory: str, pipe: Connection) -> None:
    """Serve the channel and the stores in this process; answer each message of the pipe with the CPU seconds used."""
    server = SlotServer(directory, (54000, 56000), ["127.0.0.1"])
    rendezvous = RendezvousServer(server.send)
    pipe.send(server.port)
    while True:
        if pipe.poll():
            group = pipe.recv()
            if group is None:
                break
            rendezvous.open(group)
            pipe.send(time.process_time())
        for slot, message in server.receive(0.01):
            if isinstance(message, StoreRequest):
                rendezvous.handle(slot, message, time.time())
            elif isinstance(message, SlotHeartbeat):
                server.send(slot, DriverHeartbeat())
    server.close()


class Member:
    """One member with its channel."""

    def __init__(self, rank: int, port: int, directory: str) -> None:
        self.rank = rank
        self.calls: Counter[str] = Counter()
        self._store: ChannelStore | None = None
        self.channel = Channel(
            ["127.0.0.1"],
            port,
            directory,
            f"node/{rank}/x",
            handle=self._handle,
            on_lost=lambda: None,
            heartbeat=SlotHeartbeat,
            beat=1.0,
            heartbeat_timeout=1e6,
        )
        self.channel.start()

    def _handle(self, message: ToSlot) -> None:
        if isinstance(message, StoreReply) and self._store is not None:
            self._store.deliver(message)

    def _send(self, message: StoreRequest) -> None:
        self.calls[message.operation] += 1
        self.channel.send(message)

    def join(self, group: str, size: int, kind: type[RendezvousStore]) -> Any:
        """Form a group with the others."""
        self.calls.clear()
        self._store = ChannelStore(group, self._send)  # type: ignore[arg-type]
        backend = kind(self._store, TIMEOUT)
        store = dist.PrefixStore(group, backend)
        check_reachable(store, self.rank, size, "127.0.0.1")
        Admission.share(store, self.rank, size, TIMEOUT)
        joined = dist.ProcessGroupGloo(store, self.rank, size, TIMEOUT)
        return joined, backend


def measure(members: int, repeats: int) -> list[dict[str, Any]]:
    """Let this many members form groups in both ways; return a row for each."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        certificates = curvezmq.create_certificates(Path(directory))
        here, there = multiprocessing.get_context("spawn").Pipe()
        driver = multiprocessing.get_context("spawn").Process(target=drive, args=(certificates, there))
        driver.start()
        port = here.recv()
        crew = [Member(rank, port, str(certificates)) for rank in range(members)]
        stack.callback(driver.join)
        stack.callback(here.send, None)
        for one in crew:
            stack.callback(one.channel.close)
        pool = stack.enter_context(ThreadPoolExecutor(members))
        for name, kind in (("one by one", OneByOneStore), ("together", RendezvousStore)):
            times, loads = [], []
            for number in range(repeats):
                here.send(group := f"{name}/{number}")
                used = here.recv()
                begun = time.monotonic()
                with gloo_environment("lo") if kind is RendezvousStore else ExitStack():
                    groups = list(pool.map(lambda one: one.join(group, members, kind), crew))  # noqa: B023
                times.append(time.monotonic() - begun)
                here.send("unused")
                loads.append(here.recv() - used)
                del groups
            calls = sum(sum(one.calls.values()) for one in crew)
            row = {"members": members, "keys are read": name, "calls": calls, "seconds": statistics.median(times)}
            row |= {"spread": max(times) - min(times), "driver's CPU seconds": statistics.median(loads)}
            rows.append(row)
    for row in rows:
        row["time ratio"] = row["seconds"] / rows[0]["seconds"]
        row["CPU ratio"] = row["driver's CPU seconds"] / rows[0]["driver's CPU seconds"]
    return rows


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, nargs="+", default=[4, 16, 64], metavar="N")
    parser.add_argument("--repeats", type=int, default=3, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows here")
    args = parser.parse_args()
    threading.stack_size(1 << 20)  # there are thousands
    rows = [row for members in args.members for row in measure(members, args.repeats)]
    report("Forming a group", rows, ["torch", "pyzmq", "freetrain-parsl"], args.json)


if __name__ == "__main__":
    main()
