"""Registry of running clusters: a private directory of this user with one subdirectory per cluster.

It is in ``$XDG_RUNTIME_DIR`` or the directory for temporary files, because the path of a Unix socket is limited to 107
bytes.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import stat
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from freetrain_parsl.cluster.processes import is_running, process_info
from freetrain_parsl.errors import ClusterGone, InvalidSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from freetrain_parsl.cluster.processes import ProcessInfo

_MAX_SOCKET_PATH = 107
_INFO = "cluster.json"
_LONGEST_ENDING = 60.0  # seconds; jobs are killed after the grace period
_PERIOD = 0.2


@dataclass(frozen=True)
class ClusterInfo:
    """A cluster's entry; its name is unique among this user's running clusters."""

    name: str
    directory: str  # of its logs and its jobs' scripts
    pid: int
    started: int  # when the process was, clock ticks after boot
    parent: tuple[int, int] | None = None  # the same of the process with which it ends, if there is one

    @property
    def running(self) -> bool:
        """Whether its process is alive."""
        return is_running(self.pid, self.started)


def runtime_directory(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the private directory of this user's clusters; create it if missing.

    Raises
    ------
    InvalidSettings
        It belongs to another user or is accessible to others.
    """
    if base := environment.get("XDG_RUNTIME_DIR"):
        directory = Path(base) / "freetrain"
    else:
        directory = Path(tempfile.gettempdir()) / f"freetrain-{os.getuid()}"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise InvalidSettings(
            f"{directory} is not a private directory owned by you; remove it or set XDG_RUNTIME_DIR to another one"
        )
    return directory


def socket_path(name: str) -> Path:
    """Return the path of a cluster's socket.

    Raises
    ------
    InvalidSettings
        The name is not a plain word, or the path is too long for a socket.
    """
    if not name or name.startswith(".") or "/" in name or "\0" in name:
        raise InvalidSettings(f"a cluster's name must be a plain word, got {name!r}")
    path = runtime_directory() / name / "socket"
    if len(os.fsencode(path)) > _MAX_SOCKET_PATH:
        raise InvalidSettings(
            f"the socket path {path} exceeds {_MAX_SOCKET_PATH} bytes; set XDG_RUNTIME_DIR to a shorter one"
        )
    return path


def mark_prefix(name: str) -> str:
    """Return the beginning of the marks of a cluster's processes.

    It contains the runtime directory, because a name is unique only there: a cluster that stops must not kill the
    processes of another one of the same name.
    """
    return f"{socket_path(name).parent}/"


def new_name() -> str:
    """Generate a name that no other cluster has."""
    return f"c{secrets.token_hex(4)}"


def wait_for_ending(
    directory: Path,
    report: Callable[[str], None],
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait until the cluster of a directory is gone, if there is one and the process that has started it was killed.

    Such a cluster ends by itself, with all its jobs, within the grace period. If it does not, this gives up.
    The directory is resolved; `report` is called once with a line of output, if there is anything to wait for.
    """
    end, reported = clock() + _LONGEST_ENDING, False
    while found := [info for info in running_clusters() if info.directory == str(directory) and _is_ending(info)]:
        if clock() > end:
            return
        if not reported:
            report(f"waiting for the cluster of a driver that was killed to end (process {found[0].pid})")
            reported = True
        sleep(_PERIOD)


def register(name: str, directory: Path, parent: ProcessInfo | None = None) -> ClusterInfo:
    """Register the calling process as a cluster; its socket must be created at `socket_path`.

    It ends with the process `parent`, if that is given.

    Raises
    ------
    InvalidSettings
        A cluster of this name or directory is already running.
    """
    for other in running_clusters():
        if name == other.name or str(directory) == other.directory:
            raise InvalidSettings(f"cluster {other.name!r} of {other.directory} is already running (pid {other.pid})")
    own = process_info(os.getpid())
    if own is None:
        raise InvalidSettings("the embedded cluster cannot see its own process in /proc")
    ends_with = None if parent is None else (parent.pid, parent.started)
    info = ClusterInfo(name, str(directory), own.pid, own.started, ends_with)
    entry = socket_path(name).parent
    aside = entry.with_name(f".{name}.{own.pid}")
    aside.mkdir(mode=0o700)
    (aside / _INFO).write_text(json.dumps(asdict(info)), encoding="utf-8")
    try:
        aside.rename(entry)
    except OSError as error:
        shutil.rmtree(aside)
        raise InvalidSettings(f"cluster {name!r} is being started by another process") from error
    return info


def _is_ending(info: ClusterInfo) -> bool:
    """Return whether the process with which a cluster ends is gone, so that it will soon be gone, too."""
    return info.parent is not None and not is_running(*info.parent)


def unregister(name: str) -> None:
    """Remove a cluster's entry and socket."""
    shutil.rmtree(socket_path(name).parent, ignore_errors=True)  # others may remove stale entries too


def running_clusters() -> list[ClusterInfo]:
    """Return all running clusters of this user, newest last; remove entries of dead ones."""
    clusters = []
    for entry in runtime_directory().iterdir():
        try:
            info = ClusterInfo(**json.loads((entry / _INFO).read_text(encoding="utf-8")))
        except FileNotFoundError:
            continue  # being created or removed
        except (ValueError, TypeError):
            shutil.rmtree(entry, ignore_errors=True)  # not ours, or of another version
            continue
        if info.running:
            if entry.name == info.name:  # else it is being created
                clusters.append(info)
        else:
            shutil.rmtree(entry, ignore_errors=True)
    return sorted(clusters, key=lambda info: (info.started, info.name))


def find(cluster: str | os.PathLike[str] | None = None) -> ClusterInfo:
    """Find a running cluster by name or directory; ``None`` for the only running one.

    Raises
    ------
    ClusterGone
        There is none, or there are several to choose from.
    """
    clusters = running_clusters()
    if cluster is None:
        if len(clusters) == 1:
            return clusters[0]
        if not clusters:
            raise ClusterGone("no embedded cluster is running; a run at a local site starts one, and ends it")
        names = ", ".join(f"{info.name} ({info.directory})" for info in clusters)
        raise ClusterGone(
            f"several embedded clusters are running; choose one by --cluster, or block.cluster of a site file: {names}"
        )
    wanted = os.fspath(cluster)
    for info in clusters:
        if wanted == info.name or str(Path(wanted).resolve()) == info.directory:
            return info
    raise ClusterGone(f"no embedded cluster {wanted!r} is running")
