"""The driver of `thousand_nodes.py` in its own process, with what it costs: the real executor, whose slots are light.

It starts, prints its process and its journal, and answers each line that it reads, all in lines of JSON: ``submit``
submits the training jobs, ``figures`` returns what it has cost since the last time, ``results`` waits for all of them
and returns how they ended, ``stop`` ends it.
"""

from __future__ import annotations

import cProfile
import gc
import json
import os
import shlex
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import parsl
import psutil
from parsl.config import Config
from parsl.executors.high_throughput.errors import WorkerLost
from parsl.launchers.base import Launcher
from parsl.providers import SlurmProvider
from parsl.serialize import serialize

from freetrain_parsl import (
    EmbeddedClusterProvider,
    FreeTrainExecutor,
    PlannerSettings,
    RateLimits,
    training_app,
)
from freetrain_parsl.executor.driver.loop import ControlLoop
from freetrain_parsl.executor.environment import describe_environment
from freetrain_parsl.executor.htex.executor import PlannedHtex
from freetrain_parsl.planning.solvers import highs
from freetrain_parsl.windows.commands import COMMAND_COUNTS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

LARGE, SMALL = 0.2, 12  # largest number of nodes: of one training job, as a share of the nodes, and of the others
_PATIENCE = 240.0  # seconds for the results


class Pauses:
    """The times in which the control loop takes no message of a slot, though some may wait; and its parts."""

    def __init__(self, loop: ControlLoop) -> None:
        server: Any = loop._server  # noqa: SLF001 - no other way
        poller = server._poller  # noqa: SLF001 - the same
        self._poll = poller.poll
        self._decoded = server._decoded  # noqa: SLF001 - the same
        self._returned: tuple[float, float] | None = None
        self.reset()
        poller.poll = self._timed_poll
        server._decoded = self._timed_decoded  # noqa: SLF001 - the same
        for part, owner, name in (
            ("planner", loop._planner, "advance"),  # noqa: SLF001
            ("jobs", loop._manager, "advance"),  # noqa: SLF001
            ("survey", loop, "_on_survey"),
            ("actions", loop, "_act"),
            ("journal", loop._journal, "commit"),  # noqa: SLF001
            ("blocks", loop._blocks, "leave_in_time"),  # noqa: SLF001
            ("requests", loop._slots, "request_missing"),  # noqa: SLF001
            ("solver", highs, "_run_once"),  # within the planner
        ):
            setattr(owner, name, self._timed(part, getattr(owner, name)))
        self._collecting = 0.0
        gc.callbacks.append(self._note_collection)

    def reset(self) -> None:
        """Begin anew."""
        self.longest = self.longest_on_cpu = 0.0
        self.loop_seconds = 0.0
        self.messages = 0
        self.parts: dict[str, list[float]] = {}  # name -> longest, sum; seconds of processor time

    def _timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            begun = time.thread_time()
            try:
                return function(*arguments, **named)
            finally:
                self._note_part(part, time.thread_time() - begun)

        return timed

    def _note_collection(self, phase: str, _info: dict[str, int]) -> None:
        """Note how long Python's cyclic garbage collector stops all threads."""
        if phase == "start":
            self._collecting = time.thread_time()
        else:
            self._note_part("collections", time.thread_time() - self._collecting)

    def _note_part(self, part: str, used: float) -> None:
        longest, total = self.parts.get(part, (0.0, 0.0))
        self.parts[part] = [max(longest, used), total + used]

    def _timed_poll(self, timeout: int) -> Any:
        self._note()
        ready = self._poll(timeout)
        self._returned = time.monotonic(), time.thread_time()
        return ready

    def _timed_decoded(self, frames: list[bytes]) -> Any:
        self.messages += 1
        self._note()
        return self._decoded(frames)

    def _note(self) -> None:
        now = time.monotonic(), time.thread_time()
        if self._returned is not None:
            elapsed, used = now[0] - self._returned[0], now[1] - self._returned[1]
            self.longest, self.longest_on_cpu = max(self.longest, elapsed), max(self.longest_on_cpu, used)
            self.loop_seconds += used
        self._returned = now


class OneProcess(Launcher):
    """Starts one process for all nodes of a block, on the first."""

    def __call__(self, command: str, *_settings: object) -> str:
        """Return the command as it is."""
        return command


class LightExecutor(FreeTrainExecutor):
    """An executor whose blocks run `_light_slots.py` in the place of HTEX's worker pool; all else is the product's."""

    files: Path

    def initialize_scaling(self) -> None:
        """Compose the launch command of the blocks."""
        PlannedHtex.initialize_scaling(self)
        words = [sys.executable, str(Path(__file__).parent / "_light_slots.py"), f"--files={self.files}"]
        command = f"{shlex.join(words)} --port={self.worker_port} --cert_dir={self.cert_dir} --block_id={{block_id}}"
        if isinstance(self.provider, EmbeddedClusterProvider):  # it runs the command on each node
            command = f"if [ $FREETRAIN_CLUSTER_NODE_RANK != 0 ]; then exec sleep 100000; fi; exec {command}"
        self._commands = {"": command}

    def start(self) -> None:
        """Start, and tell the slots what HTEX's tasks would."""
        super().start()
        settings = self._slot_settings
        assert settings is not None
        told = {
            "port": settings.port,
            "beat": settings.beat,
            "heartbeat_timeout": settings.heartbeat_timeout,
            "grace": settings.grace,
            "versions": describe_environment(),
            "value": serialize(None).hex(),
            "lost": serialize(WorkerLost(0, "localhost")).hex(),
        }
        part = self.files / "driver.part"
        part.write_text(json.dumps(told), encoding="ascii")
        part.rename(self.files / "driver.json")

    @property
    def loop(self) -> ControlLoop:
        """The control loop."""
        assert self._driver is not None
        return self._driver


def make_executor(options: dict[str, Any]) -> LightExecutor:
    """Make the executor from the settings of the benchmark."""
    here = Path(__file__).parents[1]
    if options["slurm"]:
        provider: Any = SlurmProvider(
            partition="preemptible",
            launcher=OneProcess(),
            worker_init=f"export PYTHONPATH={here}",
            cmd_timeout=30,
        )
    else:
        provider = EmbeddedClusterProvider(cluster=options["cluster"])
    executor = LightExecutor(
        provider=provider,
        address="127.0.0.1",
        planner=PlannerSettings(
            max_nodes_per_block=options["block"],
            max_pending_blocks=32,
            startup=timedelta(seconds=5),
            join_timeout=timedelta(seconds=60),
        ),
        rate_limits=RateLimits(
            poll_interval=timedelta(seconds=options["poll"]), submissions_per_minute=options["submissions"]
        ),
        grace=timedelta(seconds=5),
        node_image="off",
        checkpoint_dir=Path(options["files"]) / "roots",
        job_tag=options["tag"],
    )
    executor.files = Path(options["files"])
    return executor


def submit(options: dict[str, Any]) -> list[Future[Any]]:
    """Submit one large training job and many small ones."""

    def train(session: Any) -> None:  # light slots do not call it
        session.step()

    large = max(2, round(LARGE * options["slots"]))
    futures = []
    for number in range(options["trainings"]):
        most = large if number == 0 else SMALL
        # The large one scales perfectly, so that it gets all the nodes that it may have: the group of `_regroup`.
        rates = {n: n ** (1.0 if number == 0 else 0.95) for n in (1, max(2, most // 2), most)}
        app = training_app(max_nodes=most, scaling=rates, fuse=False, priority=5.0 if number == 0 else 1.0)(train)
        futures.append(app.options(name=f"job-{number:03}")())
    return futures


class Costs:
    """What this process has cost since the last time."""

    def __init__(self, executor: LightExecutor) -> None:
        self._executor = executor
        self._process = psutil.Process()
        self._pauses = Pauses(executor.loop)
        self._since = time.monotonic(), time.process_time()

    def figures(self) -> dict[str, Any]:
        """Return the figures, and begin anew."""
        begun, used = self._since
        self._since = time.monotonic(), time.process_time()
        pauses, seconds = self._pauses, self._since[0] - begun
        found = {
            "seconds": seconds,
            "cpu_share": (self._since[1] - used) / seconds,
            "messages": pauses.messages,
            "loop_share": pauses.loop_seconds / seconds,
            "rss_mb": self._process.memory_info().rss / 1e6,
            "pause_ms": 1000 * pauses.longest,
            "pause_cpu_ms": 1000 * pauses.longest_on_cpu,
            "parts_ms": {name: [1000 * each for each in seconds] for name, seconds in pauses.parts.items()},
            "descriptors": self._process.num_fds(),
            "threads": threading.active_count(),
            "journal_bytes": sum(
                file.stat().st_size for file in self._executor.journal_path.parent.glob("journal.sqlite*")
            ),
            "slots": len(self._executor.loop._registry.slots),  # noqa: SLF001
            "requests": dict(COMMAND_COUNTS._counts),  # noqa: SLF001 - since the journal has recorded them
        }
        pauses.reset()
        return found


def results(futures: list[Future[Any]]) -> dict[str, str]:
    """Return the errors of the training jobs that did not end with their value."""
    until = time.monotonic() + _PATIENCE
    errors = {}
    for number, future in enumerate(futures):
        try:
            if future.result(max(0.0, until - time.monotonic())) is not None:
                errors[f"job-{number:03}"] = "another value"
        except Exception as error:  # noqa: BLE001, PERF203 - whatever it is, it is reported
            errors[f"job-{number:03}"] = f"{type(error).__name__}: {error}"[:300]
    return errors


def profile_loop(file: str) -> None:
    """Let the control loop's thread write a profile of its processor time at its end."""
    run = ControlLoop.run

    def profiled(loop: ControlLoop) -> None:
        profile = cProfile.Profile(time.thread_time)
        try:
            profile.runcall(run, loop)
        finally:
            profile.dump_stats(file)

    ControlLoop.run = profiled  # type: ignore[method-assign]


def main(arguments: Sequence[str]) -> int:
    """Serve one run; the first argument contains the settings as JSON."""
    options = json.loads(arguments[0])
    with suppress(PermissionError):  # the daemons of the nodes do not share the processors of a login node
        os.setpriority(os.PRIO_PROCESS, 0, -10)
    if options.get("profile"):
        profile_loop(options["profile"])
    executor = make_executor(options)
    futures: list[Future[Any]] = []
    config = Config(executors=[executor], run_dir=options["runs"], strategy="none", initialize_logging=False)
    with parsl.load(config):
        costs = Costs(executor)
        print(json.dumps({"pid": os.getpid(), "journal": str(executor.journal_path)}), flush=True)
        for line in sys.stdin:
            answer: Any = None
            match line.strip():
                case "submit":
                    futures = submit(options)
                case "figures":
                    answer = costs.figures()
                case "results":
                    answer = results(futures)
                case "stop":
                    break
            print(json.dumps(answer), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
