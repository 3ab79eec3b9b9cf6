"""A stand-in for Globus Transfer that really copies files between directories that play collections.

::

    machine = LoopbackCollections({LOCAL: Path("/tmp/site"), HOME: Path("/tmp/home")})
    with TransferService(machine) as service:
        os.environ["GLOBUS_SDK_SERVICE_URL_TRANSFER"] = service.url
        machine.next_task("quota")
        ...

Several services, each with its own mishaps, may show the same collections: the networks of several sites.
"""

from __future__ import annotations

import shutil
import threading
import time
import uuid
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Literal

from tests.support.globus.loopback_service import Cut, LoopbackService, Reply
from tests.support.globus.user_login import UserLogin

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.support.globus.loopback_service import ServiceRequest

__all__ = ["LoopbackCollections", "TaskMishap", "TransferService"]

TaskMishap = Literal["fail", "quota", "checksum", "corrupt", "offline", "hold"]
"""What goes wrong with a task.

``fail``, ``quota``, ``checksum``
    it fails half way, with half of a file written;
``corrupt``
    it succeeds, with a wrong byte in each file;
``offline``, ``hold``
    it makes no progress until `LoopbackCollections.go_on` is called, because the endpoint is offline, or for no reason.
"""

_API = "/v0.10"
_FAULTS = {"fail": "FILE_SIZE_CHANGED", "quota": "QUOTA_EXCEEDED", "checksum": "VERIFY_CHECKSUM"}


@dataclass
class _Task:
    """A task as the service answers it, and the work to do."""

    document: dict[str, Any]
    request: Mapping[str, Any]
    mishap: TaskMishap | None
    cancelled: bool = False


@dataclass
class LoopbackCollections:
    """Directories that play collections, and the tasks between them.

    Parameters
    ----------
    directories
        UUID -> directory that is ``/`` on the collection.
    consent
        Collections that need a consent of their own.
    offline
        Collections whose endpoint is offline.
    bytes_per_second
        Speed of a task; 0: as fast as the disk.
    """

    directories: dict[str, Path]
    consent: set[str] = field(default_factory=set)
    offline: set[str] = field(default_factory=set)
    bytes_per_second: float = 0.0
    tasks: dict[str, _Task] = field(default_factory=dict)
    submissions: dict[str, str] = field(default_factory=dict)
    planned: list[TaskMishap] = field(default_factory=list)
    duplicates: int = 0
    most_active: int = 0

    def __post_init__(self) -> None:
        self._moving = threading.Event()
        self._lock = threading.RLock()

    def next_task(self, mishap: TaskMishap, times: int = 1) -> None:
        """Let the next tasks go wrong, in the order of the calls."""
        self.planned.extend([mishap] * times)

    def go_on(self) -> None:
        """Let all tasks that make no progress continue."""
        self._moving.set()

    def path(self, collection: str, path: str) -> Path:
        """Return the local path of a place; ``..`` does not leave the collection."""
        parts = [part for part in PurePosixPath("/", path).parts[1:] if part not in ("..", "~")]
        return self.directories[collection].joinpath(*parts)

    def submit(self, kind: str, request: Mapping[str, Any]) -> tuple[str, str]:
        """Accept a task; return its id, and ``Accepted`` or ``Duplicate``."""
        with self._lock:
            submission = str(request["submission_id"])
            if submission in self.submissions:
                self.duplicates += 1
                return self.submissions[submission], "Duplicate"
            task = str(uuid.uuid4())
            self.submissions[submission] = task
            document = {
                "DATA_TYPE": "task",
                "task_id": task,
                "type": kind.upper(),
                "status": "ACTIVE",
                "nice_status": "OK",
                "label": request.get("label"),
                "bytes_transferred": 0,
                "effective_bytes_per_second": 0,
                "fatal_error": None,
                "is_paused": False,
            }
            held = self.tasks[task] = _Task(document, request, self.planned.pop(0) if self.planned else None)
            active = sum(item.document["status"] == "ACTIVE" for item in self.tasks.values())
            self.most_active = max(self.most_active, active)
        work = self._copy_all if kind == "transfer" else self._delete_all
        threading.Thread(target=work, args=(held,), name="loopback-task", daemon=True).start()
        return task, "Accepted"

    def wait(self, timeout: float = 30.0) -> None:
        """Wait until no task is active.

        Raises
        ------
        TimeoutError
            One still is.
        """
        end = time.monotonic() + timeout
        while any(item.document["status"] == "ACTIVE" for item in list(self.tasks.values())):
            if time.monotonic() > end:
                raise TimeoutError("a task is still active")
            time.sleep(0.002)

    def _copy_all(self, task: _Task) -> None:
        request, document = task.request, task.document
        begin = time.monotonic()
        try:
            if task.mishap in ("offline", "hold"):
                document["nice_status"] = "ENDPOINT_OFFLINE" if task.mishap == "offline" else "OK"
                while not self._moving.wait(0.01) and not task.cancelled:
                    pass
                document["nice_status"] = "OK"
            files = list(self._files(request))
            for source, target in files:
                self._copy(task, source, target, last=source == files[-1][0])
                elapsed = max(time.monotonic() - begin, 1e-6)
                document["effective_bytes_per_second"] = int(document["bytes_transferred"] / elapsed)
        except _TaskFailed as error:
            self._fail(document, error.code, str(error))
        except OSError as error:
            self._fail(document, "FILE_NOT_FOUND", str(error))
        else:
            document["status"] = "SUCCEEDED"

    def _copy(self, task: _Task, source: Path, target: Path, *, last: bool) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        data = source.read_bytes()
        if task.cancelled:
            raise _TaskFailed("CANCELED", "the task was cancelled")
        if task.mishap in _FAULTS and last:
            target.write_bytes(data[: len(data) // 2])
            raise _TaskFailed(_FAULTS[task.mishap], f"while copying {source.name}")
        if task.mishap == "corrupt" and data:
            data = data[:-1] + bytes([data[-1] ^ 1])
        if self.bytes_per_second:
            time.sleep(len(data) / self.bytes_per_second)
        target.write_bytes(data)
        task.document["bytes_transferred"] += len(data)

    def _delete_all(self, task: _Task) -> None:
        collection = task.request["endpoint"]
        for item in task.request["DATA"]:
            path = self.path(collection, item["path"])
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        task.document["status"] = "SUCCEEDED"

    @staticmethod
    def _fail(document: dict[str, Any], code: str, description: str) -> None:
        document |= {
            "nice_status": code,
            "fatal_error": {"code": code, "description": description},
            "status": "FAILED",
        }

    def _files(self, request: Mapping[str, Any]) -> list[tuple[Path, Path]]:
        files = []
        for item in request["DATA"]:
            source = self.path(request["source_endpoint"], item["source_path"])
            target = self.path(request["destination_endpoint"], item["destination_path"])
            if not item.get("recursive"):
                files.append((source, target))
                continue
            if not source.is_dir():
                raise FileNotFoundError(f"no such directory: {source}")
            target.mkdir(parents=True, exist_ok=True)
            files += [(path, target / path.relative_to(source)) for path in sorted(source.rglob("*")) if path.is_file()]
        return files


class _TaskFailed(Exception):
    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class TransferService(LoopbackService):
    """Globus Transfer, and the routes of Globus Auth, on the loopback interface.

    Parameters
    ----------
    collections
        The collections and tasks, possibly shared with other services.
    port
        0: any free one.

    Attributes
    ----------
    cut_off : bool
        Whether all connections are closed without an answer: a network that is down.
    """

    def __init__(self, collections: LoopbackCollections, port: int = 0) -> None:
        super().__init__(port)
        self.collections = collections
        self.cut_off = False
        self._login: UserLogin | None = None
        operation = f"{_API}/operation/endpoint/{{collection}}"
        self.route("GET", f"{operation}/ls", self._ls)
        self.route("POST", f"{operation}/mkdir", self._mkdir)
        self.route("POST", f"{operation}/rename", self._rename)
        self.route("GET", f"{_API}/submission_id", lambda _: {"DATA_TYPE": "submission_id", "value": str(uuid.uuid4())})
        self.route("POST", f"{_API}/transfer", lambda request: self._submit("transfer", request))
        self.route("POST", f"{_API}/delete", lambda request: self._submit("delete", request))
        self.route("GET", f"{_API}/task/{{task}}", self._task)
        self.route("POST", f"{_API}/task/{{task}}/cancel", self._cancel)

    def answer(self, method: str, target: str, headers: Mapping[str, str], body: bytes) -> Reply | Cut:
        """Answer a request, unless the network is down."""
        return Cut() if self.cut_off else super().answer(method, target, headers, body)

    def _token(self, request: ServiceRequest) -> dict[str, Any]:
        """Issue tokens, to a user who gives a code with an identity token."""
        form = request.body if isinstance(request.body, dict) else {}
        if form.get("grant_type") != "authorization_code":
            return super()._token(request)
        if self._login is None:
            self._login = UserLogin(self)
        answer = super()._token(replace(request, body=self._login.request(form)))
        return {**answer, "id_token": self._login.identity_token(str(form.get("client_id")))}

    def _refusal(self, collection: str) -> Reply | None:
        if collection not in self.collections.directories:
            return _error(404, "EndpointNotFound", f"no such endpoint: {collection}")
        if collection in self.collections.offline:
            return _error(409, "GCDisconnectedException", "the endpoint is not connected")
        if collection in self.collections.consent:
            scope = f"urn:globus:auth:scope:transfer.api.globus.org:all[*https://auth.globus.org/scopes/{collection}/data_access]"
            return Reply({"code": "ConsentRequired", "message": "Missing consent", "required_scopes": [scope]}, 403)
        return None

    def _ls(self, request: ServiceRequest) -> Any:
        collection = request.parts["collection"]
        if (refusal := self._refusal(collection)) is not None:
            return refusal
        directory = self.collections.path(collection, request.query.get("path", "/"))
        if not directory.is_dir():
            return _error(404, "ClientError.NotFound", f"directory not found: {request.query.get('path')}")
        entries = [
            {
                "DATA_TYPE": "file",
                "name": path.name,
                "type": "dir" if path.is_dir() else "file",
                "size": path.stat().st_size,
            }
            for path in sorted(directory.iterdir())
        ]
        return {"DATA_TYPE": "file_list", "DATA": entries, "path": request.query.get("path")}

    def _mkdir(self, request: ServiceRequest) -> Any:
        collection = request.parts["collection"]
        if (refusal := self._refusal(collection)) is not None:
            return refusal
        try:
            self.collections.path(collection, request.body["path"]).mkdir()
        except FileExistsError:
            return _error(502, "ExternalError.MkdirFailed.Exists", "Path already exists")
        except FileNotFoundError:
            return _error(404, "ClientError.NotFound", "the parent directory does not exist")
        except PermissionError:
            return _error(403, "ExternalError.MkdirFailed.PermissionDenied", "Permission denied")
        return Reply({"DATA_TYPE": "mkdir_result", "code": "DirectoryCreated"}, 202)

    def _rename(self, request: ServiceRequest) -> Any:
        collection = request.parts["collection"]
        if (refusal := self._refusal(collection)) is not None:
            return refusal
        old, new = (self.collections.path(collection, request.body[key]) for key in ("old_path", "new_path"))
        if not old.exists():
            return _error(404, "ExternalError.RenameFailed.NotFound", "no such file or directory")
        if new.exists():
            return _error(502, "ExternalError.RenameFailed.Exists", "Path already exists")
        old.rename(new)
        return {"DATA_TYPE": "result", "code": "FileRenamed"}

    def _submit(self, kind: str, request: ServiceRequest) -> Any:
        ends = ("source_endpoint", "destination_endpoint") if kind == "transfer" else ("endpoint",)
        for end in ends:
            if (refusal := self._refusal(str(request.body[end]))) is not None and refusal.document["code"] != (
                "GCDisconnectedException"
            ):
                return refusal
        task, code = self.collections.submit(kind, request.body)
        return Reply(
            {"DATA_TYPE": "transfer_result", "task_id": task, "code": code}, 202 if code == "Accepted" else 200
        )

    def _task(self, request: ServiceRequest) -> Any:
        task = self.collections.tasks.get(request.parts["task"])
        return _error(404, "TaskNotFound", "no such task") if task is None else dict(task.document)

    def _cancel(self, request: ServiceRequest) -> Any:
        task = self.collections.tasks.get(request.parts["task"])
        if task is None:
            return _error(404, "TaskNotFound", "no such task")
        task.cancelled = True
        return {"DATA_TYPE": "result", "code": "Canceled"}


def _error(status: int, code: str, message: str) -> Reply:
    return Reply({"code": code, "message": message, "request_id": "loopback"}, status)
