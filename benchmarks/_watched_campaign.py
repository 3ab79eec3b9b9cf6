"""A real campaign on an embedded cluster whose steps are counted, for what the viewers of its page cost it."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

__all__ = ["WatchedCampaign"]

_FREETRAIN = str(Path(sys.executable).with_name("freetrain"))
_SITE = """\
system: local
block: {nodes: 1}
planner: {startup: 5 s, min_useful: 2 s, max_walltime: 3600 s}
trainings: {threads_per_slot: 1}
"""
_CAMPAIGN = """\
trainings:
  - {app: 'app.py:train', name: steps, arguments: {counter: COUNTER}}
"""
_APP = '''\
import os

import torch

from freetrain_parsl import training_app


@training_app
def train(session, counter):
    """Train a small network; write the number of steps to a file."""
    model, _ = session.prepare(torch.nn.Linear(32, 32), torch.optim.SGD, lr=1e-4)
    data = session.loader(torch.utils.data.TensorDataset(torch.randn(2000, 32)), batch_size=20)
    file = os.open(counter, os.O_WRONLY)
    steps = 0
    for _ in session.epochs(1_000_000):
        for (batch,) in data:
            session.step(model(batch).square().mean())
            session.log(every=10, norm=float(steps))
            steps += 1
            os.pwrite(file, steps.to_bytes(8, "little"), 0)
'''


class WatchedCampaign:
    """A campaign of one training job with small steps, which runs until it is stopped.

    Parameters
    ----------
    directory
        An empty directory.
    """

    def __init__(self, directory: Path) -> None:
        self.run_dir = directory / "run"
        self._counter = directory / "counter"
        self._counter.write_bytes(bytes(8))
        (directory / "site.yaml").write_text(_SITE)
        (directory / "app.py").write_text(_APP)
        (directory / "campaign.yaml").write_text(_CAMPAIGN.replace("COUNTER", str(self._counter)))
        command = ["run", "campaign.yaml", "--config", "site.yaml", "--run-dir", str(self.run_dir), "--detach"]
        subprocess.run([_FREETRAIN, *command], cwd=directory, check=True, stdout=subprocess.DEVNULL)
        end = time.monotonic() + 300
        while self.steps() < 100:
            if time.monotonic() > end:
                raise TimeoutError(f"{self.run_dir}: no training job has begun")
            time.sleep(0.2)

    def steps(self) -> int:
        """Return the number of steps so far."""
        return int.from_bytes(self._counter.read_bytes(), "little")

    def rate(self, seconds: float) -> float:
        """Measure steps per second for that many seconds."""
        begin, before = time.monotonic(), self.steps()
        time.sleep(seconds)
        return (self.steps() - before) / (time.monotonic() - begin)

    def close(self) -> None:
        """Stop it."""
        subprocess.run([_FREETRAIN, "stop", str(self.run_dir)], check=True, stdout=subprocess.DEVNULL)
