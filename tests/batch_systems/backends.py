"""Batch systems for the tests: the embedded one, fake Slurm and PBS commands in front of it, a real Slurm."""

from __future__ import annotations

import shutil
import socket
import threading
from abc import ABC, abstractmethod
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parsl.launchers import MpiExecLauncher, SrunLauncher
from parsl.providers import PBSProProvider, SlurmProvider

from freetrain_parsl import EmbeddedClusterProvider
from freetrain_parsl.cluster import registry
from freetrain_parsl.extensions.demo.warm_start import ADDRESS, CLIENT
from freetrain_parsl.extensions.demo.warm_start.client import circumstances
from tests.support.fake_commands import calls, clear_mishaps, install_fake_pbs, install_fake_slurm, set_mishap

if TYPE_CHECKING:
    from parsl.providers.base import ExecutionProvider

    from freetrain_parsl.cluster.client import EmbeddedCluster
    from tests.support.slurm.loopback import LoopbackSlurm

ROOT = Path(__file__).parents[2]
WORKER_INIT = f"export PYTHONPATH={ROOT}"


class Backend(ABC):
    """A batch system, as used by its administrator and the main queue.

    Attributes
    ----------
    nodes
        Number of nodes.
    grace
        Seconds between a preempted job's signal and its end.
    """

    nodes: int
    grace: float

    @abstractmethod
    def provider(self) -> ExecutionProvider:
        """Make a provider of blocks that the main queue may preempt."""

    @abstractmethod
    def submit_main(self, nodes: int, seconds: float) -> str:
        """Submit a job of `seconds` to the main queue."""

    @abstractmethod
    def has_started(self, job: str) -> bool:
        """Return whether a main job has started."""

    @abstractmethod
    def jobs(self) -> dict[str, str]:
        """Return our live jobs: id -> state."""

    @abstractmethod
    def cancel(self, job: str) -> None:
        """Cancel one of our jobs as the administrator."""

    @abstractmethod
    def break_down(self) -> None:
        """Stop responding; running jobs continue."""

    @abstractmethod
    def mend(self) -> None:
        """Respond again; no effect if it is not broken."""

    @abstractmethod
    def times_asked(self) -> int:
        """Count the commands or requests since the last `break_down`."""

    def running(self) -> str:
        """Return our only running job."""
        (job,) = [job for job, state in self.jobs().items() if state == "RUNNING"]
        return job


class Embedded(Backend):
    """The embedded cluster. When broken, it closes all connections."""

    def __init__(self, cluster: EmbeddedCluster) -> None:
        self.cluster = cluster
        self.nodes = cluster.nodes
        self.grace = cluster.grace.total_seconds()
        self._deaf: socket.socket | None = None
        self._hung_up = 0

    def provider(self) -> ExecutionProvider:
        return EmbeddedClusterProvider(self.cluster.name)

    def submit_main(self, nodes: int, seconds: float) -> str:
        return self.cluster.client.submit(
            ["sleep", str(seconds)], nodes=nodes, walltime=timedelta(seconds=seconds + 10), preemptible=False
        )

    def has_started(self, job: str) -> bool:
        return self.cluster.client.jobs([job])[job]["start"] is not None

    def jobs(self) -> dict[str, str]:
        queue = self.cluster.client.queue()
        return {job: told["state"] for job, told in queue.items() if told["kind"] == "preemptible"}

    def cancel(self, job: str) -> None:
        self.cluster.client.cancel([job])

    def break_down(self) -> None:
        self._hung_up = 0
        path = registry.socket_path(self.cluster.name)
        path.rename(path.with_suffix(".aside"))
        self._deaf = socket.socket(socket.AF_UNIX)
        self._deaf.bind(str(path))
        self._deaf.listen()
        threading.Thread(target=self._hang_up, args=(self._deaf,), daemon=True).start()

    def _hang_up(self, deaf: socket.socket) -> None:
        while True:
            try:
                connection, _ = deaf.accept()
            except OSError:  # repaired
                return
            self._hung_up += 1
            connection.close()

    def mend(self) -> None:
        if self._deaf is not None:
            path = registry.socket_path(self.cluster.name)
            path.with_suffix(".aside").replace(path)
            self._deaf.shutdown(socket.SHUT_RDWR)
            self._deaf.close()
            self._deaf = None

    def times_asked(self) -> int:
        return self._hung_up


class _Fake(Embedded):
    """Commands of a batch system in front of an embedded cluster."""

    def __init__(self, cluster: EmbeddedCluster, directory: Path) -> None:
        super().__init__(cluster)
        self.directory = directory
        self._asked_before = 0

    def break_down(self) -> None:
        set_mishap(self.directory, "down")
        self._asked_before = len(calls(self.directory))

    def mend(self) -> None:
        clear_mishaps(self.directory)

    def times_asked(self) -> int:
        return len(calls(self.directory)) - self._asked_before


def _warm(provider: Any) -> ExecutionProvider:
    """Start its nodes as those of the embedded cluster, which they are."""
    provider.node_starter = CLIENT
    return provider


class FakeSlurm(_Fake):
    """Fake Slurm commands, to be added to PATH from `commands`."""

    def __init__(self, cluster: EmbeddedCluster, directory: Path) -> None:
        super().__init__(cluster, directory)
        self.commands = install_fake_slurm(directory, cluster.name)

    def provider(self) -> ExecutionProvider:
        return _warm(SlurmProvider(partition="backfill", launcher=SrunLauncher(), worker_init=WORKER_INIT))


class FakePbs(_Fake):
    """Fake PBS commands, to be added to PATH from `commands`."""

    def __init__(self, cluster: EmbeddedCluster, directory: Path) -> None:
        super().__init__(cluster, directory)
        self.commands = install_fake_pbs(directory, cluster.name)

    def provider(self) -> ExecutionProvider:
        # A PBS job has no other variables of its submitter; without these its nodes could not be forked.
        passed = ",".join([ADDRESS, *circumstances()["variables"]])
        return _warm(
            PBSProProvider(
                queue="backfill",
                cpus_per_node=4,
                scheduler_options=f"#PBS -v {passed}",
                launcher=MpiExecLauncher(),
                worker_init=WORKER_INIT,
            )
        )


class Slurm(Backend):
    """A real Slurm, and a partition of it for our blocks. When broken, its controller is stopped."""

    def __init__(self, cluster: LoopbackSlurm, partition: str = "preemptible") -> None:
        self.cluster = cluster
        self.partition = partition
        self.nodes = len(cluster.node_names)
        self.grace = 10.0
        self.commands: Path | None = None

    def count_commands(self, directory: Path) -> Path:
        """Write wrappers that record each call; to be added to PATH."""
        self.commands = directory
        directory.mkdir()
        for name in ("sbatch", "scancel", "scontrol", "sinfo", "squeue", "sacct"):
            real = shutil.which(name, path=self.cluster.environment["PATH"])
            assert real is not None, f"{name} comes with the others"
            (directory / name).write_text(f'#!/bin/sh\necho {name} >>{directory}/calls\nexec {real} "$@"\n')
            (directory / name).chmod(0o755)
        return directory

    def provider(self) -> ExecutionProvider:
        return SlurmProvider(partition=self.partition, launcher=SrunLauncher(), worker_init=WORKER_INIT, cmd_timeout=5)

    def submit_main(self, nodes: int, seconds: float) -> str:
        options = (f"--nodes={nodes}", "--partition=main", "--exclusive", "--time=1")
        return self.cluster.submit(*options, command=f"sleep {seconds}")

    def has_started(self, job: str) -> bool:
        return self.cluster.state_of(job) != "PENDING"

    def jobs(self) -> dict[str, str]:
        lines = self.cluster.run("squeue", "--noheader", "--format=%i %T %j").splitlines()
        words = (line.split() for line in lines)
        return {job: state for job, state, name in words if name.startswith("freetrain.")}

    def cancel(self, job: str) -> None:
        self.cluster.run("scancel", job)

    def break_down(self) -> None:
        self.cluster.stop_controller()
        if self.commands is not None:
            (self.commands / "calls").write_text("")

    def mend(self) -> None:
        self.cluster.start_controller()

    def times_asked(self) -> int:
        assert self.commands is not None, "call `count_commands` first"
        return len((self.commands / "calls").read_text().splitlines())
