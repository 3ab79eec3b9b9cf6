"""What the mover keeps in the run directory: its jobs, and what ``freetrain status`` shows of it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from freetrain_parsl.errors import InvalidInput
from freetrain_parsl.extensions.globus.storage.carrier import CopyJob, Parcel
from freetrain_parsl.storage.atomic_files import replace_text
from freetrain_parsl.storage.owned_files import read_small_file
from freetrain_parsl.storage.stored_json import parse_stored

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["MOST_MEASURED", "STATE_FILE", "MeasuredCopy", "MoverPace", "MoverState"]

STATE_FILE = "globus.json"

MOST_MEASURED = 50
"""Copies whose duration is kept."""

_VERSION = 1


@dataclass(frozen=True)
class MeasuredCopy:
    """A copy from home, or to it, that has succeeded: its bytes, and the seconds until its end was noticed."""

    from_home: bool
    size: int
    seconds: float


@dataclass(frozen=True)
class MoverState:
    """The state of a run's mover.

    Parameters
    ----------
    jobs
        Active ones.
    lines
        What it is doing, for the user.
    measured
        The last copies that have succeeded, the newest last.
    whole
        The newest checkpoint of each training that home has listed as whole: a later listing may leave it out.
    """

    jobs: Sequence[CopyJob] = ()
    lines: Sequence[str] = field(default_factory=tuple)
    measured: Sequence[MeasuredCopy] = ()
    whole: Sequence[Parcel] = ()

    def document(self) -> dict[str, Any]:
        """Return the content of the file."""
        return {
            "version": _VERSION,
            "jobs": [job.as_json() for job in self.jobs],
            "lines": list(self.lines),
            "measured": [[copy.from_home, copy.size, copy.seconds] for copy in self.measured],
            "whole": [vars(parcel) for parcel in self.whole],
        }

    def write(self, run_dir: Path) -> None:
        """Replace the file durably.

        Raises
        ------
        OSError
            The file system operation failed.
        """
        replace_text(run_dir / STATE_FILE, json.dumps(self.document(), indent=1) + "\n")

    @classmethod
    def read(cls, run_dir: Path) -> MoverState:
        """Read the file; an empty state if there is none.

        Raises
        ------
        InvalidInput
            It is damaged.
        """
        path = run_dir / STATE_FILE
        try:
            document: Any = parse_stored(read_small_file(path))
            if document["version"] != _VERSION:
                raise InvalidInput(f"{path} is of another version of FreeTrain")
            measured = (
                MeasuredCopy(bool(fetched), int(size), float(seconds))
                for fetched, size, seconds in document.get("measured", [])
            )
            jobs = (CopyJob.from_json(job) for job in document["jobs"])
            whole = tuple(map(Parcel.from_json, document.get("whole", [])))  # earlier versions did not write it
            return cls(tuple(jobs), tuple(map(str, document["lines"])), tuple(measured), whole)
        except FileNotFoundError:
            return cls()
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InvalidInput(f"{path} cannot be read ({error}); remove it to copy all checkpoints again") from error


@dataclass(frozen=True)
class MoverPace:
    """Seconds between the mover's actions.

    Parameters
    ----------
    turn
        Between passes of its loop.
    scan
        Between looks for new checkpoints of trainings that have ended or leave.
    copies
        Between copies of running trainings, at least; those of all trainings are made together. A site that stops
        answering loses its trainings at the end of the lease, so what is trained between copies is little beside that.
    request
        Between two requests to Globus, at least.
    poll_least, poll_most
        Between questions for the state of a task: short at first, then a tenth of its age.
    retry, longest
        Until something that failed is tried again: first, and at most.
    """

    turn: float
    scan: float
    copies: float
    request: float
    poll_least: float
    poll_most: float
    retry: float
    longest: float

    @classmethod
    def of(cls, lease: float) -> MoverPace:
        """Return the pace that suits a lease."""
        return cls(
            turn=min(0.25, lease / 100),
            scan=min(2.0, lease / 20),
            copies=min(120.0, lease / 5),
            request=min(0.1, lease / 500),
            poll_least=min(2.0, lease / 20),
            poll_most=min(30.0, lease / 10),
            retry=min(5.0, lease / 20),
            longest=min(120.0, lease / 5),
        )
