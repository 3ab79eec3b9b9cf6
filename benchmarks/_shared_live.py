"""Training jobs on four nodes of four accelerators: with whole nodes, and sharing them.

Twelve jobs for one accelerator and one for up to all of them use the idle nodes of an embedded cluster, whose main
queue is made from a drawn log, as in `goodput.py`. This machine has no 16 accelerators and fewer cores, so that steps
wait for a simulated one: a step does its forward pass, waits until the time that an accelerator would take has passed
since the last step, and then does its backward pass and update, with the exchange of gradients. A sample takes
`SAMPLE_SECONDS` of an accelerator. The network of the small jobs is too small for more than one: their steps take as
long on several. With ``--steps cpu`` a step computes for as long instead, on cores that all slots share.
"""

from __future__ import annotations

import os
import statistics
import time
from contextlib import contextmanager
from datetime import timedelta
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import parsl
from _goodput_log import choose_windows, main_queue, synthetic_log
from parsl.config import Config

from freetrain_parsl import (
    EmbeddedClusterProvider,
    FreeTrainExecutor,
    PlannerSettings,
    RateLimits,
    TrainingSettings,
    training_app,
)
from freetrain_parsl.extensions.demo.warm_start.owner import WarmStart
from freetrain_parsl.report.projection.run import RunState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from _goodput_log import Window

    from freetrain_parsl.cluster.workload import MainJob

NODES, SLOTS, SMALL_JOBS = 4, 4, 12
SAMPLE_SECONDS = 0.0125  # of one accelerator
SMALL_BATCH, LARGE_BATCH = 8, 64
EXCHANGE_SECONDS = 0.016  # of each step of the large job, however many accelerators it has
LEAD = 12.0  # seconds in which all nodes are busy: the driver starts
NEIGHBOURS_STEPS = 100
_SAMPLES = 6400  # of an epoch
_FASTER = 20.0  # seconds of the log in one
_SECOND = timedelta(seconds=1)
_PLANNER = PlannerSettings(
    startup=3 * _SECOND,
    min_useful=5 * _SECOND,
    closing_margin=2 * _SECOND,
    idle_timeout=5 * _SECOND,
    settle=_SECOND,
    replan_interval=5 * _SECOND,
    max_nodes_per_block=1,  # a block is preempted as a whole
)


def choose_holes(*, seconds: float, seed: int) -> list[Window]:
    """Draw a log, and return windows of 12 s or more of four of its nodes, twenty times as fast."""
    log = synthetic_log(seconds=25 * 3600.0, nodes=1024, seed=seed)
    return choose_windows(
        log, nodes=NODES, start=24 * 3600.0, compression=_FASTER, seconds=seconds, least=12.0, seed=seed
    )


def measure(directory: Path, *, seconds: float, seed: int, steps: str) -> dict[str, Any]:
    """Train in the same holes with whole nodes and sharing them, for as long; return the row."""
    holes = choose_holes(seconds=seconds, seed=seed)
    with WarmStart() as warm:  # all nodes are on this machine, whose cores 16 imports of torch would keep busy
        os.environ.update(warm.environment)
        whole = _samples(directory / "whole", holes, seconds=seconds, share=False, steps=steps)
        shared = _samples(directory / "shared", holes, seconds=seconds, share=True, steps=steps)
        slowdown = _slowdown(directory / "neighbours", steps=steps)
    return {
        "live": True,
        "steps": "wait for simulated accelerators" if steps == "device" else "compute on shared cores",
        "nodes": NODES,
        "accelerators": SLOTS,
        "idle_node_seconds": round(sum(closes - opens for opens, closes in holes), 1),
        "whole_node_samples": sum(whole),
        "shared_samples": sum(shared),
        "ratio": sum(shared) / sum(whole),
        "whole_node_samples_of_small": whole[0],
        "shared_samples_of_small": shared[0],
        "neighbour_slowdown": slowdown,
    }


def _samples(directory: Path, holes: Sequence[Window], *, seconds: float, share: bool, steps: str) -> tuple[int, int]:
    """Return the samples of the small jobs, and of the large one."""
    queue = main_queue(holes, nodes=NODES, seconds=seconds, lead=LEAD)
    with _cluster(directory, nodes=NODES, queue=queue, share=share) as executor:
        usage = executor.provider.ensure_started().usage()
        end = usage["time"] - usage["elapsed"] + LEAD + seconds
        small, large = _make_small(steps), _make_large(steps)
        for number in range(SMALL_JOBS):
            small.options(name=f"small-{number}")()
        large.options(name="large")()
        if time.time() > end - seconds:
            raise RuntimeError(f"the driver took more than {LEAD:g} s to start: the machine is too busy")
        time.sleep(end - time.time())
        run = RunState(executor.journal_path).refresh()
    for training in run.trainings.values():
        lost, twice = (training.progress.get(key, 0) for key in ("samples_lost", "duplicate_samples"))
        if training.error or lost or twice:
            raise RuntimeError(f"{training.name}: {training.error or f'{lost} samples lost, {twice} repeated'}")
    counts = {training.name: training.progress.get("samples", 0) for training in run.trainings.values()}
    large_samples = counts.pop("large")
    return sum(counts.values()), large_samples


def _slowdown(directory: Path, *, steps: str) -> float:
    """Return the median time of a small job's step with three neighbours, relative to that alone on the node."""
    directory.mkdir()
    small = _make_small(steps)
    with _cluster(directory, nodes=1, queue=(), share=True) as executor:
        first = small.options(name="first")(times=str(directory / "first"))
        _wait(lambda: first.done() or len(_times(directory / "first")) > NEIGHBOURS_STEPS // 2)
        names = [f"neighbour-{number}" for number in range(SLOTS - 1)]
        begun = time.monotonic()
        futures = [small.options(name=name)(NEIGHBOURS_STEPS, times=str(directory / name)) for name in names]
        for future in futures:
            future.result(timeout=120)
        ended = time.monotonic()
        _wait(lambda: first.done() or _times(directory / "first")[-1] > ended + 3.0)
        if first.done():
            first.result()
        nodes = {training.nodes for training in RunState(executor.journal_path).refresh().trainings.values()}
        assert all(len(units) <= 1 for units in nodes), nodes
    others = [_times(directory / name) for name in names]
    together = max(times[0] for times in others), min(times[-1] for times in others)
    own = _times(directory / "first")
    alone, beside = [], []
    for since, until in pairwise(own):
        if until < begun or since > ended:
            alone.append(until - since)
        elif together[0] < since and until < together[1]:
            beside.append(until - since)
    return statistics.median(beside) / statistics.median(alone)


@contextmanager
def _cluster(directory: Path, *, nodes: int, queue: Sequence[MainJob], share: bool) -> Iterator[FreeTrainExecutor]:
    executor = FreeTrainExecutor(
        provider=EmbeddedClusterProvider(
            nodes=nodes, workload=tuple(queue), cluster_dir=str(directory / "cluster"), grace=5 * _SECOND
        ),
        planner=_PLANNER,
        trainings=TrainingSettings(threads_per_slot=1),
        rate_limits=RateLimits(poll_interval=_SECOND, submissions_per_minute=120),
        checkpoint_dir=directory / "checkpoints",
        slots_per_node=SLOTS,
        share_nodes=share,
    )
    config = Config(executors=[executor], run_dir=str(directory / "parsl"), strategy="none", initialize_logging=False)
    with parsl.load(config):
        yield executor


def _make_small(steps: str) -> Any:
    rate = 1 / SAMPLE_SECONDS
    return training_app(accelerators=1, scaling={1: rate}, fuse=False)(
        _make_function(steps, SMALL_BATCH, divides=False)
    )


def _make_large(steps: str) -> Any:
    counts = (1, SLOTS, NODES * SLOTS)
    rates = {n: LARGE_BATCH / (LARGE_BATCH * SAMPLE_SECONDS / n + EXCHANGE_SECONDS) for n in counts}
    return training_app(max_accelerators=counts[-1], scaling=rates, fuse=False)(
        _make_function(steps, LARGE_BATCH, divides=True)
    )


def _make_function(steps: str, batch: int, *, divides: bool) -> Callable[..., None]:
    """Make the training function, whose code is pickled by value; without `most` it trains until it is stopped."""
    samples, sample, exchange = _SAMPLES, SAMPLE_SECONDS, EXCHANGE_SECONDS

    def train(session: Any, most: int | None = None, *, times: str | None = None) -> None:
        import time
        from contextlib import nullcontext
        from pathlib import Path

        import torch
        from torch.nn.functional import mse_loss
        from torch.utils.data import TensorDataset

        x = torch.randn(samples, 16, generator=torch.Generator().manual_seed(1))
        net = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
        model, _ = session.prepare(net, torch.optim.Adam, lr=1e-3)
        data = session.loader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=batch)
        work = torch.randn(256, 256)
        count = 0
        with nullcontext() if times is None else Path(times).open("a", buffering=1) as file:
            last = time.monotonic()
            for _ in session.epochs(1_000_000):
                for a, b in data:
                    loss = mse_loss(model(a), b)
                    if steps == "device":
                        needed = sample * len(a) + exchange if divides else sample * batch
                        time.sleep(max(0.0, last + needed - time.monotonic()))
                    else:
                        for _ in range(16 * len(a)):  # a sample takes about as long as on the simulated accelerator
                            work @ work
                    session.step(loss)
                    last = time.monotonic()
                    if file is not None:
                        file.write(f"{last}\n")
                    count += 1
                    if count == most:
                        return

    return train


def _times(file: Path) -> list[float]:
    lines = file.read_text(encoding="ascii").splitlines(keepends=True) if file.exists() else []
    return [float(line) for line in lines if line.endswith("\n")]


def _wait(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise RuntimeError(f"a job has not started within {seconds:g} s: the machine is too busy")
        time.sleep(0.2)
