"""The driver on the login host, as the tests see it."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from freetrain_parsl.executor.journal import read_journal
from freetrain_parsl.report.projection.run import RunState
from freetrain_parsl.training.fragment import run_local
from tests.executor.scenario import make_app

if TYPE_CHECKING:
    from collections.abc import Callable

    from freetrain_parsl.executor.journal import JournalEntry
    from tests.support.hosts import Hosts

ROOT = Path(__file__).parents[2]
EPOCHS, SAMPLES = 20, 200


@cache
def parameters_of_an_undisturbed_training() -> list[float]:
    """Train in this process."""
    return run_local(make_app().func, epochs=EPOCHS)["parameters"]


class Training:
    """A training job that is slow until `finish`."""

    def __init__(self, login: Login, name: str) -> None:
        self.login = login
        self.name = name
        self.slow = login.directory / f"{name}.slow"
        self.slow.touch()

    @property
    def run(self):
        return self.login.run.trainings[self.name]

    @property
    def step(self) -> int:
        return self.run.progress["step"]

    def until(self, nodes: int, seconds: float = 180.0) -> int:
        """Wait until it runs on `nodes` nodes, and has made steps there; return the last."""

        def there(run) -> bool:
            return self.name in run.trainings and len(self.run.nodes) == nodes and bool(self.run.progress)

        self.login.until(there, seconds)
        return self.until_steps(seconds)

    def until_steps(self, seconds: float = 180.0, steps: int = 3) -> int:
        """Wait until it has made some more steps; return the last."""
        before = self.step
        self.login.until(lambda _: self.step >= before + steps, seconds)
        return self.step

    def answer(self, seconds: float = 180.0) -> dict[str, Any]:
        """Wait for the result or the error."""
        return self.login.answer(self.name, seconds)

    def finish(self, seconds: float = 180.0) -> None:
        """Let it run fast; assert that it ends with the parameters of an undisturbed run, each sample used once."""
        self.slow.unlink()
        answer = self.answer(seconds)
        assert "result" in answer, answer
        result = answer["result"]
        assert result["metrics"]["samples"] == EPOCHS * SAMPLES
        differences = [
            abs(a - b) for a, b in zip(result["parameters"], parameters_of_an_undisturbed_training(), strict=True)
        ]
        assert max(differences) < 1e-4
        self.login.until(lambda run: run.trainings[self.name].progress.get("samples_total"))
        progress = self.run.progress
        assert (progress["samples_lost"], progress["duplicate_samples"]) == (0, 0)


class Login:
    """A driver on the host ``login``; its nodes are the hosts whose names begin with ``n``."""

    def __init__(
        self,
        hosts: Hosts,
        directory: Path,
        *,
        environment: dict[str, str],
        provider: str = "embedded",
        max_failed_blocks: int = 5,
        timeout: float = 5.0,
        **settings,
    ) -> None:
        parameters_of_an_undisturbed_training()  # takes seconds, during which a training job would wait for its test
        self.hosts = hosts
        self.directory = directory
        self.answers: dict[str, dict[str, Any]] = {}
        nodes = [host.name for host in hosts if host.name.startswith("n")]
        plan = {
            "directory": str(directory),
            "provider": provider,
            "nodes": len(nodes),
            "enter": hosts.entering("FREETRAIN_CLUSTER_NODE"),
            "nodes_per_block": None if provider == "slurm" else 1,  # 1: a failed host can be requested again alone
            "max_failed_blocks": max_failed_blocks,
            "timeout": timeout,
            "settings": settings,
        }
        self._errors = (directory / "driver.err").open("wb")
        self._process = hosts["login"].popen(
            sys.executable,
            "-m",
            "tests.hosts.driver",
            json.dumps(plan),
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=environment,
        )
        self.started = json.loads(self._process.stdout.readline() or '{"error": "no output"}')
        assert "journal" in self.started, (self.started, (directory / "driver.err").read_text())
        self._run: RunState | None = None
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self._process.stdout:
            answer = json.loads(line)
            self.answers[answer["name"]] = answer

    def close(self) -> None:
        """End the driver as at the end of a script; no effect if it has ended."""
        if self._process.poll() is not None:
            return
        self._process.stdin.close()
        self._process.wait(60)
        self._reader.join(10)
        self._process.stdout.close()
        self._errors.close()

    @property
    def run(self) -> RunState:
        if self._run is None:
            self._run = RunState(Path(self.started["journal"]))
        return self._run.refresh()

    def journal(self) -> list[JournalEntry]:
        """Read the journal."""
        return [entry for _, entry in read_journal(Path(self.started["journal"]))]

    @property
    def log(self) -> str:
        """Return the executor's log."""
        return Path(self.started["journal"]).with_name("freetrain.log").read_text(encoding="utf-8")

    def until(self, condition: Callable[[RunState], Any], seconds: float = 180.0) -> Any:
        """Wait until `condition` holds for the run, and return its value."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if value := condition(self.run):
                return value
            time.sleep(0.1)
        raise AssertionError(f"not within {seconds} s: {self.run.trainings}\n{self.log[-3000:]}")

    def answer(self, name: str, seconds: float) -> dict[str, Any]:
        """Wait for the outcome of a training job."""
        self.until(lambda _: name in self.answers, seconds)
        return self.answers[name]

    def train(self, name: str, nodes: int) -> Training:
        """Submit a training job."""
        training = Training(self, name)
        order = {"name": name, "nodes": nodes, "epochs": EPOCHS, "slow": str(training.slow)}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return training
