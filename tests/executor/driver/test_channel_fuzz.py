"""The driver survives all messages that peers of the control channel may send: real driver and sockets, fake slots."""

from __future__ import annotations

import itertools
import json
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import pytest
import zmq
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from parsl import curvezmq
from parsl.serialize import serialize

from freetrain_parsl.executor.batch.submitter import JobSubmitter
from freetrain_parsl.executor.driver.loop import ControlLoop
from freetrain_parsl.executor.driver.plain_tasks import Task
from freetrain_parsl.executor.driver.slot_cycle import SlotTaskEnded
from freetrain_parsl.executor.driver.slot_server import SlotServer
from freetrain_parsl.executor.jobs.request import Limits, SharedSettings, Training, TrainingRequest
from freetrain_parsl.executor.journal import Journal
from freetrain_parsl.executor.slot.channel import Channel
from freetrain_parsl.extensions.fusion.driver.kind import FusionKind
from freetrain_parsl.planning.curves.scaling import ScalingCurve
from freetrain_parsl.planning.model import Window, WindowKind
from freetrain_parsl.planning.policies import resolve_policy
from freetrain_parsl.planning.settings import PlannerSettings
from freetrain_parsl.protocol.codec import VERSION, Envelope, by_type, encode
from freetrain_parsl.protocol.messages import (
    TO_DRIVER,
    Hello,
    RunEnded,
    RunReport,
    SlotHeartbeat,
    StartRun,
    StartTask,
    TaskEnded,
    ToSlot,
)
from freetrain_parsl.protocol.options import SessionOptions
from freetrain_parsl.protocol.reports import PauseReason, Progress, RunFinished
from freetrain_parsl.windows.base import BlockState, BlockStatus, Survey, WindowSource

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from freetrain_parsl.windows.system import BlockSpec

NODES = ("n0", "n1")


class _Idle(WindowSource):
    """Two idle nodes; every job of the executor runs on them until it is cancelled."""

    def __init__(self) -> None:
        self.jobs: dict[str, BlockStatus] = {}

    def survey(self, job_ids: Sequence[str] = ()) -> Survey:
        now = time.time()
        held = any(not status.state.ended for status in self.jobs.values())
        windows = () if held else (Window(NODES, now, None, WindowKind.BACKFILL),)
        return Survey(now, windows, {job: self.jobs[job] for job in job_ids})

    def launch(self, spec: BlockSpec) -> str:
        job = str(len(self.jobs))
        self.jobs[job] = BlockStatus(BlockState.RUNNING, NODES, time.time() + spec.seconds)
        self.blocks = spec.block
        return job

    def cancel(self, job_ids: Sequence[str]) -> None:
        for job in job_ids:
            self.jobs[job] = BlockStatus(BlockState.CANCELLED, NODES, None)

    def find_jobs(self, prefix: str) -> dict[str, str]:
        return {}


class _Site:
    """A driver with an idle batch system and slots that the test controls."""

    def __init__(self, directory: Path) -> None:
        self.cert_dir = curvezmq.create_certificates(directory)
        self.server = SlotServer(self.cert_dir, (55000, 56000), ("127.0.0.1",))
        self.source = _Idle()
        self.failures: list[Exception] = []
        self.numbers = itertools.count(1)
        submitter = JobSubmitter(
            self.source,
            self.source.launch,
            lambda item: self.driver.post(item),  # noqa: PLW0108 - the driver is created after the job submitter
            interval=0.1,
            submissions_per_minute=1000,
            max_refusals=5,
            job_prefix="x",
        )
        planner = replace(
            PlannerSettings().in_seconds(),
            startup=0.1,
            min_useful=0.1,
            closing_margin=0.1,
            max_walltime=3600,
            idle_timeout=600,
            settle=0.01,
        )
        self.driver = ControlLoop(
            policy=resolve_policy("equal-share"),
            planner_settings=planner,
            server=self.server,
            submitter=submitter,
            journal=Journal(directory / "journal.sqlite"),
            shared_settings=SharedSettings(
                SessionOptions("fuzz", directory), limits=Limits(peer_timeout=2.0, max_restarts=1000)
            ),
            slots_per_node=2,
            outdated=10.0,
            heartbeat_timeout=60.0,
            submit_slot=lambda _token: None,
            fail_all=self.failures.append,
            clock=time.time,
        )
        self.submitter = submitter
        self.driver.start()
        submitter.start()

    def train(self, name: str) -> Future[Any]:
        future: Future[Any] = Future()
        request = TrainingRequest(SessionOptions(name), 1, 1, ScalingCurve.default(), samples=1000)
        self.driver.post(Training(request, b"function", future))
        return future

    def compute(self) -> Future[Any]:
        future: Future[Any] = Future()
        self.driver.post(Task(next(self.numbers), b"function", future))
        return future

    def lose(self, token: str) -> None:
        self.driver.post(SlotTaskEnded(token, RuntimeError("gone")))

    def close(self) -> None:
        self.driver.stop(10)
        self.submitter.close(10)


class _HonestSlot:
    """Finishes every training job that is assigned to it, after one progress report."""

    def __init__(self, site: _Site, node: str, *, forgets: bool = False) -> None:
        self._site = site
        self._forgets = forgets
        self._run: int | None = None
        self._task: int | None = None
        self.token = f"honest-{next(site.numbers)}"
        self._channel = Channel(
            ["127.0.0.1"],
            site.server.port,
            site.cert_dir,
            f"{node}/{self.token}",
            handle=self._handle,
            on_lost=lambda: None,
            heartbeat=self._heartbeat,
            beat=0.05,
            heartbeat_timeout=60.0,
        )
        self._channel.start()
        self._channel.send(Hello(self.token, node, site.source.blocks, 1))

    def _heartbeat(self) -> SlotHeartbeat:
        return SlotHeartbeat(run=self._run, task=self._task)

    def _handle(self, message: ToSlot) -> None:
        if self._forgets:
            return
        if isinstance(message, StartTask):
            self._task = message.task
            self._channel.send(TaskEnded(message.task, failed=False, payload=serialize("done")))
            self._task = None
        elif isinstance(message, StartRun):
            self._run = message.run
            progress = Progress(step=1, samples=10, samples_total=1000)
            self._channel.send(RunReport(message.training, message.run, progress))
            first = message.place is not None and message.place.rank == 0
            payload = serialize("done") if first else b""
            self._channel.send(RunEnded(message.training, message.run, RunFinished(progress), payload))
            self._run = None

    def leave(self) -> None:
        self._channel.close(5)
        self._site.lose(self.token)


class _HostilePeer:
    """Has the certificates, may join as a slot, and sends the messages of the test."""

    def __init__(self, site: _Site, node: str, *, joins: bool, identity: bytes | None = None) -> None:
        self._site = site
        self.token = f"hostile-{next(site.numbers)}"
        self._context = curvezmq.ClientContext(site.cert_dir)
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.setsockopt(zmq.IDENTITY, identity or f"{node}/{self.token}".encode())
        self._socket.connect(f"tcp://127.0.0.1:{site.server.port}")
        if joins:
            self.send(encode(Envelope(Hello(self.token, node, site.source.blocks, 1))))
            assert self._socket.poll(20_000), "welcome"

    def send(self, frames: list[bytes]) -> None:
        with suppress(zmq.Again):
            self._socket.send_multipart(frames or [b""], zmq.NOBLOCK)

    def read(self) -> None:
        while self._socket.poll(0):
            self._socket.recv_multipart()

    def leave(self) -> None:
        self._context.destroy()
        self._site.lose(self.token)


# The messages.

KNOWN = {**TO_DRIVER, **by_type(*FusionKind.to_driver)}

NUMBERS = st.one_of(
    st.integers(-2, 40),
    st.sampled_from([2**53, 10**400, -(10**30), 1e300]),
    st.floats(),
)
WORDS = st.one_of(
    st.sampled_from(["t", "bad/1", "bad/2", "bad", "progress", "ready", "run_paused", "", "x" * 2000, "\ud800", "\n"]),
    st.text(max_size=5),
    st.sampled_from([reason.value for reason in PauseReason]),
)
ANYTHING = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, WORDS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(WORDS, inner, max_size=3)),
    max_leaves=6,
)
RANKS = st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=2), max_size=2)
PROGRESS = st.builds(
    lambda step, samples, in_place: {"type": "progress", "step": step, "samples": samples, "in_place": in_place},
    st.integers(0, 9),
    st.integers(0, 2000),
    st.booleans(),
)
GENERATIONS = st.integers(0, 60)
REPORTS = st.one_of(
    PROGRESS,
    st.just({"type": "ready"}),
    st.builds(
        lambda number, ranks: {"type": "group_failed", "generation": number, "reason": "x", "unreachable": ranks},
        GENERATIONS,
        RANKS,
    ),
    st.builds(lambda n: {"type": "joined", "generation": n, "paused": 0.1, "transferred": 0}, GENERATIONS),
)
ENDS = st.one_of(
    st.builds(lambda progress: {"type": "run_finished", "progress": progress}, PROGRESS),
    st.builds(lambda reason: {"type": "run_paused", "reason": reason.value}, st.sampled_from(PauseReason)),
    st.just({"type": "run_failed"}),
    st.builds(
        lambda number, ranks: {"type": "peers_failed", "generation": number, "reason": "x", "unreachable": ranks},
        GENERATIONS,
        RANKS,
    ),
    st.just({"type": "storage_failed", "reason": "full", "condition": "full"}),
)
PLAUSIBLE: dict[str, Any] = {
    "v": st.just(VERSION),
    "training": st.just("bad"),
    "run": st.integers(0, 60),
    "report": REPORTS,
    "end": ENDS,
    "task": st.integers(0, 10),
    "failed": st.booleans(),
    "operation": st.sampled_from(["set", "get", "add", "check", "delete"]),
    "group": GENERATIONS.map(lambda number: f"bad/{number}"),
    "keys": st.lists(st.sampled_from(["a", "b"]), min_size=1, max_size=2),
    "gone": st.booleans(),
    "n": st.integers(0, 3),
    "seen": st.integers(0, 10**6),
}


@st.composite
def shaped(draw: st.DrawFn) -> list[bytes]:
    """Draw a message of a known type whose fields are mostly present and mostly plausible."""
    kind = draw(st.sampled_from(sorted(KNOWN)))
    header: dict[str, Any] = {"type": kind}
    names = [field.name for field in fields(KNOWN[kind]) if field.name != "payload"]
    for name in ["v", *names, *draw(st.sampled_from([[], ["n"], ["seen"], ["n", "seen"]]))]:
        how = draw(st.sampled_from(["plausible"] * 8 + ["anything", "missing"]))
        if how != "missing":
            header[name] = draw(ANYTHING if how == "anything" else PLAUSIBLE.get(name, st.integers(0, 9)))
    return [
        json.dumps(header).encode(),
        draw(st.sampled_from([b"", b"nonsense", serialize(3), serialize(KeyError("x"))])),
    ]


FRAMES = st.one_of(
    shaped(),
    shaped(),
    shaped(),
    st.lists(st.binary(max_size=20), max_size=4),
    ANYTHING.map(lambda value: [json.dumps(value).encode(), b""]),
)
SENDERS = ("member", "other member", "half a node", "stranger", "nameless")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Site]:
    site = _Site(tmp_path_factory.mktemp("site"))
    yield site
    site.close()


def until(condition: Any, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@settings(
    max_examples=25,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(said=st.lists(st.tuples(st.sampled_from(SENDERS), FRAMES), min_size=1, max_size=40))
def test_whatever_peers_send_the_driver_lives_and_the_next_training_finishes(
    site: _Site, said: list[tuple[str, list[bytes]]]
) -> None:
    """A training job and tasks run on the hostile slots; these leave, and regular ones take their place."""
    futures = [site.train("bad"), site.compute(), site.compute()]
    until(lambda: hasattr(site.source, "blocks"))
    peers = {
        "member": _HostilePeer(site, "n0", joins=True),
        "other member": _HostilePeer(site, "n0", joins=True),
        "half a node": _HostilePeer(site, "n1", joins=True),
        "stranger": _HostilePeer(site, "n1", joins=False),
        "nameless": _HostilePeer(site, "n1", joins=False, identity=b"\xff\xfe" + bytes([next(site.numbers) % 256])),
    }
    for sender, frames in said:
        peers[sender].send(frames)
        peers[sender].read()
    honest = []
    try:
        for peer in peers.values():
            peer.leave()
        honest = [_HonestSlot(site, node) for node in ("n0", "n0", "n1", "n1")]
        futures.append(site.train("good"))
        assert futures[-1].result(60) == "done"
        for future in futures:
            future.exception(60)
    finally:
        for slot in honest:
            slot.leave()
    assert site.driver.is_alive()
    assert not site.failures
    assert threading.active_count() < 60


def joined(site: _Site, slots: list[_HonestSlot]) -> set[str]:
    return {slot.token for slot in site.driver._registry.slots.copy().values()} & {slot.token for slot in slots}


@pytest.mark.parametrize("what", ["train", "compute"])
def test_a_slot_that_does_not_do_what_it_was_ordered_to_is_given_up(site: _Site, what: str) -> None:
    """It is alive, but its heartbeats report no work: the command, or the report of its end, was lost."""
    future = site.train("forgotten") if what == "train" else site.compute()
    until(lambda: hasattr(site.source, "blocks"))
    forgetful = [_HonestSlot(site, node, forgets=True) for node in ("n0", "n0")]
    until(lambda: len(joined(site, forgetful)) == 2)
    until(lambda: len(joined(site, forgetful)) < 2)
    for slot in forgetful:
        slot.leave()
    honest = [_HonestSlot(site, node) for node in ("n0", "n0")]
    try:
        future.exception(60)
    finally:
        for slot in honest:
            slot.leave()
