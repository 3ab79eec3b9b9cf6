"""A sweep of adapters on the embedded cluster, end to end: ranks 4 and 8, two alphas, two rates, on two nodes.

It runs with ``fuse="auto"`` and with ``fuse=False``, each time with new checkpoints and the same faults: once a job has
a checkpoint, the process of one node is killed; once it trains again, the block of the other one is cancelled, as by a
preemption. *Seconds* are from the first node to the last result. *Process* and *all* are the peaks of anonymous memory,
in MiB, of one slot's process and of all together. *Difference* is the largest one between an adapter's number and that
of the job alone in this process; base and adapters are in double precision.
"""

from __future__ import annotations

import itertools
import os
import signal
import tempfile
import threading
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import parsl
from parsl.config import Config

from freetrain_parsl import (
    CheckpointSettings,
    EmbeddedClusterProvider,
    FreeTrainExecutor,
    RateLimits,
    TrainingSettings,
    read_journal,
    training_app,
)
from freetrain_parsl.report.projection.run import RunState
from freetrain_parsl.training.fragment import run_local

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Self

    from freetrain_parsl import TrainingApp

NODES = 2
POINTS = [
    {"rank": rank, "alpha": alpha, "lr": lr} for rank, alpha, lr in itertools.product((4, 8), (8.0, 16.0), (1e-3, 3e-3))
]
LONGEST = 1800.0  # seconds, for all results
MIB = 2**20


def measure(*, quick: bool) -> list[dict[str, Any]]:
    """Run the sweep both ways; return a row for each.

    Raises
    ------
    SystemExit
        A job has not the adapters that it has alone, or has lost a sample or seen one twice.
    """
    train = make_app()
    size = {"hidden": 64, "layers": 2, "steps": 200} if quick else {"hidden": 256, "layers": 4, "steps": 400}
    rows, expected = [], [run_local(train.func, **point, **size) for point in POINTS]
    for fuse in ("auto", False):
        with tempfile.TemporaryDirectory() as directory:
            row, found = run(train, Path(directory), fuse=fuse, size=size)
        row["difference"] = max(
            abs(mine - its)
            for one, other in zip(found, expected, strict=True)
            for mine, its in zip(one["adapter"], other["adapter"], strict=True)
        )
        if row["difference"] > 1e-9 or row["lost_samples"] or row["duplicate_samples"]:
            raise SystemExit(f"not as alone: {row}")
        rows.append(row)
    return rows


def make_app() -> TrainingApp:
    """Return the training app."""

    @training_app(max_nodes=1)
    def train(session: Any, *, rank: int, alpha: float, lr: float, hidden: int, layers: int, steps: int) -> Any:
        import torch
        from peft import LoraConfig, get_peft_model
        from torch.nn.functional import cross_entropy
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=512, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers,
            num_attention_heads=4, num_key_value_heads=2, use_cache=False,
        )  # fmt: skip
        with torch.random.fork_rng():
            torch.manual_seed(1234)
            base = LlamaForCausalLM(config).double()
        options = LoraConfig(r=rank, lora_alpha=alpha, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        model = get_peft_model(base, options, autocast_adapter_dtype=False)
        trained = [each for each in model.parameters() if each.requires_grad]
        model, _ = session.prepare(model, torch.optim.AdamW(trained, lr=lr))
        words = torch.randint(512, (100, 16), generator=torch.Generator().manual_seed(3))
        data = session.loader(torch.utils.data.TensorDataset(words), batch_size=1)
        for _epoch in session.epochs(steps // 100):
            for (batch,) in data:
                logits = model(input_ids=batch).logits
                session.step(cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten()))
        return {"adapter": torch.cat([each.detach().flatten() for each in trained]).tolist()}

    return train


def run(
    train: TrainingApp, directory: Path, *, fuse: Any, size: dict[str, int]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Run the sweep once; return the row, and what the jobs have returned."""
    executor = FreeTrainExecutor(
        provider=EmbeddedClusterProvider(
            nodes=NODES, cluster_dir=str(directory / "cluster"), grace=timedelta(seconds=4)
        ),
        trainings=TrainingSettings(threads_per_slot=1),
        checkpoints=CheckpointSettings(interval=timedelta(seconds=2)),
        checkpoint_dir=directory / "checkpoints",
        rate_limits=RateLimits(poll_interval=timedelta(seconds=1), submissions_per_minute=60),
    )
    config = Config(executors=[executor], run_dir=str(directory / "runinfo"), strategy="none", initialize_logging=False)
    with parsl.load(config), Memory(executor.journal_path) as memory:
        points = {name: [point[name] for point in POINTS] for name in POINTS[0]}
        futures = train.options(fuse=fuse).sweep(**points, **size)
        disturb(executor)
        found = [future.result(timeout=LONGEST) for future in futures]
        until(executor, lambda run: run.completed == len(POINTS))
    entries = [entry for _, entry in read_journal(executor.journal_path)]
    state = RunState(executor.journal_path).refresh()
    first = min(entry.time for entry in entries if entry.kind == "node_joined")
    last = max(entry.time for entry in entries if entry.kind == "training_finished")
    shared = {entry.detail["size"] for entry in entries if entry.kind == "base_shared"}
    progress = [training.progress for training in state.trainings.values()]
    row = {
        "fuse": str(fuse),
        "seconds": last - first,
        "arrays": sum(entry.kind == "array_started" for entry in entries),
        "failures": sum(fragment.failure for fragment in state.fragments),
        "resumes": sum(training.resumes for training in state.trainings.values()),
        "shared_mib": max(shared, default=0) / MIB,
        "process_mib": memory.process / MIB,
        "all_mib": memory.together / MIB,
        "lost_samples": sum(each["samples_lost"] for each in progress),
        "duplicate_samples": sum(each["duplicate_samples"] for each in progress),
    }
    return row, found


def disturb(executor: FreeTrainExecutor) -> None:
    """Kill the process of one node, and preempt the block of another one, while jobs train there."""
    until(executor, lambda run: any(each.progress.get("checkpoint_step") for each in run.trainings.values()))
    entries = [entry for _, entry in read_journal(executor.journal_path)]
    place = next(iter(RunState(executor.journal_path).refresh().fragments)).nodes[0]
    joined = [entry for entry in entries if entry.kind == "slot_joined" and entry.detail["node"] == place]
    os.kill(joined[-1].detail["pid"], signal.SIGKILL)
    until(executor, lambda run: any(fragment.failure for fragment in run.fragments))
    until(executor, lambda run: run.fragments[-1].end is None)
    cluster = executor.provider.ensure_started()
    holding = [job for job, status in cluster.queue().items() if status["nodes"] and place not in status["nodes"]]
    cluster.cancel(holding or [job for job, status in cluster.queue().items() if status["nodes"]])


def until(executor: FreeTrainExecutor, condition: Callable[[RunState], bool]) -> None:
    """Wait until a condition of the run holds."""
    run, end = RunState(executor.journal_path), time.monotonic() + LONGEST
    while not condition(run.refresh()):
        if time.monotonic() > end:
            raise SystemExit(f"not within {LONGEST:g} s: {run.trainings}")
        time.sleep(0.1)


class Memory:
    """Notes, in a thread, how much anonymous memory the slots' processes have at most."""

    def __init__(self, journal: str | Path) -> None:
        self.process = self.together = 0
        self._journal = journal
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join()

    def _watch(self) -> None:
        pids: set[int] = set()
        last = 0
        while not self._ending.wait(0.05):
            with suppress(OSError):
                for number, entry in read_journal(self._journal, last):
                    last = number
                    if entry.kind == "slot_joined":
                        pids.add(entry.detail["pid"])
            used = {pid: _anonymous(pid) for pid in pids}
            pids = {pid for pid, size in used.items() if size}
            self.process = max([self.process, *used.values()])
            self.together = max(self.together, sum(used.values()))


def _anonymous(pid: int) -> int:
    with suppress(OSError):  # it has ended
        for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    return 0
