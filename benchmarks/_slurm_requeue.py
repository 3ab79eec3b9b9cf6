"""The usual alternative of `slurm_neighbours.py`: fixed-size preemptible jobs that checkpoint and requeue.

Written with submitit as in its documentation: a callable with a ``checkpoint`` method. On the signal before the end of
its time limit, or before preemption, submitit saves and requeues it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import submitit
from _slurm_training import CHECKPOINT_SECONDS, SETTINGS

from freetrain_parsl.windows.hostlist import expand_hosts

_WARNING_SECONDS = 15  # Slurm's signals are late by half a minute, or early: see its manual of --signal


class Training:
    """One training job; its state is in its directory, from which it resumes."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self._state: dict[str, Any] | None = None

    def __call__(self) -> None:
        """Train until killed."""
        import torch
        import torch.distributed as dist
        from torch.nn.functional import mse_loss
        from torch.nn.parallel import DistributedDataParallel

        env = submitit.JobEnvironment()
        size, rank = env.num_tasks, env.global_rank
        started = time.time()
        torch.set_num_threads(1)
        restarts = os.environ.get("SLURM_RESTART_COUNT", "0")
        meeting = Path(self.directory) / f"meeting-{env.job_id}-{restarts}"
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(SETTINGS["samples"], SETTINGS["features"], generator=generator)
        y = x.sum(1, keepdim=True)
        net = torch.nn.Linear(int(SETTINGS["features"]), 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        training_metrics: dict[str, Any] = {"step": 0, "samples": 0, "step_node_seconds": 0.0}
        checkpoint = Path(self.directory) / "checkpoint.pt"
        if checkpoint.exists():
            state = torch.load(checkpoint, weights_only=True)
            net.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            training_metrics = state["books"]
        model = DistributedDataParallel(net) if size > 1 else net
        local = int(SETTINGS["batch"]) // size
        saved = time.monotonic()
        while True:
            begin = time.monotonic()
            at = (training_metrics["step"] * local * size + rank * local) % (int(SETTINGS["samples"]) - local)
            time.sleep(SETTINGS["cost"] * local)
            optimizer.zero_grad()
            mse_loss(model(x[at : at + local]), y[at : at + local]).backward()
            optimizer.step()
            if rank:
                continue
            training_metrics = {
                "step": training_metrics["step"] + 1,
                "samples": training_metrics["samples"] + local * size,
                "step_node_seconds": training_metrics["step_node_seconds"] + (time.monotonic() - begin) * size,
            }
            # One assignment: the signal handler sees the state of this step or the previous one, never a mixture.
            self._state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "books": training_metrics}
            self._tell(training_metrics, env, started)
            if time.monotonic() - saved > CHECKPOINT_SECONDS:
                self._save()
                saved = time.monotonic()

    def checkpoint(self) -> submitit.helpers.DelayedSubmission:
        """Save, for submitit to requeue it; called in its signal handler."""
        self._save()
        return submitit.helpers.DelayedSubmission(Training(self.directory))

    def _save(self) -> None:
        import torch

        if self._state is not None:
            aside = Path(self.directory) / "checkpoint.pt.new"
            torch.save(self._state, aside)
            aside.replace(aside.with_suffix(""))

    def _tell(self, training_metrics: dict[str, Any], env: Any, started: float) -> None:
        told = {
            **training_metrics,
            "nodes": expand_hosts(os.environ["SLURM_JOB_NODELIST"]),
            "started": started,
            "now": time.time(),
        }
        name = f"run-{env.job_id}-{os.environ.get('SLURM_RESTART_COUNT', '0')}.json"
        aside = Path(self.directory) / f"{name}.new"
        aside.write_text(json.dumps(told), encoding="utf-8")
        aside.replace(aside.with_suffix(""))


def submit(directory: Path, *, partition: str, trainings: int, nodes: int, minutes: int) -> None:
    """Submit the training jobs, each as one job that is requeued for ever."""
    executor = submitit.SlurmExecutor(directory / "logs", max_num_timeout=1_000_000)
    executor.update_parameters(
        job_name="requeue",
        partition=partition,
        nodes=nodes,
        ntasks_per_node=1,
        exclusive=True,
        time=minutes,
        signal_delay_s=_WARNING_SECONDS,
        additional_parameters={"requeue": True},
    )
    with executor.batch():
        for number in range(trainings):
            home = directory / f"training-{number}"
            home.mkdir(parents=True)
            executor.submit(Training(str(home)))


def account(directory: Path) -> dict[str, Any]:
    """Summarize the training job work that is not lost."""
    done = {"step_node_seconds": 0.0, "samples": 0}
    fragments = []
    for home in sorted(directory.glob("training-*")):
        runs = [json.loads(file.read_text(encoding="utf-8")) for file in home.glob("run-*.json")]
        if runs:
            last = max(runs, key=lambda run: float(run["now"]))
            for key in done:
                done[key] += last[key]
        fragments += [(home.name, run["nodes"], run["started"], run["now"]) for run in runs]
    return {**done, "fragments": fragments}


def main() -> int:
    """Serve one run, as `_slurm_freetrain.main` does."""
    options = json.loads(sys.argv[1])
    directory = Path(options["directory"])
    print("ready", flush=True)
    sys.stdin.readline()
    submit(
        directory,
        partition=options["partition"],
        trainings=options["trainings"],
        nodes=options["fixed_nodes"],
        minutes=options["fixed_minutes"],
    )
    sys.stdin.readline()
    print(json.dumps(account(directory)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
