"""The slots of one block of `thousand_nodes.py`: all of its nodes in one process of some 30 MB, without torch.

Towards the driver they do what slots do, with the product's own messages over CurveZMQ: each says hello, sends a
heartbeat a second (never that it waits for others), meets the other members of its group in the rendezvous store with
as many calls as torch and gloo make, reports its progress twice a second, changes its group, pauses, saves and leaves
when its block is preempted, and has a new connection after each run. Towards HTEX's interchange the process is the
worker pool of the block.

Training is a function of time: a group of n members processes n samples a second from the moment at which it forms, so
that each member knows the state that the group had, and a survivor passes it on. Its files are what a shared file
system would have: ``checkpoints/``; and what the benchmark tells nodes: ``silent/NODE`` (cut off from the network),
``dead/NODE``, ``reconnect`` (all connections break), ``finish`` (training jobs have no samples left).
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import random
import re
import signal
import sys
import time
import uuid
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import zmq
from zmq.auth import load_certificate

from freetrain_parsl.protocol.codec import decode, encode
from freetrain_parsl.protocol.delivery import Delivery
from freetrain_parsl.protocol.messages import (
    TO_SLOT,
    ChangeGroup,
    Closing,
    Exit,
    Hello,
    PauseRun,
    Reconnected,
    RunEnded,
    RunReport,
    SlotHeartbeat,
    StartRun,
    StoreReply,
    StoreRequest,
)
from freetrain_parsl.protocol.reports import (
    GroupFailed,
    Joined,
    PauseReason,
    Progress,
    Ready,
    RunFinished,
    RunPaused,
)
from freetrain_parsl.windows.hostlist import expand_hosts

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from freetrain_parsl.protocol.messages import Place, ToDriver, ToSlot
    from freetrain_parsl.protocol.reports import RunEnd

    Meeting = Generator[StoreRequest, StoreReply, None]

TOTAL = 10**9  # samples of a training job; they run out when the benchmark says so
_REPORT, _SAVE = 0.5, 10.0  # seconds between reports of progress, and between checkpoints
_POOL_BEAT = 2.0  # seconds
_LOOK = 0.25  # seconds between looks at the files of the benchmark
_PREPARE = (0.2, 0.6)  # seconds in which a newcomer is ready: it has nothing to import
_ADDRESS = 160  # bytes of an address of gloo


class Slot:
    """A slot from its task to its end."""

    def __init__(self, block: Block, node: str, token: str, task: int) -> None:
        self.node, self.task = node, task
        self._block = block
        self._token = token
        self._name = f"{node}/0/{uuid.uuid4().hex[:8]}"
        self._delivery = Delivery()
        self._run: StartRun | None = None
        self._place: Place | None = None
        self._state: tuple[float, float] | None = None  # samples at a time, of time.monotonic()
        self._meeting: Meeting | None = None
        self._request = 0
        self._entered = 0.0
        self._joins = False  # a group that exists already, whose change it reports
        self._leaving = False
        self.ended = False
        self.heard = time.monotonic()
        self._due: dict[str, float] = {"beat": self.heard + random.random()}
        self.socket = block.connect(block.driver["port"], self._name)
        self._introduce()

    def _introduce(self) -> None:
        self.send(Hello(self._token, self.node, self._block.name, os.getpid(), self._block.versions))

    def send(self, message: ToDriver) -> None:
        """Send a message to the driver."""
        self.socket.send_multipart(encode(self._delivery.outgoing(message)))

    def reconnect(self) -> None:
        """Continue over a new connection, as after a failure of the network or in the next process of a slot."""
        self.socket.close(200)  # what was sent arrives
        self.socket = self._block.connect(self._block.driver["port"], self._name)
        self.send(Reconnected())

    # The driver's messages.

    def receive(self) -> None:
        """Handle all messages that have arrived."""
        with suppress(zmq.Again):
            while not self.ended:
                self.heard = time.monotonic()
                message = self._delivery.incoming(decode(self.socket.recv_multipart(zmq.NOBLOCK), TO_SLOT))
                if isinstance(message, Reconnected):
                    for unseen in self._delivery.unseen():
                        self.socket.send_multipart(encode(unseen))
                elif message is not None:
                    self._handle(message)

    def _handle(self, message: ToSlot) -> None:
        match message:
            case StartRun():
                self._run, self._place, self._state = message, None, None
                if message.place is None:
                    self._due["ready"] = time.monotonic() + random.uniform(*_PREPARE)
                else:
                    self._meet(message.place, joins=False)
            case StoreReply():
                self._answered(message)
            case ChangeGroup() if self._is_of_run(message):
                self._meeting = None
                if message.place is None:
                    self._end_run(RunPaused(PauseReason.LEFT, self._progress()))
                else:
                    self._meet(message.place, joins=True)
            case PauseRun() if self._is_of_run(message):
                self._save()
                self._end_run(RunPaused(PauseReason.REQUESTED, self._progress()))
            case Exit():
                if message.node:
                    self._block.leave(self.node)
                if self._run is not None and not message.now:
                    self._save()
                    self._end_run(RunPaused(PauseReason.CLOSING, self._progress()))
                self.end()

    def _is_of_run(self, message: ChangeGroup | PauseRun) -> bool:
        return self._run is not None and message.run == self._run.run

    # Training.

    def samples(self) -> float:
        """Return the samples that its group has processed, as far as this member knows."""
        if self._state is None:
            return 0.0
        size = 0 if self._place is None else self._place.size
        return min(float(TOTAL), self._state[0] + size * (time.monotonic() - self._state[1]))

    def _progress(self) -> Progress:
        samples = TOTAL if self._block.finish and self._state is not None else int(self.samples())
        size = 1 if self._place is None else self._place.size
        return Progress(step=samples // 8, samples=samples, samples_total=TOTAL, loss=1.0 / (1 + samples), rate=size)

    def _meet(self, place: Place, *, joins: bool) -> None:
        samples = self.samples() if self._state is not None else None
        self._place, self._joins = place, joins
        self._entered = time.monotonic()
        for name in ("report", "save", "ready"):
            self._due.pop(name, None)
        self._meeting = self._meet_in_store(place, samples)
        self._proceed(None)

    def _proceed(self, reply: StoreReply | None) -> None:
        assert self._meeting is not None
        try:
            self.send(next(self._meeting) if reply is None else self._meeting.send(reply))
        except StopIteration:
            self._meeting = None
            self._formed()

    def _answered(self, reply: StoreReply) -> None:
        if self._meeting is None or reply.request != self._request:
            return  # of a group that was given up
        if reply.ok:
            self._proceed(reply)
        else:
            assert self._run is not None
            assert self._place is not None
            self._meeting = None
            failed = GroupFailed(self._place.generation, "the members did not meet")
            self.send(RunReport(self._run.training, self._run.run, failed))

    def _call(self, operation: Any, *keys: str, value: bytes = b"") -> Generator[StoreRequest, StoreReply, list[bytes]]:
        """Call the rendezvous store; return the values."""
        assert self._run is not None
        assert self._place is not None
        self._request += 1
        group = f"{self._run.training}/{self._place.generation}"
        names = tuple(f"{group}/{key}" for key in keys)
        reply = yield StoreRequest(group, self._request, operation, names, self._run.meeting_timeout, payload=value)
        values, begin = [], 0
        for size in reply.sizes:
            values.append(reply.payload[begin : begin + size])
            begin += size
        return values

    def _meet_in_store(self, place: Place, samples: float | None) -> Meeting:
        """Make the calls of `check_reachable`, `Admission.share` and gloo; pass on the state with the second."""
        rank, ranks, call = place.rank, range(place.size), self._call
        if place.size > 1:
            yield from call("set", f"reachable/{rank}", value=b'["10.0.0.1", 50000]')
            if rank:
                yield from call("get", *(f"reachable/{other}" for other in range(rank)))
            yield from call("set", f"unreached/{rank}", value=json.dumps(samples).encode())
        if rank == 0:
            known = [samples]
            if place.size > 1:
                known = [json.loads(each) for each in (yield from call("get", *(f"unreached/{r}" for r in ranks)))]
            with_state = [each for each in known if each is not None]
            assert self._run is not None
            base = max(with_state) if with_state else self._block.checkpoint(self._run.training)
            self._state = base, time.monotonic()
            if place.size > 1:
                yield from call("set", "unreached", value=json.dumps(self._state).encode())
                yield from call("get", "unreached")
        else:
            base, began = json.loads((yield from call("get", "unreached"))[0])
            self._state = base, began
        if place.size > 1:
            yield from call("get", "secret") if rank else call("set", "secret", value=bytes(64))
            yield from call("set", f"address/{rank}", value=bytes(_ADDRESS))
            yield from call("get", *(f"address/{other}" for other in ranks))

    def _formed(self) -> None:
        assert self._run is not None
        assert self._place is not None
        now = time.monotonic()
        if self._joins:
            paused = now - self._entered
            self.send(RunReport(self._run.training, self._run.run, Joined(self._place.generation, paused, 0.0)))
        if self._place.rank == 0:
            self._due["report"], self._due["save"] = now, now + _SAVE

    def _save(self) -> None:
        if self._run is not None and self._place is not None and self._place.rank == 0 and self._state is not None:
            self._block.save(self._run.training, self.samples())

    def _end_run(self, end: RunEnd) -> None:
        """Report the end of the run, and continue the slot as its next process does."""
        assert self._run is not None
        payload = self._block.value if isinstance(end, RunFinished) and self._is_first else b""
        self.send(RunEnded(self._run.training, self._run.run, end, payload))
        self._run = self._place = self._state = self._meeting = None
        self._due = {"beat": self._due["beat"]}
        if self._leaving:
            self.end()
        else:
            self.reconnect()
            self._introduce()

    @property
    def _is_first(self) -> bool:
        return self._place is not None and self._place.rank == 0

    # Time.

    def turn(self, now: float) -> None:
        """Do what is due."""
        for name, due in list(self._due.items()):
            if now >= due and not self.ended:
                self._do(name, now)
        trains = self._state is not None and self._meeting is None
        if self._block.finish and self._run is not None and trains and not self.ended:
            self._end_run(RunFinished(self._progress()))

    def _do(self, name: str, now: float) -> None:
        run = self._run
        if name == "beat":
            self._due[name] = now + self._block.driver["beat"]
            self.send(SlotHeartbeat(run=None if run is None else run.run))
        elif run is None:
            del self._due[name]
        elif name == "ready":
            del self._due[name]
            self.send(RunReport(run.training, run.run, Ready()))
        elif name == "report":
            self._due[name] = now + _REPORT
            self.send(RunReport(run.training, run.run, self._progress()))
        else:
            self._due[name] = now + _SAVE
            self._save()

    def closing(self, grace: float) -> None:
        """Tell the driver that the batch system reclaims the node; end, or wait for its command."""
        if not self._leaving:
            self._leaving = True
            self.send(Closing(grace, gone=self._run is None))
            if self._run is None:
                self.end()

    def end(self) -> None:
        """End the slot."""
        if not self.ended:
            self.ended = True
            self.socket.close(1000)


class Block:
    """The process: connections, files, the worker pool, and the slots."""

    def __init__(self, name: str, nodes: list[str], pool: argparse.Namespace) -> None:
        self.name = name
        self.files = Path(pool.files)
        self.driver = json.loads((self.files / "driver.json").read_text(encoding="ascii"))
        self.value, self._lost = bytes.fromhex(self.driver["value"]), bytes.fromhex(self.driver["lost"])
        self.versions = self.driver["versions"]
        self.finish = False
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 4096)
        certificates = Path(pool.cert_dir)
        self._keys = (
            *load_certificate(certificates / "client.key_secret"),
            load_certificate(certificates / "server.key")[0],
        )
        self._nodes = nodes
        self._left: set[str] = set()
        self._silent: frozenset[str] = frozenset()
        self._dead: frozenset[str] = frozenset()
        self._slots: dict[str, Slot] = {}
        self._tasks: list[tuple[int, str]] = []
        self._stopped = False
        self._uid = uuid.uuid4().hex[:12]
        self._pool = self.connect(pool.port, self._uid)
        self._register()

    def connect(self, port: int, identity: str) -> zmq.Socket[bytes]:
        """Return a connection to a port of the driver's host."""
        link = self._context.socket(zmq.DEALER)
        link.setsockopt(zmq.IDENTITY, identity.encode())
        link.setsockopt(zmq.LINGER, 1000)
        link.setsockopt(zmq.SNDHWM, 0)
        link.curve_publickey, link.curve_secretkey, link.curve_serverkey = self._keys
        link.connect(f"tcp://127.0.0.1:{port}")
        return link

    def _register(self) -> None:
        self._pool.send(
            pickle.dumps(
                {
                    "type": "registration",
                    "parsl_v": version("parsl"),
                    "python_v": ".".join(map(str, sys.version_info[:3])),
                    "worker_count": len(self._nodes),
                    "uid": self._uid,
                    "block_id": self.name,
                    "start_time": time.time(),
                    "prefetch_capacity": 0,
                    "max_capacity": len(self._nodes),
                    "hostname": self._nodes[0],
                }
            )
        )

    # Files.

    def checkpoint(self, training: str) -> float:
        """Return the samples of a training job's checkpoint."""
        with suppress(FileNotFoundError):
            return float((self.files / "checkpoints" / training).read_text(encoding="ascii"))
        return 0.0

    def save(self, training: str, samples: float) -> None:
        """Save a training job."""
        part = self.files / "checkpoints" / f".{training}.{os.getpid()}"
        part.write_text(str(samples), encoding="ascii")
        part.rename(self.files / "checkpoints" / training)

    def _look(self, reconnected: float) -> float:
        self._silent, self._dead = (frozenset(os.listdir(self.files / name)) for name in ("silent", "dead"))  # noqa: PTH208
        self.finish = (self.files / "finish").exists()
        for node in self._dead & self._slots.keys():
            self._slots.pop(node).end()
        with suppress(FileNotFoundError):
            broken = (self.files / "reconnect").stat().st_mtime
            if broken > reconnected:
                for slot in self._slots.values():
                    slot.reconnect()
                return broken
        return reconnected

    # The loop.

    def stop(self) -> None:
        """Note the batch system's signal."""
        self._stopped = True

    def leave(self, node: str) -> None:
        """End a node's worker pool."""
        self._left.add(node)

    def run(self) -> None:  # noqa: C901 - the whole loop
        """Serve until all nodes have been left."""
        look = beat = 0.0
        reconnected = time.time()
        stopped_at: float | None = None
        while len(self._left) < len(self._nodes):
            now = time.monotonic()
            if now >= look:
                look = now + _LOOK
                reconnected = self._look(reconnected)
            if now >= beat:
                beat = now + _POOL_BEAT
                self._pool.send(pickle.dumps({"type": "heartbeat"}))
            active = {node: slot for node, slot in self._slots.items() if node not in self._silent}
            poller = zmq.Poller()
            poller.register(self._pool, zmq.POLLIN)
            for slot in active.values():
                poller.register(slot.socket, zmq.POLLIN)
            ready = dict(poller.poll(50))
            if self._pool in ready:
                self._receive_tasks()
            for slot in active.values():
                if slot.socket in ready:
                    slot.receive()
            now = time.monotonic()
            for node, slot in active.items():
                if not slot.ended:
                    slot.turn(now)
                if now - slot.heard > self.driver["heartbeat_timeout"] and not slot.ended:
                    self._give_up(node, slot)
            if self._stopped:
                stopped_at = stopped_at or now
                for slot in active.values():
                    if not slot.ended:
                        slot.closing(self.driver["grace"])
            self._replace()
            if stopped_at is not None and not self._slots:
                break
        self._context.destroy(1000)

    def _give_up(self, node: str, slot: Slot) -> None:
        """Save, and release the node: the driver is gone."""
        slot._save()  # noqa: SLF001 - the same module
        slot.end()
        self._left.add(node)

    def _receive_tasks(self) -> None:
        message = pickle.loads(self._pool.recv())  # noqa: S301 - from HTEX
        for task in message if isinstance(message, list) else ():
            token = re.search(rb"slot-\d+", task["buffer"])
            assert token is not None, "a task that starts no slot"
            self._tasks.append((task["task_id"], token[0].decode()))
        self._replace()

    def _replace(self) -> None:
        """Report the ends of slots as HTEX's pool does, and start the slots that were requested."""
        for node, slot in [(node, slot) for node, slot in self._slots.items() if slot.ended]:
            del self._slots[node]
            self._pool.send(pickle.dumps({"type": "result", "task_id": slot.task, "exception": self._lost}))
        if self._stopped:
            return
        gone = self._left | self._dead | self._silent | self._slots.keys()
        for node in [node for node in self._nodes if node not in gone][: len(self._tasks)]:
            task, token = self._tasks.pop(0)
            self._slots[node] = Slot(self, node, token, task)


def main() -> None:
    """Run the slots of the block that this process is started for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--files", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--cert_dir", required=True)
    parser.add_argument("--block_id", required=True)
    pool = parser.parse_args()
    nodes = os.environ.get("FREETRAIN_CLUSTER_NODELIST", "").split(",")  # of the embedded cluster
    if (hosts := os.environ.get("SLURM_JOB_NODELIST")) is not None:
        nodes = expand_hosts(hosts)
    block = Block(pool.block_id, list(nodes), pool)
    os.nice(10)  # nodes do not take the login node's processors from the driver
    stop: Callable[..., None] = lambda *_: block.stop()  # noqa: E731
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGUSR1, stop)
    block.run()


if __name__ == "__main__":
    main()
