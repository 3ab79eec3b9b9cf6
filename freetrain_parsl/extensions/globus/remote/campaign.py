"""A campaign at a site, as a Python object that never blocks, and the records of what was started from here."""

from __future__ import annotations

import html
import json
import os
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from freetrain_parsl.campaign.summary import ago
from freetrain_parsl.errors import FreeTrainError, InvalidInput, RemoteError, UsageError
from freetrain_parsl.extensions.globus.remote.compute import HUNG, ComputeEndpoint, call_within, poll_delays
from freetrain_parsl.extensions.globus.remote.messages import check_run_name, field_of, parse_status
from freetrain_parsl.extensions.globus.remote.preparation import prepare
from freetrain_parsl.report.output import write_output

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from typing_extensions import Self

    from freetrain_parsl.campaign.detached import RunStatus
    from freetrain_parsl.extensions.globus.remote.preparation import Preparation

__all__ = ["RemoteCampaign", "RunRecord", "RunRecords"]


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


_START_WAIT = 30.0  # seconds for which the site waits for the driver, so that its refusals are in the answer
_STOP_WAIT = 45.0
_SHOWN = 20  # training jobs in a representation
_COLUMNS = ("training", "state", "done")


class RemoteCampaign:
    """A run of a campaign at a site.

    Every method sends one short call in the background and returns a future; the object shows the state that was seen
    last. The campaign does not depend on it: it continues when this process ends, and `attach` finds it again.

    Parameters
    ----------
    record
        What was started, and where.
    endpoint
        Where calls are sent; default: the record's.
    records
        Where records are stored.
    clock
        Seconds since the epoch.
    """

    def __init__(
        self,
        record: RunRecord,
        *,
        endpoint: ComputeEndpoint | None = None,
        records: RunRecords | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._record = record
        self._endpoint = endpoint or ComputeEndpoint(record.endpoint, function=record.function)
        self._records = records or RunRecords()
        self._clock = clock
        self._lock = threading.Lock()
        self._seen: tuple[RunStatus, float] | None = None
        self._doing = ""
        self._error = ""
        # One call at a time, in order.
        self._calls = ThreadPoolExecutor(1, thread_name_prefix="freetrain-remote")

    @classmethod
    def start(
        cls,
        campaign: str | Path,
        *,
        endpoint: str | ComputeEndpoint,
        site: str = "local",
        settings: Mapping[str, str] | None = None,
        include: Sequence[str | Path] = (),
        any_versions: bool = False,
        records: RunRecords | None = None,
    ) -> Self:
        """Check a campaign here, then send it in the background.

        Parameters
        ----------
        campaign
            The campaign file.
        endpoint
            UUID of the endpoint at the site.
        site
            A site file, or the name of a shipped one.
        settings
            Values of ``${NAME}`` in both files.
        include
            Further files that travel.
        any_versions
            Whether other versions of the software at the site are accepted.
        records
            Where the record is stored.

        Raises
        ------
        InvalidInput
            A file is invalid, or cannot travel; nothing was sent.
        """
        place = endpoint if isinstance(endpoint, ComputeEndpoint) else ComputeEndpoint(endpoint)
        preparation = prepare(
            Path(campaign),
            site,
            settings=[f"{name}={value}" for name, value in (settings or {}).items()],
            include=[Path(path) for path in include],
            any_versions=any_versions,
        )
        started = cls.of(preparation, Path(campaign), place, records or RunRecords())
        started.submit(preparation)
        return started

    @classmethod
    def of(cls, preparation: Preparation, campaign: Path, endpoint: ComputeEndpoint, records: RunRecords) -> Self:
        """Record a prepared campaign, so that it can be found even if the answer to its start is lost."""
        return cls(records.create(preparation.run, endpoint.id, campaign), endpoint=endpoint, records=records)

    @classmethod
    def attach(cls, run: str | None = None, *, endpoint: str | None = None, records: RunRecords | None = None) -> Self:
        """Find a run that was started before.

        Parameters
        ----------
        run
            Its name, or its campaign file; default: the newest that was started from here.
        endpoint
            UUID; needed for a run that was started on another machine.
        records
            Where records are stored.

        Raises
        ------
        InvalidInput
            There is none.
        """
        records = records or RunRecords()
        return cls(records.find(run, endpoint), records=records)

    @property
    def run(self) -> str:
        """Name of the run."""
        return self._record.run

    @property
    def seen(self) -> RunStatus | None:
        """The state that was seen last, without asking; ``None`` before the first answer."""
        with self._lock:
            return None if self._seen is None else self._seen[0]

    def submit(self, preparation: Preparation) -> Future[RunStatus]:
        """Send the campaign; sending it again changes nothing. What is refused is not recorded."""

        def start() -> RunStatus:
            try:
                return self._status_of({**preparation.request, "wait": _START_WAIT})
            except UsageError as error:
                # A login that is refused while the answer is fetched says nothing about the run.
                if isinstance(error, InvalidInput) or not self._endpoint.submitted:
                    self._records.forget(self.run)
                raise

        return self._ask("starting", start)

    def status(self) -> Future[RunStatus]:
        """Ask for the state."""
        return self._ask("asking for the state", lambda: self._status_of(self._request("status")))

    def logs(self, offset: int = -1) -> Future[Mapping[str, Any]]:
        """Fetch output of the driver.

        Parameters
        ----------
        offset
            Bytes to skip; negative: the end of the output.

        Returns
        -------
        Future of mapping
            ``text``, ``offset`` for the next call, and ``state``.
        """

        def logs() -> Mapping[str, Any]:
            answer = self._call(self._request("logs", offset=offset))
            return {"text": field_of(answer, "text", str), "offset": field_of(answer, "offset", int),
                    "state": field_of(answer, "state", str)}  # fmt: skip

        return self._ask("fetching output", logs)

    def results(self) -> Future[list[Mapping[str, Any]]]:
        """Fetch the training jobs with their results, as of ``freetrain status --json``."""
        return self._ask("fetching results", lambda: field_of(self._call(self._request("results")), "trainings", list))

    def stop(self) -> Future[RunStatus]:
        """Ask the driver to save all training jobs, cancel its batch jobs and exit."""
        return self._ask("stopping", lambda: self._status_of(self._request("stop", wait=_STOP_WAIT)))

    def resume(
        self, *, retry: Sequence[str] = (), retry_failed: bool = False, on_code_change: str | None = None
    ) -> Future[RunStatus]:
        """Continue a run that was stopped, or whose driver died.

        Parameters
        ----------
        retry
            Failed or cancelled training jobs to retry.
        retry_failed
            Whether all failed training jobs are retried.
        on_code_change
            As of ``freetrain resume``.
        """
        request = self._request(
            "resume", retry=list(retry), retry_failed=retry_failed, on_code_change=on_code_change, wait=_START_WAIT
        )
        return self._ask("resuming", lambda: self._status_of(request))

    def clean(self, *, delete: bool = False) -> Future[Mapping[str, Any]]:
        """Cancel the jobs that a dead driver has left.

        Parameters
        ----------
        delete
            Whether the run's files and checkpoints at the site are deleted, too.

        Returns
        -------
        Future of mapping
            ``done`` and ``message``.
        """

        def clean() -> Mapping[str, Any]:
            answer = self._call(self._request("clean", delete=delete, wait=_STOP_WAIT))
            done, message = field_of(answer, "done", bool), field_of(answer, "message", str)
            if delete and done:
                self._records.forget(self.run)
            return {"done": done, "message": message}

        return self._ask("cleaning", clean)

    def wait(self, timeout: float | None = None, *, sleep: Callable[[float], None] = time.sleep) -> RunStatus:
        """Block until no driver runs any more, asking at growing intervals, also while the site does not answer.

        Parameters
        ----------
        timeout
            Seconds; ``None``: no limit.

        Returns
        -------
        RunStatus
            The state that was seen last.

        Raises
        ------
        RemoteError
            The site did not answer the last question before the timeout.
        UsageError
            The login is refused, or the run is not there.
        """
        end = None if timeout is None else time.monotonic() + timeout
        for delay in poll_delays(2.0, 1.5, 60.0):
            late = end is not None and time.monotonic() >= end
            try:
                status = self.status().result()
            except RemoteError:
                if late:
                    raise
            else:
                if status.over or late:
                    return status
            sleep(delay)
        raise AssertionError("the delays do not end")

    # Calls.

    def _request(self, verb: str, **more: Any) -> dict[str, Any]:
        return {"verb": verb, "run": self.run, **more}

    def _call(self, request: Mapping[str, Any]) -> dict[str, Any]:
        endpoint = self._endpoint
        answer = call_within(HUNG, lambda: endpoint.call(request), endpoint.forget_client)
        if self._endpoint.function != self._record.function:
            self._record = replace(self._record, function=self._endpoint.function)
            if self._record.campaign:
                self._records.store(self._record)
        return answer

    def _status_of(self, request: Mapping[str, Any]) -> RunStatus:
        status = parse_status(self._call(request))
        with self._lock:
            self._seen = status, self._clock()
        return status

    def _ask(self, doing: str, call: Callable[[], Any]) -> Future[Any]:
        def told() -> Any:
            with self._lock:
                self._doing, self._error = doing, ""
            try:
                return call()
            except FreeTrainError as error:
                with self._lock:
                    self._error = str(error)
                raise
            finally:
                with self._lock:
                    self._doing = ""

        return self._calls.submit(told)

    # Representations.

    def __repr__(self) -> str:
        return "\n".join([self._head(), *("  ".join(row) for row in self._rows())])

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:  # noqa: ARG002 - IPython's
        head = "".join(f"<th style='text-align:left'>{name}</th>" for name in _COLUMNS)
        rows = "".join(
            "<tr>" + "".join(f"<td style='text-align:left'>{html.escape(cell)}</td>" for cell in row) + "</tr>"
            for row in self._rows()
        )
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>" if rows else ""
        return {"text/plain": repr(self), "text/html": f"<div><p>{html.escape(self._head())}</p>{table}</div>"}

    def _head(self) -> str:
        with self._lock:
            seen, doing, error = self._seen, self._doing, self._error
        parts = [f"{self.run} at endpoint {self._record.endpoint}"]
        if seen is not None:
            status, when = seen
            parts.append(f"{status.state} on {status.host}, seen {ago(self._clock() - when)}")
            if status.message:
                parts.append(status.message)
        else:
            parts.append("not asked yet: .status()")
        if doing:
            parts.append(f"{doing} …")
        if error:
            parts.append(f"error: {error}")
        return "; ".join(parts)

    def _rows(self) -> list[tuple[str, str, str]]:
        status = self.seen
        trainings = [] if status is None or status.summary is None else status.summary["trainings"]
        rows = [
            (str(item["name"]), str(item["state"]), "" if item["share"] is None else f"{item['share']:.0%}")
            for item in trainings[:_SHOWN]
        ]
        if len(trainings) > _SHOWN:
            rows.append((f"… and {len(trainings) - _SHOWN} more", "", ""))
        return rows
