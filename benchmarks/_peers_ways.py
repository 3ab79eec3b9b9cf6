"""What the scripts of `peers.py` share: the request that they get, and their command line."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from _peers_workload import Job

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Request", "main"]


@dataclass(frozen=True)
class Request:
    """Which jobs to train, and where.

    Parameters
    ----------
    directory
        Shared directory of the way, for checkpoints and records.
    partition
        Preemptible partition, whose jobs are requeued.
    minutes
        Time limit of a job that saves its state.
    longest_minutes
        Time limit of a job that does not.
    address
        Of the host that the jobs are submitted from.
    jobs
        The training jobs.
    """

    directory: str
    partition: str
    minutes: int
    longest_minutes: int
    address: str
    jobs: Sequence[Job]

    @property
    def file(self) -> Path:
        """File with this request, which the jobs read."""
        return Path(self.directory, "request.json")

    def write(self) -> None:
        """Write it where jobs read it."""
        self.file.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, file: Path) -> Request:
        """Read it."""
        described = json.loads(file.read_text(encoding="utf-8"))
        return cls(**{**described, "jobs": [Job(**job) for job in described["jobs"]]})


def main(submit: Callable[[Request], None], train: Callable[[Job, str], None] | None = None) -> None:
    """Submit the request in a file, or train its job of a number: ``FILE``, or ``--train NUMBER FILE``."""
    import torch

    torch.set_num_threads(1)
    request = Request.read(Path(sys.argv[-1]))
    if sys.argv[1] == "--train":
        assert train is not None
        train(request.jobs[int(sys.argv[2])], request.directory)
    else:
        submit(request)
