"""What the driver costs a login node while training jobs run: processor time, memory, iterations of its control loop.

Use ``--slots N…`` for other sizes, ``--json FILE`` to save the rows. The control loop, the control channel with
CurveZMQ and the journal are real. The slots are threads of another process with a slot's channel: they send heartbeats
at the default rate, and report a step when they are started. Each training job has sixteen slots, on as many nodes. No
batch system is queried, and nothing changes during the measurement, in which the planner only looks for changes. Memory
excludes what a script imports beside FreeTrain.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from _report import report
from parsl import curvezmq

from freetrain_parsl.executor.batch.submitter import JobSubmitter
from freetrain_parsl.executor.driver.loop import ControlLoop
from freetrain_parsl.executor.driver.slot_registry import Block
from freetrain_parsl.executor.driver.slot_server import SlotServer
from freetrain_parsl.executor.jobs.request import SharedSettings, Training, TrainingRequest
from freetrain_parsl.executor.journal import Journal
from freetrain_parsl.executor.slot.channel import Channel
from freetrain_parsl.planning.curves.scaling import ScalingCurve
from freetrain_parsl.planning.policies import resolve_policy
from freetrain_parsl.planning.settings import PlannerSettings
from freetrain_parsl.protocol.messages import Hello, RunReport, SlotHeartbeat, StartRun
from freetrain_parsl.protocol.options import SessionOptions
from freetrain_parsl.protocol.reports import Progress

if TYPE_CHECKING:
    from multiprocessing.synchronize import Event

    from freetrain_parsl.protocol.messages import ToSlot

SLOTS_OF_A_TRAINING = 16
SETTLE = 8.0  # seconds after which all training jobs run


class IdleSubmitter(JobSubmitter):
    """Stands for a batch system of which nothing is requested."""

    def __init__(self) -> None:
        """Have no connection to a batch system."""

    def rest(self, resting: bool) -> None:  # noqa: FBT001 - as in the base class
        """Do nothing."""

    def works(self) -> None:
        """Do nothing."""


class CountingLoop(ControlLoop):
    """Counts its iterations."""

    iterations = 0

    def _turn(self) -> None:
        self.iterations += 1
        super()._turn()


class Slot:
    """A slot that reports one step when it is started."""

    def __init__(self, number: int, port: int, certificates: str) -> None:
        self._run: int | None = None
        self._channel = Channel(
            ["127.0.0.1"],
            port,
            certificates,
            f"n{number}/0/x",
            handle=self._handle,
            on_lost=lambda: None,
            heartbeat=lambda: SlotHeartbeat(run=self._run),
            beat=1.0,
            heartbeat_timeout=1e6,
        )
        self._channel.start()
        self._channel.send(Hello(f"token{number}", f"n{number}", "block", os.getpid()))

    def _handle(self, message: ToSlot) -> None:
        if isinstance(message, StartRun):
            self._run = message.run
            if message.place is not None and message.place.rank == 0:
                progress = Progress(step=1, samples=1, samples_total=10**9, in_place=True)
                self._channel.send(RunReport(message.training, message.run, progress))


def run_slots(slots: int, port: int, certificates: str, over: Event) -> None:
    """Keep slots connected until the end of the measurement."""
    threading.stack_size(1 << 20)
    for number in range(slots):
        Slot(number, port, certificates)  # referenced by its channel's thread
    over.wait()
    os._exit(0)  # their threads send heartbeats


def measure(slots: int, seconds: float, directory: Path) -> dict[str, Any]:
    """Let training jobs run on this many nodes of one slot; return a row."""
    certificates = str(curvezmq.create_certificates(directory))
    server = SlotServer(certificates, (54000, 56000), ["127.0.0.1"])
    loop = CountingLoop(
        policy=resolve_policy("milp"),
        planner_settings=PlannerSettings().in_seconds(),
        server=server,
        submitter=IdleSubmitter(),
        journal=Journal(directory / "journal.sqlite"),
        shared_settings=SharedSettings(SessionOptions("benchmark", directory / "checkpoints")),
        slots_per_node=1,
        outdated=60.0,
        heartbeat_timeout=60.0,
        submit_slot=lambda _token: None,
        fail_all=lambda _error: None,
        clock=time.time,
    )
    nodes = tuple(f"n{number}" for number in range(slots))
    loop._registry.blocks["block"] = block = Block("block", nodes, 1e5, None)  # noqa: SLF001 - without a batch system
    block.start(time.time(), nodes, None)
    context = multiprocessing.get_context("spawn")
    over = context.Event()
    others = context.Process(target=run_slots, args=(slots, server.port, certificates, over))
    others.start()
    loop.start()
    curve = ScalingCurve({count: float(count) for count in range(1, SLOTS_OF_A_TRAINING + 1)})
    trainings = max(1, slots // SLOTS_OF_A_TRAINING)
    for number in range(trainings):
        request = TrainingRequest(
            SessionOptions(f"t{number}", directory / "checkpoints"), 1, SLOTS_OF_A_TRAINING, curve, samples=10**9
        )
        loop.post(Training(request, b"", Future()))
    until = time.monotonic() + 120
    while sum(slot.busy is not None for slot in list(loop._registry.slots.values())) < slots:  # noqa: SLF001
        if time.monotonic() > until:
            raise SystemExit(f"only {len(loop._registry.slots)} of {slots} slots joined")  # noqa: SLF001
        time.sleep(0.5)
    time.sleep(SETTLE)
    before = loop.iterations
    begun, used = time.monotonic(), time.process_time()
    time.sleep(seconds)
    elapsed = time.monotonic() - begun
    row = {
        "slots": slots,
        "trainings": trainings,
        "percent of a core": 100 * (time.process_time() - used) / elapsed,
        "iterations a second": (loop.iterations - before) / elapsed,
        "memory in MB": psutil.Process().memory_info().rss / 1e6,
    }
    over.set()
    loop.stop(10)
    others.join()
    return row


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", type=int, nargs="+", default=[16, 64, 256], metavar="N")
    parser.add_argument("--seconds", type=float, default=20.0, metavar="S", help="of each measurement")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows here")
    args = parser.parse_args()
    rows = []
    for slots in args.slots:
        with tempfile.TemporaryDirectory() as directory:
            rows.append(measure(slots, args.seconds, Path(directory)))
    report("The driver on a login node", rows, ["pyzmq", "highspy", "freetrain-parsl"], args.json)


if __name__ == "__main__":
    main()
