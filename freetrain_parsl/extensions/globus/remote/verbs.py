"""At the site: answers to the calls of ``freetrain remote``. Each takes seconds; detached processes do the work.

A run has a directory ``RUN`` below ``$FREETRAIN_REMOTE_DIR`` (default ``~/.freetrain/remote``)::

    request.json      what was asked for
    assignment.json   the training jobs that a coordinator of several sites has assigned to this one
    retries.json      how often it has retried them
    campaign/         the unpacked files
    site/             the site file, if it is not a shipped one
    run/              the run directory, as of ``freetrain run``
    process.json, exit.*.json, output.log     of the last detached process; see `launch`
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import platform
import secrets
import shutil
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from freetrain_parsl.campaign.detached import status_of
from freetrain_parsl.campaign.launch import LOG, last_line, launch, process_of, read_document
from freetrain_parsl.campaign.owned_trainings import ASSIGNMENT, Assignment
from freetrain_parsl.campaign.store import RunStore
from freetrain_parsl.campaign.stored_run import DATABASE, StoredRun
from freetrain_parsl.errors import FreeTrainError, InvalidInput, UsageError
from freetrain_parsl.extensions.globus.remote.archive import unpack
from freetrain_parsl.extensions.globus.remote.look import planned_blocks, run_facts, site_facts
from freetrain_parsl.extensions.globus.remote.messages import LOG_BYTES, Versions, check_run_name, parse_status
from freetrain_parsl.extensions.globus.storage.carrier import backoff
from freetrain_parsl.report.output import write_output
from freetrain_parsl.storage.owned_files import require_own_directory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from freetrain_parsl.campaign.detached import RunStatus

__all__ = ["DIRECTORY", "answer", "failed_before", "retried", "take_retries"]

_RETRIES = "retries.json"
_UNSUCCESSFUL = ("failed", "cancelled")


def retried(root: Path) -> dict[str, int]:
    """Return training -> number of its last retry that was taken in, of a run's directory."""
    return read_document(root / _RETRIES) or {}


def failed_before(root: Path, run_dir: Path, attempts: Mapping[str, int]) -> list[str]:
    """Return the training jobs of a run that have failed or were cancelled here before the given attempts."""
    done = retried(root)
    states = {item.name: item.state for item in StoredRun(run_dir).trainings()}
    return [
        name for name, attempt in attempts.items() if attempt > done.get(name, 0) and states.get(name) in _UNSUCCESSFUL
    ]


def take_retries(root: Path, run_dir: Path | None, attempts: Mapping[str, int]) -> None:
    """Set training jobs that have failed to waiting, and note the attempts; no driver may run.

    The run directory is ``None`` if it has not been created.
    """
    if run_dir is not None:
        for name in failed_before(root, run_dir, attempts):
            RunStore(run_dir).retry(name)
    done = retried(root)
    later = {name: max(attempt, done.get(name, 0)) for name, attempt in attempts.items()}
    if later != {name: done.get(name, 0) for name in later}:
        write_output(root / _RETRIES, json.dumps({**done, **later}))


DIRECTORY = "FREETRAIN_REMOTE_DIR"
"""Variable of the endpoint: where runs are, instead of ``~/.freetrain/remote``."""

_REQUEST = "request.json"
_PERIOD = 0.1  # seconds between looks at a process
_LONGEST_WAIT = 60.0  # seconds
_RETRY_WAIT = 30.0  # seconds for which a call waits for a driver to end
_STARTS = "starts.json"  # of drivers for the last order
_FIRST_PAUSE = 15.0  # seconds between the first two starts of a driver for an order; doubled each time
_LONGEST_PAUSE = 900.0
_OPEN = ("waiting", "running")  # states of training jobs that have not ended


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """Answer a call.

    Parameters
    ----------
    request
        ``verb``, and what it needs.

    Returns
    -------
    dict of str to Any
        The verb's answer, or ``error`` (one line) and ``usage`` (whether the caller's input is the reason).
    """
    try:
        verb = request.get("verb")
        if not (isinstance(verb, str) and verb in _VERBS):
            raise InvalidInput(f"this site's freetrain-parsl has no remote verb {str(verb)[:40]!r}")
        return _VERBS[verb](request)
    except FreeTrainError as error:
        return {"error": str(error), "usage": isinstance(error, UsageError)}
    except OSError as error:  # the site's file system: full, read-only, or gone
        return {"error": f"{platform.node()}: {error}", "usage": False}


def _start(request: Mapping[str, Any]) -> dict[str, Any]:
    """Unpack a campaign and start its driver; a repeated call changes nothing."""
    root, stored = _unpacked(request)
    with _exclusive(root):
        if process_of(root) is None:
            launch(root, _first_command(root, stored), Path(stored["campaign"]).parent)
    return _wait(root, request, lambda status: status.state != "starting")


def _prepare(request: Mapping[str, Any]) -> dict[str, Any]:
    """Unpack a campaign for a coordinator of several sites, and describe the site; a repeated call changes nothing."""
    _root_directory, stored = _unpacked(request)
    return {**site_facts(stored), "host": platform.node()}


def _look(request: Mapping[str, Any]) -> dict[str, Any]:
    """Take in an assignment, start a driver if there is none for it, and describe the run and what the site offers."""
    root = _root(request)
    stored = read_document(root / _REQUEST, "campaign", "config", "settings") or {}
    order, trainings = request.get("order"), _texts(request, "trainings")
    if not isinstance(order, int):
        raise InvalidInput("order must be a whole number")
    attempts = _attempts(request, trainings)
    with _exclusive(root):
        assignment = Assignment.read(root / ASSIGNMENT)
        if order >= assignment.order:
            # A later order waits for the driver to end, if it needs another one for its retries.
            taken = _take_retries(root, attempts)
            if taken and order > assignment.order:
                assignment = Assignment(order, tuple(trainings))
                assignment.write(root / ASSIGNMENT)
        if request.get("start") and assignment.order == order:
            _drive_assigned(root, stored, assignment)
    plan = planned_blocks(stored) if request.get("plan") else {}
    document = _status(root).as_json()
    facts = {**site_facts(stored), **run_facts(root / "run"), "retried": retried(root)}
    return {**facts, **plan, "order": assignment.order, "status": document}


def _attempts(request: Mapping[str, Any], trainings: Sequence[str]) -> dict[str, int]:
    """Return training -> number of its retry, of those that are assigned to this site."""
    value = request.get("retry", {})
    if not (isinstance(value, dict) and all(isinstance(number, int) for number in value.values())):
        raise InvalidInput("retry must be numbers by training")
    return {name: value[name] for name in trainings if name in value}


def _take_retries(root: Path, attempts: Mapping[str, int]) -> bool:
    """Retry training jobs that have failed here; return whether that is done.

    A driver that runs would not notice: it saves its training jobs and ends, and the next one trains all.
    """
    run_dir = root / "run"
    created = (run_dir / DATABASE).is_file()
    if created and failed_before(root, run_dir, attempts) and not _status(root).over:
        if _status(root).state == "running":
            RunStore(run_dir).request_stop()
        if not parse_status(_wait(root, {"wait": _RETRY_WAIT}, lambda status: status.over)).over:
            return False
    take_retries(root, run_dir if created else None, attempts)
    return True


def _drive_assigned(root: Path, stored: Mapping[str, Any], assignment: Assignment) -> None:
    """Start a driver, unless one runs or nothing is to be done."""
    run_dir = root / "run"
    created = (run_dir / DATABASE).is_file()
    ended = {item.name for item in StoredRun(run_dir).trainings() if item.state not in _OPEN} if created else set()
    started = process_of(root) is not None
    if ended.issuperset(assignment.trainings) or (started and not _status(root).over):
        return
    if not _may_start(root / _STARTS, assignment.order, time.time()):
        return
    command = (
        ["resume", str(run_dir)] if created else [*_first_command(root, stored), "--assigned", str(root / ASSIGNMENT)]
    )
    launch(root, command, Path(stored["campaign"]).parent)


def _may_start(file: Path, order: int, now: float) -> bool:
    """Return whether a driver may be started for an order, and note it: one that fails is started ever more rarely."""
    last = read_document(file, "order", "count", "at")
    count = 0
    if last is not None and last["order"] == order:
        count = last["count"]
        if 0 <= now - last["at"] < backoff(count - 1, _FIRST_PAUSE, _LONGEST_PAUSE):
            return False
    write_output(file, json.dumps({"order": order, "count": count + 1, "at": now}))
    return True


def _first_command(root: Path, stored: Mapping[str, Any]) -> list[str]:
    command = ["run", stored["campaign"], "--config", stored["config"], "--run-dir", str(root / "run")]
    for setting in stored["settings"]:
        command += ["--set", setting]
    return command


def _unpacked(request: Mapping[str, Any]) -> tuple[Path, dict[str, Any]]:
    """Unpack a campaign, unless it is there; return its directory, and what was asked for."""
    run = check_run_name(request.get("run"))
    here, there = Versions.installed(), Versions.parse(_mapping(request, "versions"))
    mismatch = there.mismatch(here)
    if mismatch and not request.get("any_versions"):
        raise InvalidInput(
            f"{platform.node()} has other versions: {mismatch}; install the same, or start with --any-versions"
        )
    base = _base()
    root = base / run
    wanted = {key: request.get(key) for key in ("sha256", "site", "settings")}
    if not root.is_dir():
        _unpack_request(base, root, request, wanted)
    stored = read_document(root / _REQUEST)
    if stored is None:
        raise InvalidInput(f"{root} is not the directory of a run; start this one under another name")
    if {key: stored.get(key) for key in wanted} != wanted:
        raise InvalidInput(f"{root} is another run; start this one under another name")
    return root, stored


def _unpack_request(base: Path, root: Path, request: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Create the directory of a run, atomically."""
    aside = base / f".{root.name}.{secrets.token_hex(4)}"
    aside.mkdir(mode=0o700)
    try:
        try:
            data = base64.b64decode(str(request.get("archive")), validate=True)
        except ValueError as error:
            raise InvalidInput(f"the campaign's archive is damaged: {error}") from None
        campaign = unpack(data, str(request.get("sha256")), aside / "campaign")
        site = _mapping(request, "site")
        config = str(site.get("name"))
        if isinstance(site.get("text"), str):
            name = check_run_name(Path(str(site.get("file"))).name)
            (aside / "site").mkdir(mode=0o700)
            write_output(aside / "site" / name, str(site["text"]))
            config = str(root / "site" / name)
        settings = request.get("settings")
        if not (isinstance(settings, list) and all(isinstance(item, str) for item in settings)):
            raise InvalidInput("settings must be a list of NAME=VALUE")
        document = {**wanted, "campaign": str(root / "campaign" / campaign), "config": config}
        write_output(aside / _REQUEST, json.dumps(document))
        try:
            aside.rename(root)
        except OSError:
            if not root.is_dir():  # otherwise another call was faster
                raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _status(root: Path) -> RunStatus:
    run_dir = root / "run"
    store = StoredRun(run_dir) if (run_dir / DATABASE).is_file() else None
    return status_of(root, process_of(root), store)


def _logs(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return a part of the output: from `offset`, or its end if that is negative."""
    root, offset = _root(request), request.get("offset")
    if not isinstance(offset, int):
        raise InvalidInput("offset must be a whole number")
    try:
        with (root / LOG).open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            start = max(0, size - LOG_BYTES) if offset < 0 else min(offset, size)
            log.seek(start)
            data = log.read(LOG_BYTES)
    except FileNotFoundError:
        start, data = 0, b""
    return {"text": data.decode(errors="replace"), "offset": start + len(data), "state": _status(root).state}


def _check(_request: Mapping[str, Any]) -> dict[str, Any]:
    return {"versions": Versions.installed().as_json(), "host": platform.node()}


def _results(request: Mapping[str, Any]) -> dict[str, Any]:
    status = _status(_root(request))
    return {"state": status.state, "trainings": [] if status.summary is None else status.summary["trainings"]}


def _stop(request: Mapping[str, Any]) -> dict[str, Any]:
    root = _root(request)
    _wait(root, request, lambda status: status.state != "starting")
    status = _status(root)
    if status.state == "starting":
        raise InvalidInput(f"{root.name} is starting; stop it when it runs")
    if status.state == "running":
        RunStore(root / "run").request_stop()
    return _wait(root, request, lambda status: status.over)


def _resume(request: Mapping[str, Any]) -> dict[str, Any]:
    root = _root(request)
    status = _status(root)
    if not status.over or status.summary is None:
        raise InvalidInput(
            f"{root.name} is {status.state}; "
            + ("stop it first" if not status.over else f"it never ran: {status.message}; start it again, as a new run")
        )
    command = ["resume", str(root / "run")]
    for name in _texts(request, "retry"):
        command += ["--retry", name]
    if request.get("retry_failed"):
        command.append("--retry-failed")
    if isinstance(choice := request.get("on_code_change"), str):
        command += ["--on-code-change", choice]
    with _exclusive(root):
        launch(root, command, root)
    return _wait(root, request, lambda status: status.state != "starting")


def _clean(request: Mapping[str, Any]) -> dict[str, Any]:
    """Cancel what a dead driver has left in the queue; with `delete`, remove the run's files too."""
    root = _root(request)
    if not _status(root).over:
        raise InvalidInput(f"{root.name} is {_status(root).state}; stop it first")
    line, code = "nothing was submitted", 0
    if (root / "run" / DATABASE).is_file():
        with _exclusive(root):
            launch(root, ["clean", str(root / "run")], root)
        end = time.monotonic() + _seconds(request)
        while (process := process_of(root)) is None or (process.exit_code is None and process.running is not False):
            if time.monotonic() > end:
                return {"done": False, "message": "still waiting for the batch system; call it again"}
            time.sleep(_PERIOD)
        line, code = last_line(root), process.exit_code or 0
    if code == 0 and request.get("delete"):
        shutil.rmtree(root)
        line += f"; {root} is deleted"
    return {"done": code == 0, "message": line}


def _wait(root: Path, request: Mapping[str, Any], enough: Callable[[RunStatus], bool]) -> dict[str, Any]:
    end = time.monotonic() + _seconds(request)
    while not enough(status := _status(root)) and time.monotonic() < end:
        time.sleep(_PERIOD)
    return status.as_json()


def _base() -> Path:
    base = Path(os.environ.get(DIRECTORY) or "~/.freetrain/remote").expanduser()
    base.mkdir(mode=0o700, parents=True, exist_ok=True)
    require_own_directory(base, f"set {DIRECTORY} to another directory")
    return base


def _root(request: Mapping[str, Any]) -> Path:
    root = _base() / check_run_name(request.get("run"))
    if not (root / _REQUEST).is_file():
        raise InvalidInput(f"there is no run {root.name} in {root.parent} on {platform.node()}")
    return root


@contextmanager
def _exclusive(root: Path) -> Iterator[None]:
    """Let one call at a time start processes of a run."""
    descriptor = os.open(root / "launch.lock", os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _seconds(request: Mapping[str, Any]) -> float:
    wait = request.get("wait", 0.0)
    return min(_LONGEST_WAIT, float(wait)) if isinstance(wait, int | float) else 0.0


def _mapping(request: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = request.get(key)
    if not isinstance(value, dict):
        raise InvalidInput(f"{key} must be a mapping")
    return value


def _texts(request: Mapping[str, Any], key: str) -> list[str]:
    value = request.get(key, [])
    if not (isinstance(value, list) and all(isinstance(item, str) and not item.startswith("-") for item in value)):
        raise InvalidInput(f"{key} must be a list of names")
    return value


_VERBS: Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "check": _check,
    "start": _start,
    "prepare": _prepare,
    "look": _look,
    "status": lambda request: _status(_root(request)).as_json(),
    "logs": _logs,
    "results": _results,
    "stop": _stop,
    "resume": _resume,
    "clean": _clean,
}
