"""What comparing the replicas adds to a step.

Groups of processes on this machine, one thread each, train a multilayer perceptron with plain SGD through gloo: 32
samples per process and step, or 2 for the largest one, whose steps would take minutes otherwise. Within one run, steps
with the comparison and steps without it take turns, so that both see the same load.

``step_ms`` is the median step without it. ``compared_ms`` is what the first process spends in the comparison: the mean
over the 16 turns, in which all parameters are compared, of each turn's median. ``overhead`` is ``1 + compared / step``.
``on_off`` is ``1 + d / step`` with the median ``d`` of the differences between neighbouring steps with and without it,
and ``uncertainty`` the standard error of this: on a machine that does other work, too, it is larger than the overhead.

A model of 350 million parameters takes 4.3 GB per process (parameters, gradients, buckets); its rows are left out if
this is not available. ``--json OUT`` saves the rows, ``--millions`` and ``--processes`` select some.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from _report import report
from torch import nn
from torch.distributed import TCPStore

from freetrain_parsl.protocol.options import SessionOptions
from freetrain_parsl.training.fragment import Finished, run_fragment
from freetrain_parsl.training.mailbox import ControlMailbox, Membership

WIDTHS = {1: (512, 4), 25: (1024, 24), 350: (3416, 30)}  # millions of parameters -> width, layers
STEPS = {1: 512, 25: 128, 350: 32}
PROCESSES = {1: (2, 3, 4), 25: (2, 3, 4), 350: (2,)}
SAMPLES = {1: 32, 25: 32, 350: 2}  # in a step of a process
WARM_UP = 4  # the first step of a pair is one whose number is a multiple of 2
BYTES_PER_PARAMETER = 12


class Noise:
    """Random vectors."""

    def __init__(self, width: int, length: int) -> None:
        self._x = torch.randn(64, width)
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, position: int) -> torch.Tensor:
        return self._x[position % 64]


def train(session: Any, millions: int, steps: int) -> tuple[list[tuple[bool, float]], list[tuple[int, float]]]:
    """Train; return (compared, seconds) for each step, and (turn, seconds) for each comparison."""
    width, depth = WIDTHS[millions]
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))
    model, _ = session.prepare(model, torch.optim.SGD, lr=1e-6)
    total = steps + WARM_UP
    batch = SAMPLES[millions] * session.world_size
    data = session.loader(Noise(width, total * batch), batch, shuffle=False)
    replicas, hashing = session._runtime.replicas, []  # noqa: SLF001 - there is no setting for this
    votes = replicas.votes
    compares = False

    def votes_now_and_then(**options: Any) -> tuple[int, int]:
        if options["whole"]:  # at the end
            return votes(**options)  # type: ignore[no-any-return]
        if not compares:
            return 0, 0  # equal on all members
        begun = time.perf_counter()
        own: tuple[int, int] = votes(**options)
        hashing.append((session.metrics["steps"] % 16, time.perf_counter() - begun))
        return own

    replicas.votes = votes_now_and_then
    times = []
    begun = 0.0
    for _ in session.epochs(1):
        for number, x in enumerate(data):
            now = time.perf_counter()
            if number == WARM_UP:  # the first comparison covered everything
                hashing.clear()
            if number > WARM_UP:  # the boundary before this batch belongs to the step before
                times.append((compares, now - begun))
            begun = now
            compares = (number + number // 16) % 2 == 0  # in 32 steps each part once
            session.step(model(x).square().mean())
    return times, hashing


def member(millions: int, steps: int, rank: int, size: int, port: int, directory: str, results: Any) -> None:
    """Run one process of a group."""
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False)
    end = run_fragment(
        train,
        (millions, steps),
        options=SessionOptions("net", Path(directory), threads=1),
        membership=Membership("net", 1, rank, size, interface="lo"),
        meet=lambda _membership: store,
        mailbox=ControlMailbox(),
        report=lambda _report: None,
    )
    assert isinstance(end, Finished), "nothing pauses it"
    if rank == 0:
        results.put(end.value)


def measure(millions: int, size: int) -> dict[str, Any]:
    """Train in a group of `size` processes; return a row."""
    context = multiprocessing.get_context("spawn")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    results = context.Queue()
    with tempfile.TemporaryDirectory() as directory:
        arguments = [(millions, STEPS[millions], rank, size, store.port, directory, results) for rank in range(size)]
        processes = [context.Process(target=member, args=each) for each in arguments]
        for process in processes:
            process.start()
        times, hashing = results.get()
        for process in processes:
            process.join()
    differences = []
    for (first, one), (_, other) in zip(times[::2], times[1::2], strict=False):
        differences.append(one - other if first else other - one)
    plain = statistics.median(seconds for compared, seconds in times if not compared)
    turns: dict[int, list[float]] = {}
    for turn, seconds in hashing:
        turns.setdefault(turn, []).append(seconds)
    compared = statistics.mean(map(statistics.median, turns.values()))
    lower, _, upper = statistics.quantiles(differences, n=4)
    error = 1.25 * (upper - lower) / 1.35 / len(differences) ** 0.5  # of a median; steps that were interrupted are rare
    return {
        "parameters_million": millions,
        "processes": size,
        "steps": len(times),
        "step_ms": 1e3 * plain,
        "compared_ms": 1e3 * compared,
        "overhead": 1 + compared / plain,
        "on_off": 1 + statistics.median(differences) / plain,
        "uncertainty": error / plain,
    }


def main() -> None:
    """Measure, print a table, and save it if requested."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", nargs="+", type=int, default=list(WIDTHS), choices=list(WIDTHS))
    parser.add_argument("--processes", nargs="+", type=int, help="default: 2 to 4; 2 for 350 million parameters")
    parser.add_argument("--json", type=Path, metavar="OUT", help="save the rows")
    options = parser.parse_args()
    rows = []
    for millions in options.millions:
        for size in options.processes or PROCESSES[millions]:
            needed = millions * 1_000_000 * BYTES_PER_PARAMETER * size
            if needed > psutil.virtual_memory().available:
                print(f"{millions} M parameters on {size} processes: left out, {needed / 1e9:.0f} GB are not available")
                continue
            rows.append(measure(millions, size))
    report("Cost of comparing replicas", rows, ["torch"], options.json)


if __name__ == "__main__":
    main()
