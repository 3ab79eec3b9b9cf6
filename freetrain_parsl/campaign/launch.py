"""At the site: a command of ``freetrain`` as a detached process, and what has become of it.

The process is in a session of its own, with no open files of the endpoint, and without its credentials. It outlives
the function that starts it, the endpoint, and the login session; where systemd ends a user's processes at logout,
lingering is needed (see ``docs/howto/remote.md``).

``python -m freetrain_parsl.campaign.launch DIRECTORY COMMAND…`` is that process: it runs the command and records how it
ends, in `Process`' files.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from freetrain_parsl.campaign.lock import own_identity
from freetrain_parsl.cluster.processes import is_running
from freetrain_parsl.errors import InvalidInput
from freetrain_parsl.interpreters import FREETRAIN, module_command, script_command
from freetrain_parsl.report.output import write_output
from freetrain_parsl.storage.owned_files import open_own_file, read_small_file, require_own_directory
from freetrain_parsl.storage.stored_json import parse_stored

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["KEEP", "LOG", "Process", "last_line", "launch", "process_of", "read_document", "scrubbed"]

LOG = "output.log"
_RECORD = "process.json"
_RECORD_TIMEOUT = 60.0  # seconds until a started process has recorded itself
_PERIOD = 0.05
_LAST_LINE = 500  # characters


@dataclass(frozen=True)
class Process:
    """A command that was started.

    Parameters
    ----------
    command
        Its arguments.
    host, pid
        Where it runs, or ran.
    since
        When it started, seconds since the epoch.
    running
        Whether it still runs; only on its own host, elsewhere ``None``.
    exit_code
        ``None`` while it runs, and if it was killed.
    """

    command: tuple[str, ...]
    host: str
    pid: int
    since: float
    running: bool | None
    exit_code: int | None


def launch(
    directory: Path, command: Sequence[str], working_directory: Path, environment: Mapping[str, str] | None = None
) -> None:
    """Start ``freetrain COMMAND…`` and return once it has recorded itself.

    Parameters
    ----------
    directory
        Directory for the files of the process.
    command
        Arguments of ``freetrain``.
    working_directory
        Where it runs.
    environment
        Default: that of this process, without what looks secret.
    """
    require_own_directory(directory, "give another run directory")
    for path in (directory / _RECORD, *directory.glob(_exit_name("*", "*"))):
        path.unlink(missing_ok=True)
    descriptor = open_own_file(directory / LOG, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    with os.fdopen(descriptor, "ab") as log:
        # The first process only starts the second and ends, which makes that one nobody's child.
        first = subprocess.Popen(
            [*module_command("freetrain_parsl.campaign.launch"), str(directory), *command],
            cwd=working_directory,
            env=scrubbed(os.environ) if environment is None else environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        _await_record(first, directory)
    except KeyboardInterrupt:  # the process runs: the next caller must find it, and start no other one
        _await_record(first, directory)
        raise


def _await_record(first: subprocess.Popen[bytes], directory: Path) -> None:
    first.wait()
    end = time.monotonic() + _RECORD_TIMEOUT
    while process_of(directory) is None and time.monotonic() < end:
        time.sleep(_PERIOD)


def process_of(directory: Path) -> Process | None:
    """Return the last process that was started; ``None`` if none has recorded itself."""
    record = read_document(directory / _RECORD, "command", "host", "pid", "since", "started")
    if record is None:
        return None
    # The one before may still be ending: its exit has another name.
    ended = read_document(directory / _exit_name(record["pid"], record["started"]), "code")
    here = record["host"] == platform.node()
    return Process(
        command=tuple(record["command"]),
        host=record["host"],
        pid=record["pid"],
        since=record["since"],
        running=ended is None and is_running(record["pid"], record["started"]) if here else None,
        exit_code=None if ended is None else ended["code"],
    )


def read_document(path: Path, *keys: str) -> dict[str, Any] | None:
    """Read a small file of a run; ``None`` if there is none.

    Parameters
    ----------
    path
        The file, JSON.
    keys
        What it must contain.

    Raises
    ------
    InvalidInput
        It is damaged.
    """
    try:
        document: Any = parse_stored(read_small_file(path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError:
        document = None
    if not isinstance(document, dict) or not document.keys() >= set(keys):
        raise InvalidInput(f"{path} is damaged; remove the directory of this run, and start the campaign as a new run")
    return document


def last_line(directory: Path) -> str:
    """Return the last line of the output, which says why a command failed."""
    try:
        with (directory / LOG).open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - 10 * _LAST_LINE))
            lines = log.read().decode(errors="replace").strip().splitlines()
    except FileNotFoundError:
        lines = []
    return lines[-1][:_LAST_LINE] if lines else "it ended without any output"


def _exit_name(pid: object, started: object) -> str:
    return f"exit.{pid}.{started}.json"


def _main(directory: Path, command: list[str]) -> None:
    """Leave the parent, run the command, and record how it ends."""
    if os.fork():
        os._exit(0)
    os.umask(0o077)
    host, pid, started = own_identity()
    record = {"command": command, "host": host, "pid": pid, "started": started, "since": time.time()}
    write_output(directory / _RECORD, json.dumps(record))
    completed = subprocess.run([*script_command(FREETRAIN), *command], check=False)
    write_output(directory / _exit_name(pid, started), json.dumps({"code": completed.returncode}))


KEEP = "FREETRAIN_REMOTE_KEEP"
"""Variable of the endpoint: names, separated by commas, of variables that are passed on although they look secret."""

_ENDPOINTS = re.compile(r"(GLOBUS_|FUNCX_|GC_|PARSL_).*", re.IGNORECASE)
_SDK = "GLOBUS_SDK_"
_SECRET = re.compile(
    r".*(SECRET|TOKEN|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY|AUTHORIZATION).*"
    r"|.*_(PWD|PAT)",  # MYSQL_PWD, GITHUB_PAT
    re.IGNORECASE,
)
_URL_WITH_PASSWORD = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s:@]*:[^/\s@]+@", re.IGNORECASE)
_SHORTEST = 8  # characters of a value that is looked for inside other values


def scrubbed(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without credentials and without the variables of Globus Compute and its workers.

    Variables are removed by their names, by a password in an address, and if their value contains that of a secret one.
    Those named by `KEEP` stay, except Globus' own; of these only settings of its SDK, which are no secrets.
    """
    kept = {name.strip() for name in environment.get(KEEP, "").split(",")}
    own = {
        name
        for name in environment
        if _ENDPOINTS.fullmatch(name) and not (name in kept and name.startswith(_SDK) and not _SECRET.fullmatch(name))
    }
    secret = own | {name for name in environment if _SECRET.fullmatch(name) and name not in kept}
    values = [environment[name] for name in secret if _SECRET.fullmatch(name) and len(environment[name]) >= _SHORTEST]
    return {
        name: value
        for name, value in environment.items()
        if name not in secret
        and (name in kept or not _URL_WITH_PASSWORD.search(value))
        and (name in kept or not any(item in value for item in values))
    }


if __name__ == "__main__":
    _main(Path(sys.argv[1]), sys.argv[2:])
