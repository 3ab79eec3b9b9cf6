"""What horizontal fusion gains: samples per second of a sweep that is fused, relative to one by one.

Each row trains the same learning-rate sweep in several ways, in turns, in one process with one thread: fused, one by
one in sessions, one by one in plain PyTorch loops, and (MLP and CNN) as one model that is written by hand with grouped
operators; with Adam in PyTorch's fused implementation where the members use their own. The times are the shortest of a
step over all turns: on a CPU of processor time, so that other processes matter less. ``auto`` is what a sizing by
``fuse="auto"`` with this maximum decides, from its own timing. On a GPU, DCGAN, ResNet-18 and BERT have HFTA's sizes.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from _fusion_nets import NETS, losses, models, samples
from _fusion_references import HAND_GROUPED, co_located, hand_grouped, plain
from _report import report

from freetrain_parsl.extensions.fusion.slot.array_mailbox import ArrayMailbox, Member
from freetrain_parsl.extensions.fusion.slot.run import run_members
from freetrain_parsl.extensions.fusion.slot.sizing import ArraySizing
from freetrain_parsl.protocol.options import SessionOptions
from freetrain_parsl.report.output import write_output
from freetrain_parsl.training.fragment import run_fragment
from freetrain_parsl.training.mailbox import ControlMailbox, Membership

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.utils.data import TensorDataset

    from freetrain_parsl.extensions.fusion.engine.engine import FusionEngine

STEPS = 13  # of each turn; the first ones allocate memory
SKIPPED = 3


class Stopwatch:
    """The shortest time of a step of all training jobs of a turn."""

    def __init__(self) -> None:
        self.shortest = math.inf
        self._steps = 0
        self._last = 0.0

    def lap(self) -> None:
        """Call it once in each step."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            now = time.perf_counter()
        else:
            now = time.thread_time()
        self._steps += 1
        if self._steps > SKIPPED:
            self.shortest = min(self.shortest, now - self._last)
        self._last = now


def train(
    session: Any,
    *,
    net: str,
    data: TensorDataset,
    batch: int,
    lr: float,
    steps: int,
    watch: Stopwatch | None = None,
    sizing: ArraySizing | None = None,
) -> None:
    """Train for some steps, or until the sizing has decided; the first training job of an array holds the stopwatch."""
    parts = models(net)
    optimizers = [torch.optim.Adam(model.to(session.device).parameters(), lr=lr, fused=True) for model in parts]
    session.prepare(*(thing for pair in zip(parts, optimizers, strict=True) for thing in pair))
    loader = session.loader(data, batch_size=batch, drop_last=True)
    done = 0
    for _ in session.epochs(10**6):
        for x, y in loader:
            if watch is not None:
                watch.lap()
            for loss, number in losses(parts, x, y):
                session.step(loss, optimizer=optimizers[number])
            done += 1
            if done == steps or (sizing is not None and sizing.decided):
                return


def array(points: Sequence[dict[str, Any]], sizing: ArraySizing | None, root: Path) -> FusionEngine:
    """Train an array in this process."""
    failures: list[BaseException] = []
    engine = run_members(
        [
            Member(SessionOptions(str(number), root), lambda point=point: (train, (), point))  # type: ignore[misc]
            for number, point in enumerate(points)
        ],
        ArrayMailbox(),
        sizing=sizing,
        report=lambda _name, _report: None,
        ended=lambda _name, end: failures.append(end) if isinstance(end, BaseException) else None,
    )
    if failures:
        raise failures[0]
    if sizing is None and engine.reason:  # then the times are those of one training job after another
        raise SystemExit(f"{points[0]['net']} cannot be fused: {engine.reason}")
    return engine


def alone(point: dict[str, Any], root: Path) -> None:
    """Train by itself."""
    run_fragment(
        train,
        kwargs=point,
        options=SessionOptions("alone", root),
        membership=Membership("alone"),
        meet=_nobody,
        mailbox=ControlMailbox(),
        report=lambda _report: None,
    )


def _nobody(membership: Membership) -> Any:
    raise AssertionError(membership)


def measure(net: str, batch: int, sizes: Sequence[int], turns: int, *, processes: bool) -> list[dict[str, Any]]:
    """Return the rows of one network and batch size."""
    data = samples(net)
    fused = dict.fromkeys(sizes, math.inf)
    grouped = dict.fromkeys(sizes, math.inf)
    session = loop = math.inf
    for _ in range(turns):
        watch = Stopwatch()
        plain(net, data, batch, STEPS, watch.lap)
        loop = min(loop, watch.shortest)
        for size in (0, *sizes):
            watch = Stopwatch()
            points = [
                {
                    "net": net,
                    "data": data,
                    "batch": batch,
                    "lr": 1e-3 * (number + 1),
                    "steps": STEPS,
                    "watch": None if number else watch,
                }
                for number in range(max(1, size))
            ]
            with tempfile.TemporaryDirectory() as root:
                if size:
                    array(points, None, Path(root))
                    fused[size] = min(fused[size], watch.shortest)
                else:
                    alone(points[0], Path(root))
                    session = min(session, watch.shortest)
            if size and net in HAND_GROUPED:
                watch = Stopwatch()
                hand_grouped(net, data, batch, size, STEPS, watch.lap)
                grouped[size] = min(grouped[size], watch.shortest)
    rows = []
    for size in sizes:
        sizing = ArraySizing(size)
        points = [
            {"net": net, "data": data, "batch": batch, "lr": 1e-3 * (n + 1), "steps": 200, "sizing": sizing}
            for n in range(size)
        ]
        with tempfile.TemporaryDirectory() as root:
            array(points, sizing, Path(root))
        rows.append(
            {
                "net": net,
                "batch": batch,
                "members": size,
                "ratio": size * session / fused[size],
                "ratio_to_plain_loop": size * loop / fused[size],
                "hand_grouped": size * session / grouped[size] if net in HAND_GROUPED else None,
                "co_located": size * session / co_located(net, batch, size, STEPS) if processes else None,
                "member_step_us": fused[size] / size * 1e6,
                "session_step_us": session * 1e6,
                "plain_step_us": loop * 1e6,
                "auto": sizing.decided and sizing.fused,
                "auto_members": sizing.size if sizing.decided and sizing.fused else 1,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", nargs="+", choices=NETS, default=list(NETS))
    parser.add_argument("--batches", nargs="+", type=int, default=[16, 64, 256])
    parser.add_argument("--members", nargs="+", type=int, default=[1, 2, 4, 8, 16])
    parser.add_argument("--turns", type=int, default=3, help="how often each way is timed")
    parser.add_argument("--mps-like", action="store_true", help="on a GPU, also as many processes at once")
    parser.add_argument("--gpu", action="store_true", help="fail unless there is a GPU; it is used in any case")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    options = parser.parse_args()
    logging.getLogger("freetrain_parsl").setLevel(logging.ERROR)  # one by one is a result here
    torch.set_num_threads(1)
    has_gpu = torch.cuda.is_available()
    if options.gpu and not has_gpu:
        raise SystemExit("--gpu: PyTorch sees no GPU")
    if options.mps_like and not has_gpu:
        print("--mps-like is left out: PyTorch sees no GPU that processes could share")
    rows: list[dict[str, Any]] = []
    for net in options.nets:
        for batch in options.batches:
            rows += measure(net, batch, options.members, options.turns, processes=options.mps_like and has_gpu)
            ratios = ", ".join(f"{row['ratio']:.2f}" for row in rows[-len(options.members) :])
            print(f"{net}, batch {batch}: {ratios} times as fast", flush=True)
            if options.json is not None:
                write_output(options.json, json.dumps({"rows": rows}, indent=2) + "\n")
    report(
        "Horizontal fusion: seconds of a step of one training job, fused and one by one",
        rows,
        ["torch", "freetrain-parsl"],
    )


if __name__ == "__main__":
    main()
