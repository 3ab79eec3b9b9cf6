"""What was started from this machine: one small file for each run, so that later commands know its endpoint."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from freetrain_parsl.errors import InvalidInput
from freetrain_parsl.extensions.globus.remote.messages import check_run_name
from freetrain_parsl.report.output import write_output

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["RunRecord", "RunRecords"]


@dataclass(frozen=True)
class RunRecord:
    """A run that was started from here.

    Parameters
    ----------
    run
        Its name.
    endpoint
        UUID of the endpoint.
    campaign
        Absolute path of the campaign file here.
    created
        Seconds since the epoch.
    function
        Id of the registered function; empty before it is registered.
    """

    run: str
    endpoint: str
    campaign: str
    created: float
    function: str = ""


class RunRecords:
    """The records of this user, in a private directory.

    Parameters
    ----------
    directory
        Default: ``freetrain/remote`` in ``$XDG_STATE_HOME``, which is ``~/.local/state`` if it is not set.
    clock
        Seconds since the epoch.
    """

    def __init__(self, directory: Path | None = None, clock: Callable[[], float] = time.time) -> None:
        state = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser()
        self._directory = state / "freetrain" / "remote" if directory is None else directory
        self._clock = clock

    def create(self, run: str, endpoint: str, campaign: Path) -> RunRecord:
        """Make a record and store it."""
        record = RunRecord(check_run_name(run), endpoint, str(campaign.absolute()), self._clock())
        self.store(record)
        return record

    def store(self, record: RunRecord) -> None:
        """Store a record, atomically, private to the user."""
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_output(self._directory / f"{record.run}.json", json.dumps(asdict(record)))

    def find(self, which: str | None, endpoint: str | None = None) -> RunRecord:
        """Return a record.

        Parameters
        ----------
        which
            Name of the run, or a campaign file, for the newest run of it; ``None``: the newest run.
        endpoint
            Only those at this endpoint. A run that was started elsewhere needs it, with its name.

        Raises
        ------
        InvalidInput
            There is none.
        """
        records = [item for item in self.all() if endpoint is None or endpoint.lower() == item.endpoint.lower()]
        is_file = which is not None and (which.endswith((".yaml", ".yml")) or "/" in which)
        if is_file:
            path = str(Path(str(which)).absolute())
            records = [item for item in records if item.campaign == path]
        elif which is not None:
            name = check_run_name(which)
            records = [item for item in records if item.run == name]
            if not records and endpoint is not None:
                return RunRecord(name, endpoint, "", self._clock())
        if not records:
            named = f" {which}" if which else ""
            raise InvalidInput(
                f"no run{named} was started from here; start one with 'freetrain remote start', or give its name and "
                "--endpoint"
            )
        return records[-1]

    def all(self) -> list[RunRecord]:
        """Return all records, oldest first.

        Raises
        ------
        InvalidInput
            A file is damaged.
        """
        return sorted(map(_read, self._directory.glob("*.json")), key=lambda item: (item.created, item.run))

    def forget(self, run: str) -> None:
        """Remove a record."""
        (self._directory / f"{check_run_name(run)}.json").unlink(missing_ok=True)


def _read(path: Path) -> RunRecord:
    try:
        return RunRecord(**json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError):
        raise InvalidInput(f"{path} is damaged; remove it") from None
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error.strerror}") from None
