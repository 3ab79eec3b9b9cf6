"""What elastic batches gain: time and samples to the same validation loss, fixed batch against ``batch_range``.

Two training jobs in one process, on CPU: a convolutional network on handwritten digits (SGD with momentum) and a small
transformer on characters (AdamW), each with several seeds. They train in holes of random lengths, the same for both
ways: at the end of a hole a training job saves and stops, in the next one it resumes. Seconds are those of the
processor in one thread, also those by which the batch is chosen: other processes on the machine then make no
difference. They are of the training loop, with saving and without validation.

``--cost`` measures instead how long the measurement of the gradient's noise takes, with 20 million parameters.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import torch
from _report import report
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from freetrain_parsl.protocol.options import SessionOptions
from freetrain_parsl.training.data.loader_options import LoaderOptions
from freetrain_parsl.training.data.order import Order
from freetrain_parsl.training.fragment import ControlMailbox, Finished, Membership, run_fragment
from freetrain_parsl.training.step.elastic_batch import BatchChooser
from freetrain_parsl.training.step.gradient_noise import NoiseMeter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

sys.path.insert(0, str(Path(__file__).parents[1] / "apps"))


@dataclass(frozen=True)
class Workload:
    """A training job of the benchmark.

    Parameters
    ----------
    make
        Returns model, optimizer, training data, and validation data as one batch.
    batch_size, largest
        The fixed batch, which is the initial and the smallest elastic one; and the largest elastic one.
    epochs
        Length of each run.
    target
        Validation loss to be reached.
    """

    make: Callable[[], tuple[torch.nn.Module, torch.optim.Optimizer, Any, tuple[torch.Tensor, torch.Tensor]]]
    batch_size: int
    largest: int
    epochs: int
    target: float


def digits() -> Any:
    """Make the network on handwritten digits."""
    from digits import Net
    from digits import digits as images

    train, test = images()
    model = Net(8)
    return model, torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9), train, test.tensors


def char_lm() -> Any:
    """Make the character-level language model; every eighth window is for validation."""
    from char_lm import Text, Transformer

    text = Text(60_000, 32)
    windows = [text[position] for position in range(len(text))]
    x, y = (torch.stack(column) for column in zip(*windows, strict=True))
    held_out = torch.arange(len(x)) % 8 == 0
    model = Transformer(len(text.alphabet), 32, width=32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    return model, optimizer, TensorDataset(x[~held_out], y[~held_out]), (x[held_out], y[held_out])


WORKLOADS = {
    "digits": Workload(digits, batch_size=16, largest=512, epochs=24, target=0.06),
    "char_lm": Workload(char_lm, batch_size=16, largest=256, epochs=10, target=2.2),
}


class Stopwatch:
    """Sums the time of the training loop over all holes."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Measure."""
        begin = time.process_time()
        try:
            yield
        finally:
            self.seconds += time.process_time() - begin


def run(workload: Workload, seed: int, *, elastic: bool, hole: float) -> list[dict[str, Any]]:
    """Train in holes of `hole` seconds on average; return the rows of the history."""
    watch = Stopwatch()
    mailbox, closes = ControlMailbox(), math.inf

    def train(session: Any) -> list[dict[str, Any]]:
        model, optimizer, data, (x_test, y_test) = workload.make()
        session.prepare(model, optimizer)
        sizes = (workload.batch_size, workload.largest) if elastic else None
        loader = session.loader(data, workload.batch_size, batch_range=sizes, options=LoaderOptions(seed_samples=False))
        for _ in session.epochs(workload.epochs):
            with watch.running():
                for x, y in loader:
                    session.step(cross_entropy(model(x), y))
                    if time.process_time() >= closes:
                        mailbox.pause_requested.set()
            model.eval()
            with torch.no_grad():
                validation = float(cross_entropy(model(x_test), y_test))
            model.train()
            session.log(
                validation=validation,
                seconds=watch.seconds,
                samples=session.metrics["samples"],
                steps=session.metrics["steps"],
            )
        history: list[dict[str, Any]] = session.metrics["history"]
        return history

    holes, chooser = Random(seed), None
    with tempfile.TemporaryDirectory(prefix="freetrain-benchmark-") as root:
        for hole_number in range(10_000):
            mailbox = ControlMailbox()
            chooser = BatchChooser(mailbox) if chooser is None else chooser.continued(mailbox)
            closes = time.process_time() + max(0.5, holes.expovariate(1 / hole))
            end = run_fragment(
                train,
                options=SessionOptions("benchmark", Path(root), seed=seed),
                membership=Membership("benchmark", hole_number),
                meet=_alone,
                mailbox=mailbox,
                report=chooser.take,
                clock=time.process_time,
            )
            if isinstance(end, Finished):
                progress = end.progress
                assert (progress.samples_lost, progress.duplicate_samples) == (0, 0), "every sample once per epoch"
                rows: list[dict[str, Any]] = [{**row, "holes": hole_number + 1} for row in end.value]
                return rows
    raise RuntimeError("the training job did not end")


def _alone(_membership: Membership) -> Any:
    raise ValueError("a group of one does not meet")


def reached(rows: list[dict[str, Any]], target: float) -> dict[str, Any] | None:
    """Return the first row with at most this validation loss."""
    return next((row for row in rows if row["validation"] <= target), None)


def compare(name: str, seeds: int, hole: float) -> list[dict[str, Any]]:
    """Run both ways with each seed; return two rows of a table."""
    workload = WORKLOADS[name]
    runs: dict[bool, list[list[dict[str, Any]]]] = {False: [], True: []}
    for seed in range(seeds):
        for elastic in (False, True) if seed % 2 else (True, False):
            history = run(workload, seed, elastic=elastic, hole=hole)
            runs[elastic].append(history)
            row = reached(history, workload.target) or {"seconds": math.nan, "samples": 0}
            print(
                f"{name} seed {seed} {'elastic' if elastic else 'fixed'}: {row['seconds']:.2f} s, {row['samples']} "
                f"samples to {workload.target}, {history[-1]['seconds']:.2f} s to {history[-1]['validation']:.3f}",
                file=sys.stderr,
                flush=True,
            )
    rows = []
    for elastic, histories in runs.items():
        first = [reached(history, workload.target) for history in histories]
        base = [reached(history, workload.target) for history in runs[False]]
        pairs = [(one, other) for one, other in zip(base, first, strict=True) if one and other]
        final = [statistics.mean(row["validation"] for row in history[-3:]) for history in histories]
        found = [row for row in first if row is not None]
        rows.append(
            {
                "training": name,
                "batch": "elastic" if elastic else "fixed",
                "last_batch": statistics.median(history[-1].get("batch", workload.batch_size) for history in histories),
                "target": workload.target,
                "reached": f"{len(found)}/{seeds}",
                "seconds": _mean(row["seconds"] for row in found),
                "samples": _mean(row["samples"] for row in found),
                "steps": _mean(row["steps"] for row in found),
                "faster": _ratio(pairs, "seconds"),
                "whole_run_seconds": _mean(history[-1]["seconds"] for history in histories),
                "whole_run_faster": _ratio(
                    [(one[-1], other[-1]) for one, other in zip(runs[False], histories, strict=True)], "seconds"
                ),
                "final_loss": statistics.mean(final),
                "final_loss_deviation": statistics.stdev(final) if seeds > 1 else None,
                "holes": statistics.mean(history[-1]["holes"] for history in histories),
            }
        )
    return rows


def _mean(values: Any) -> float | None:
    values = list(values)
    return statistics.mean(values) if values else None


def _ratio(pairs: list[tuple[dict[str, Any], dict[str, Any]]], key: str) -> float | None:
    """Return the geometric mean over the seeds."""
    return statistics.geometric_mean([fixed[key] / other[key] for fixed, other in pairs]) if pairs else None


def cost() -> list[dict[str, Any]]:
    """Measure a step of 20 million parameters, and the measurement of the noise in it; processor time, one thread."""
    from char_lm import Transformer

    rows = []
    model = Transformer(96, 64, width=640, heads=8, blocks=4)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters)
    codes = torch.randint(0, 96, (8, 65))
    for way, micro_batch in (("successive batches", None), ("micro-batches", 4)):
        order = Order(1000, 8, 0, micro_batch=micro_batch)
        batch = order.batch(order.epoch(0), 0, 0, 1)
        meter = NoiseMeter()
        meter.load({"batches": 1000, "measurements": 99, "weight": 1.0, "square": 1.0, "variance": 1.0})
        steps, measuring = [], []
        for _ in range(24):
            spent, begin = 0.0, time.process_time()
            meter.open_batch(batch, 1.0)
            for number, piece in enumerate(batch.pieces):
                share = codes[number * len(piece.positions) : (number + 1) * len(piece.positions)]
                cross_entropy(model(share[:, :-1]), share[:, 1:]).backward()
                if meter.measures_pieces:
                    now = time.process_time()
                    meter.add_piece(parameters, piece.weight)
                    spent += time.process_time() - now
            now = time.process_time()
            meter.add_whole(parameters)
            meter.close_batch()
            spent += time.process_time() - now
            optimizer.step()
            optimizer.zero_grad()
            steps.append(time.process_time() - begin - spent)
            measuring.append(spent)
        used = slice(8, None)  # two whole intervals
        rows.append(
            {
                "measured_between": way,
                "parameters": sum(parameter.numel() for parameter in parameters),
                "step_ms": 1e3 * statistics.mean(steps[used]),
                "measurement_ms_per_step": 1e3 * statistics.mean(measuring[used]),
                "share": statistics.mean(measuring[used]) / statistics.mean(steps[used]),
            }
        )
    return rows


def main() -> None:
    """Print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainings", default=",".join(WORKLOADS), help=f"of {', '.join(WORKLOADS)}")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--hole", type=float, default=4.0, help="mean length of a hole in seconds")
    parser.add_argument("--cost", action="store_true", help="measure the cost of the measurement instead")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.cost:
        report("measuring the gradient's noise", cost(), ("torch",), arguments.json)
        return
    names = arguments.trainings.split(",")
    if unknown := [name for name in names if name not in WORKLOADS]:
        parser.error(f"unknown training jobs {', '.join(unknown)}; there are {', '.join(WORKLOADS)}")
    rows = [row for name in names for row in compare(name, arguments.seeds, arguments.hole)]
    report("elastic batches against a fixed batch", rows, ("freetrain-parsl", "torch"), arguments.json)


if __name__ == "__main__":
    main()
