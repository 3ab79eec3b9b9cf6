"""The driver at a site's size: a thousand nodes of a real Slurm, a hundred training jobs, and what goes wrong there.

The driver is the real one in its own process, with everything that it has: executor, planner with HiGHS, journal,
control channel, HTEX's interchange. Its blocks are real jobs of a Slurm on the loopback. Their slots are light
(`_light_slots.py`): they speak the protocol and do not train, so that a thousand of them fit on one machine. A main
queue occupies all nodes at first and frees them in holes of 1 to 200 nodes; the nodes for which larger jobs wait stay
occupied.

1. All idle nodes are taken, in blocks of up to 200 nodes, and train.
2. Nothing happens for a while: what the driver costs, and whether files, descriptors, threads and memory are flat.
3. A member of the training job with most nodes dies: the others form the next group.
4. Nodes fail one after the other; a switch cuts off 64 nodes for longer than the heartbeat timeout; a job of the main
   queue preempts the largest block; all connections break at once.
5. The driver is killed, and another one continues from the checkpoints.
6. The training jobs run out of samples; all futures resolve.
7. ``freetrain status``, and with 2,000 jobs pending ``freetrain windows`` and ``freetrain plan``; replay of such a log.

`lost` counts training jobs that failed or did not end, and slots that the driver dropped although their node was well.
Pauses are the times in which the control loop takes no message of a slot: on a busy machine the processor time in them
is meaningful, the wall time is not. ``--direct`` uses the embedded cluster in the place of Slurm.
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from _report import report
from _slurm_main_queue import count_rpcs

from freetrain_parsl.cluster.client import EmbeddedCluster
from freetrain_parsl.errors import BatchSystemError
from freetrain_parsl.executor.journal import read_journal
from freetrain_parsl.protocol import journal as record
from freetrain_parsl.report.output import write_output
from freetrain_parsl.report.projection.run import RunState
from freetrain_parsl.windows.hostlist import expand_hosts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

sys.path.insert(0, str(Path(__file__).parents[1]))  # the tests' Slurm

from tests.support.slurm.loopback import LoopbackPartition, LoopbackSlurm

HERE = Path(__file__).parent
FREETRAIN = str(Path(sys.executable).with_name("freetrain"))
BLOCK = 200  # most nodes of a block
SWITCH = 64  # nodes behind a switch
GRACE = 10  # seconds from the signal to a preempted block to its end
TIMEOUT = 10.0  # the driver's heartbeat timeout, seconds
PENDING = 2000
_PATIENCE = 120.0  # seconds in which all nodes train
PARTITIONS = (
    LoopbackPartition("main", tier=100, default=True),
    LoopbackPartition("preemptible", preempt="cancel", grace=GRACE),
)


class Site:
    """The machine: its main queue, and what the benchmark does to nodes."""

    def __init__(self, options: argparse.Namespace, files: Path, stack: ExitStack) -> None:
        self.files = files
        self.slots: int = options.slots
        self.nodes = self.slots if options.direct else self.slots + max(1, self.slots // 5)
        self.environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent)])}
        self.slurm: LoopbackSlurm | None = None
        self.cluster: EmbeddedCluster | None = None
        self.started = time.time()
        self._down: list[str] = []
        self._random = random.Random(options.seed)
        for name in ("silent", "dead", "checkpoints", "roots", "main"):
            (files / name).mkdir(parents=True)
        if options.direct:
            self.cluster = EmbeddedCluster(files / "cluster", nodes=self.nodes)
            self.cluster.start()
            stack.callback(self.cluster.stop)
            return
        self.slurm = stack.enter_context(
            LoopbackSlurm(
                nodes=self.nodes,
                cpus=1,
                partitions=PARTITIONS,
                bf_interval=5,
                slurmd_timeout=300,
                start_timeout=300.0,
            )
        )
        self.environment |= self.slurm.environment

    def occupy(self, seconds: float) -> None:
        """Occupy all nodes: some for good, with larger jobs waiting for them, the others until holes of them appear."""
        if self.slurm is None:
            return
        left = self.nodes - self.slots
        while left:
            size = min(left, self._random.randint(1, 32))
            left -= size
            self._submit(size, 3000.0, 60)
        left, number = self.slots, 0
        while left:
            size = min(left, self._random.choice((1, 2, 4, 8, 16, 32, 64, 128, BLOCK)))
            left -= size
            self._submit(size, 5.0 + self._random.uniform(0.0, seconds), 10, file=self.files / "main" / str(number))
            number += 1
        for _ in range(20):
            self._submit(self.slots + self._random.randint(1, self.nodes - self.slots), 600.0, 15)

    def _submit(self, size: int, seconds: float, minutes: int, file: Path | None = None, *options: str) -> None:
        assert self.slurm is not None
        ended = "" if file is None else f"; echo $(date +%s.%N) $SLURM_JOB_NODELIST > {file}"
        limits = ("--partition=main", "--exclusive", f"--nodes={size}", f"--time={minutes}", "--no-requeue")
        self.slurm.submit(*limits, *options, command=f"sleep {seconds:.1f}{ended}")

    def idle_since(self) -> dict[str, float]:
        """Return the time from which each node is idle, as far as the main queue says."""
        since: dict[str, float] = {}
        for file in (self.files / "main").iterdir():
            words = file.read_text(encoding="ascii").split()
            if len(words) == 2:
                since |= dict.fromkeys(expand_hosts(words[1]), float(words[0]))
        return since

    def tell(self, what: str, *nodes: str) -> None:
        """Tell the slots of nodes that they are dead or cut off."""
        for node in nodes:
            (self.files / what / node).touch()

    def mend(self, what: str) -> None:
        """Undo `tell` for all nodes."""
        for file in list((self.files / what).iterdir()):
            file.unlink()

    def fail(self, node: str) -> None:
        """Let a node fail: its slot is silent at once, and Slurm ends its job when an administrator marks it down."""
        self.tell("dead", node)
        if self.slurm is not None:
            self._down.append(node)
            self.slurm.run("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=failed")

    def resume(self) -> None:
        """Repair all nodes."""
        self.mend("dead")
        for node in self._down:
            with suppress(BatchSystemError):  # it has registered again, and is not down
                assert self.slurm is not None
                self.slurm.run("scontrol", "update", f"NodeName={node}", "State=RESUME")
        self._down.clear()

    def clean(self) -> None:
        """Cancel the jobs of a driver that was killed; on Slurm they end by themselves without it."""
        if self.cluster is not None:
            time.sleep(1.5 * TIMEOUT)  # the slots save
            jobs = self.cluster.client.queue()
            self.cluster.client.cancel([name for name, job in jobs.items() if job["kind"] == "preemptible"])

    def preempt(self, nodes: Sequence[str]) -> None:
        """Let the main queue need the nodes of a block."""
        if self.slurm is not None:
            self._submit(len(nodes), 20.0, 5, None, f"--nodelist={','.join(nodes)}")
        else:
            assert self.cluster is not None
            self.cluster.client.submit(["sleep", "20"], nodes=len(nodes), walltime=_delta(60), preemptible=False)


class Driver:
    """The driver's process."""

    def __init__(self, site: Site, options: argparse.Namespace, run: str) -> None:
        self.settings = {
            "slurm": site.slurm is not None,
            "cluster": str(site.files / "cluster"),
            "block": BLOCK,
            "poll": options.poll,
            "submissions": 60,
            "files": str(site.files),
            "tag": run,
            "slots": site.slots,
            "trainings": options.trainings,
            "runs": str(site.files / run),
            "profile": options.profile and str(options.profile),
        }
        command = [sys.executable, str(HERE / "_thousand_driver.py"), json.dumps(self.settings)]
        self._log = (site.files / f"{run}.log").open("wb")
        self.process = subprocess.Popen(
            command,
            env=site.environment,
            cwd=site.files,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        told = self._answer()
        self.journal = Path(told["journal"])
        self.run_directory = self.journal.parents[1]
        self._state = RunState(self.journal)

    def ask(self, word: str) -> Any:
        """Send a word to the driver, and return its answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()
        return None if word == "stop" else self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the driver has ended, see {self._log.name!r}")
        return json.loads(line)

    def training(self) -> dict[str, tuple[str, ...]]:
        """Return the nodes on which each training job trains."""
        self._state.refresh()
        return {name: tuple(one.nodes) for name, one in self._state.trainings.items() if one.nodes}

    def records(self) -> Iterator[tuple[float, Any]]:
        """Yield the times and records of the journal."""
        for _, entry in read_journal(self.journal):
            if (found := entry.record) is not None:
                yield entry.time, found

    def stop(self) -> None:
        """End it."""
        with suppress(OSError):
            self.ask("stop")
        self.close()

    def kill(self) -> None:
        """Kill it, with HTEX's interchange and what else it has started."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        for process in [psutil.Process(self.process.pid), *children]:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        self.close()

    def close(self) -> None:
        """Wait for its end."""
        try:
            self.process.wait(90)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._log.close()


class Experiment:
    """The phases, and the figures that they give."""

    def __init__(self, site: Site, options: argparse.Namespace) -> None:
        self._site, self._options = site, options
        self._driver = Driver(site, options, "first")
        self._faulty: set[str] = set()
        self.figures: dict[str, Any] = {}
        self.costs: list[dict[str, Any]] = []

    def close(self) -> None:
        """Kill the driver."""
        if self._driver.process.poll() is None:
            self._driver.kill()

    def run(self) -> dict[str, Any]:
        """Live through all phases."""
        options, driver, found = self._options, self._driver, self.figures
        self._site.occupy(options.ramp)
        begun = time.time()
        driver.ask("submit")
        found["all_training_s"] = self._wait_until_trained(begun, "all idle nodes train", 0.99)
        self._note("growth")
        self._rpcs()
        time.sleep(options.seconds)
        steady = self._note("steady")
        found |= {
            "driver_cpu_share": steady["cpu_share"],
            "driver_rss_mb": steady["rss_mb"],
            "messages_per_second": steady["messages"] / steady["seconds"],
            "cpu_us_per_message": 1e6 * steady["loop_share"] * steady["seconds"] / max(1, steady["messages"]),
        }
        if (counts := self._rpcs()) is not None:
            found["requests_per_minute"] = counts / options.seconds * 60
        found["journal_mb_per_day"] = self._journal_growth(options.seconds)
        found["status_s"], found["status_cpu_s"] = self._time_command("status", str(driver.run_directory))
        found["regroup_200_s"], found["regroup_members"], found["regroup_paused_s"] = self._regroup()
        self._disturb()
        self._note("faults")
        found["restart_s"] = self._restart()
        self._note("restart")
        return self._finish()

    # Phases.

    def _wait_until_trained(self, since: float, what: str, share: float) -> float | None:
        """Return the seconds until then; ``None`` if it takes too long, as on a busy machine: the rest is measured."""
        wanted = share * (self._site.slots - len(list((self._site.files / "dead").iterdir())))
        nodes = 0

        def trained() -> bool:
            nonlocal nodes
            nodes = sum(map(len, self._driver.training().values()))
            return nodes >= wanted

        try:
            _wait(trained, _PATIENCE, lambda: f"{what}: {nodes} of {self._site.slots} do")
        except TimeoutError as error:
            _say(f"{error}")
            return None
        return time.time() - since

    def _note(self, phase: str) -> dict[str, Any]:
        costs: dict[str, Any] = self._driver.ask("figures")
        self.costs.append({"phase": phase, **costs})
        _say(f"{phase}: {costs}")
        return costs

    def _rpcs(self) -> int | None:
        """Return the RPCs that slurmctld has served for us since the last call."""
        if self._site.slurm is None:
            return None
        counts = count_rpcs(self._site.slurm, ())
        self._site.slurm.run("sdiag", "--reset")
        return counts["rpcs_ours"]

    def _journal_growth(self, seconds: float) -> float:
        """Return what the journal's records of the last seconds are in a day, MB."""
        since = time.time() - seconds
        size = sum(
            len(json.dumps(vars(entry), default=vars)) + 60 for at, entry in self._driver.records() if at > since
        )
        return size / seconds * 86400 / 1e6

    def _regroup(self) -> tuple[float | None, int, float | None]:
        """Let a member of the largest job die, and return the seconds until the others train, and their number."""
        training = self._driver.training()
        if not training:
            return None, 0, None
        job, nodes = max(training.items(), key=lambda item: len(item[1]))
        victim = sorted(nodes)[len(nodes) // 2]
        self._faulty.add(victim)
        begun = time.time()
        self._site.tell("dead", victim)

        def over() -> bool:
            return self._regrouped(job, victim, begun) is not None

        try:
            _wait(over, 60.0, lambda: f"{job} to continue without {victim}")
        except TimeoutError as error:
            _say(f"{error}")
            return None, len(nodes) - 1, None
        since, until, paused, members = self._regrouped(job, victim, begun) or (0.0, 0.0, 0.0, 0)
        return until - since, members, paused

    def _regrouped(self, job: str, victim: str, begun: float) -> tuple[float, float, float, int] | None:
        lost: float | None = None
        for at, entry in self._driver.records():
            if at >= begun and isinstance(entry, record.SlotLost) and entry.node == victim:
                lost = at
            if lost is not None and isinstance(entry, record.FragmentStarted) and entry.subject == job:
                return lost, at, entry.paused, len(entry.nodes)
        return None

    def _disturb(self) -> None:
        site, few = self._site, max(1, self._site.slots // 200)
        held = sorted({node for nodes in self._driver.training().values() for node in nodes})
        smallest = sorted(self._blocks().values(), key=len)
        for block in smallest[:few]:
            self._faulty.update(block)  # Slurm ends the job of a node that is down
            site.fail(block[0])
            time.sleep(1.0)
        behind = [node for node in held if node not in self._faulty][: min(SWITCH, site.slots // 4)]
        _say(f"a switch cuts off {len(behind)} nodes")
        self._faulty.update(behind)
        site.tell("silent", *behind)
        time.sleep(1.5 * TIMEOUT)
        site.mend("silent")
        largest = max(self._blocks().values(), key=len, default=())
        _say(f"the main queue preempts a block of {len(largest)} nodes")
        self._faulty.update(largest)
        self.figures["preempted_nodes"] = len(largest)
        if largest:
            site.preempt(largest)
        time.sleep(GRACE + 5.0)
        _say("all connections break")
        (site.files / "reconnect").touch()
        time.sleep(1.5 * TIMEOUT)

    def _blocks(self) -> dict[str, tuple[str, ...]]:
        """Return the blocks that run, with their nodes."""
        blocks: dict[str, tuple[str, ...]] = {}
        for _, entry in self._driver.records():
            if isinstance(entry, record.BlockStarted):
                blocks[entry.subject] = tuple(entry.nodes)
            elif isinstance(entry, record.BlockEnded):
                blocks.pop(entry.subject, None)
        return blocks

    def _restart(self) -> float | None:
        self._account()
        begun = time.time()
        _say("the driver is killed")
        self._driver.kill()
        self._site.resume()
        self._site.clean()
        self._driver = Driver(self._site, self._options, "second")
        self._driver.ask("submit")
        return self._wait_until_trained(begun, "all nodes train with the next driver", 0.8)

    def _finish(self) -> dict[str, Any]:
        (self._site.files / "finish").touch()
        errors = self._driver.ask("results")
        for name, error in errors.items():
            _say(f"{name}: {error}")
        self._faulty.clear()
        self._account()
        self.figures["lost"] = self.figures.pop("dropped_well") + len(errors)
        self._driver.stop()
        pauses = [costs for costs in self.costs if costs["phase"] != "growth"]
        return {
            "slots": self._site.slots,
            "trainings": self._options.trainings,
            **self.figures,
            "loop_pause_ms_max": max(costs["pause_ms"] for costs in self.costs),
            "loop_pause_cpu_ms_max": max(costs["pause_cpu_ms"] for costs in self.costs),
            "loop_pause_ms_steady": pauses[0]["pause_ms"],
            "phases": self.costs,
        }

    # Accounts.

    def _account(self) -> None:
        """Add what a driver's journal says: slots that it dropped, and how soon windows were used."""
        waits: list[float] = []
        idle = self._site.idle_since()
        requested: dict[str, tuple[float, set[str], set[str]]] = {}
        for at, entry in self._driver.records():
            if isinstance(entry, record.SlotLost) and not entry.planned and entry.node not in self._faulty:
                self.figures["dropped_well"] = self.figures.get("dropped_well", 0) + 1
                _say(f"dropped {entry.subject}: {entry.reason}")
            elif isinstance(entry, record.BlockStarted):
                requested[entry.subject] = at, set(entry.nodes), set(entry.nodes)
            elif isinstance(entry, record.FragmentStarted):
                for block, (since, nodes, missing) in list(requested.items()):
                    missing.difference_update(entry.nodes)
                    if not missing:
                        del requested[block]
                        waits.append(at - max((idle.get(node, self._site.started) for node in nodes), default=since))
        self.figures.setdefault("dropped_well", 0)
        if waits and "window_to_training_s_median" not in self.figures:
            self.figures["window_to_training_s_median"] = statistics.median(waits)
            self.figures["window_to_training_s_max"] = max(waits)
            self.figures["blocks"] = len(waits)

    def _time_command(self, *arguments: str) -> tuple[float, float]:
        return time_command(self._site, *arguments)


def time_command(site: Site, *arguments: str) -> tuple[float, float]:
    """Run a command of ours, and return its seconds, and those of the processor."""
    begun, before = time.monotonic(), os.times()
    done = subprocess.run(
        [FREETRAIN, *arguments], env=site.environment, capture_output=True, text=True, check=False, timeout=300
    )
    after = os.times()
    if done.returncode:
        _say(f"freetrain {' '.join(arguments)}: {done.stderr.strip() or done.stdout.strip()}")
        raise RuntimeError(f"freetrain {arguments[0]} failed")
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return time.monotonic() - begun, used


def look_at_queue(site: Site, pending: int) -> dict[str, float]:
    """Fill the queue, and time what looks at it."""
    assert site.slurm is not None
    sizes = random.Random(7)
    lines = [
        f"sbatch --output=/dev/null --partition=main --exclusive --nodes={sizes.randint(site.slots + 1, site.nodes)}"
        f" --time={sizes.randint(2, 600)} --wrap='sleep 60'"
        for _ in range(pending)
    ]
    script = site.files / "fill.sh"
    script.write_text("\n".join(lines) + "\n", encoding="ascii")
    site.slurm.run("sh", str(script), timeout=300)
    figures: dict[str, float] = {"pending_jobs": pending}
    for command in ("windows", "plan"):
        seconds, used = time_command(site, command, "--system=slurm", "--partition=preemptible")
        figures[f"{command}_s"], figures[f"{command}_cpu_s"] = seconds, used
    log = site.files / "queue.swf"
    log.write_text(_swf(pending, site.nodes, sizes), encoding="ascii")
    figures["replay_s"], figures["replay_cpu_s"] = time_command(site, "replay", str(log), "--trainers=hpo:20")
    return figures


def _swf(jobs: int, nodes: int, sizes: random.Random) -> str:
    """Return a job log in the standard workload format, of jobs that wait for each other."""
    lines = [f"; MaxNodes: {nodes}", f"; MaxProcs: {nodes}"]
    submitted, started, free = 0, 0, nodes
    running: list[tuple[int, int]] = []  # end, nodes
    for number in range(1, jobs + 1):
        submitted += sizes.randint(0, 120)
        size, ran = sizes.randint(1, nodes // 4), sizes.randint(60, 7200)
        started = max(started, submitted)  # first come, first served
        while running and (running[0][0] <= started or free < size):
            ended, given = heapq.heappop(running)
            started, free = max(started, ended), free + given
        heapq.heappush(running, (started + ran, size))
        free -= size
        lines.append(
            f"{number} {submitted} {started - submitted} {ran} {size} -1 -1 {size} {2 * ran} -1 1 1 1 1 1 1 -1 -1"
        )
    return "\n".join(lines) + "\n"


def _delta(seconds: float) -> Any:
    from datetime import timedelta

    return timedelta(seconds=seconds)


def _wait(reached: Callable[[], bool], seconds: float, what: Callable[[], str]) -> None:
    until = time.monotonic() + seconds
    while not reached():
        if time.monotonic() > until:
            raise TimeoutError(f"waited {seconds:g} s for {what()}")
        time.sleep(0.5)


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", type=int, default=1000, metavar="N", help="light slots, one a node")
    parser.add_argument("--trainings", type=int, metavar="N", help="training jobs; default: a tenth of the slots")
    parser.add_argument("--seconds", type=float, default=60.0, metavar="S", help="in which nothing happens")
    parser.add_argument("--ramp", type=float, default=40.0, metavar="S", help="in which the holes appear")
    parser.add_argument("--poll", type=float, default=15.0, metavar="S", help="between looks at the batch system")
    parser.add_argument("--seed", type=int, default=1, help="of the main queue")
    parser.add_argument("--direct", action="store_true", help="on the embedded cluster, without Slurm")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="write a profile of the control loop here")
    parser.add_argument("--logs", type=Path, metavar="DIR", help="keep the files of the run here")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    options = parser.parse_args()
    options.trainings = options.trainings or max(2, options.slots // 10)
    if not options.direct and (missing := LoopbackSlurm.missing()) is not None:
        parser.error(f"{missing}; or --direct")
    files = options.logs or Path(tempfile.mkdtemp(prefix="ft-thousand-"))
    with ExitStack() as stack:
        if options.logs is None:
            stack.callback(shutil.rmtree, files, ignore_errors=True)
        begun = time.monotonic()
        site = Site(options, files, stack)
        _say(f"{site.nodes} nodes after {time.monotonic() - begun:.0f} s")
        experiment = Experiment(site, options)
        stack.callback(experiment.close)
        figures = experiment.run()
        if site.slurm is not None:
            figures |= look_at_queue(site, 2 * options.slots if options.slots < 1000 else PENDING)
        figures["seconds"] = time.monotonic() - begun
        if options.json is not None:
            write_output(options.json, json.dumps(figures, indent=2) + "\n")
        del figures["phases"]
        rows = [{"figure": name, "value": value} for name, value in figures.items()]
        report("The driver at a site's size", rows, ["pyzmq", "highspy", "parsl", "freetrain-parsl"])


if __name__ == "__main__":
    main()
