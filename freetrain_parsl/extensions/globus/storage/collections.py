"""Places on Globus collections, and requests to Globus Transfer, with its errors converted."""

from __future__ import annotations

import math
import re
import uuid
from dataclasses import dataclass
from datetime import timedelta
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, NoReturn

from freetrain_parsl.errors import CollectionUnavailable, GlobusRefused, InvalidSettings
from freetrain_parsl.extensions.globus.storage.login import LOGIN
from freetrain_parsl.texts import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import globus_sdk

__all__ = ["CollectionPath", "Collections", "CopyItem", "GlobusSettings", "TaskState"]

_LEAST_LEASE = timedelta(seconds=2)


@dataclass(frozen=True)
class CollectionPath:
    """A directory on a collection.

    Parameters
    ----------
    collection
        Its UUID.
    path
        Absolute path on the collection, or a path below the user's home directory there, such as ``/~/freetrain``.

    Raises
    ------
    InvalidSettings
        The UUID or the path is invalid.
    """

    collection: str
    path: str

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "collection", str(uuid.UUID(self.collection)))
        except ValueError:
            raise InvalidSettings(f"{self.collection[:80]!r} is not the UUID of a collection") from None
        parts = PurePosixPath(self.path).parts
        if parts[:1] != ("/",) or len(parts) < 2 or ".." in parts:
            raise InvalidSettings(
                f"{self.path[:80]!r} is not a directory on a collection; give an absolute path, such as /~/freetrain"
            )
        object.__setattr__(self, "path", str(PurePosixPath(*parts)))

    def __str__(self) -> str:
        return f"{self.collection}:{self.path}"

    def join(self, *names: str) -> str:
        """Return the path of an entry below this directory."""
        return str(PurePosixPath(self.path, *names))


@dataclass(frozen=True)
class GlobusSettings:
    """Where a site's checkpoint directory is on Globus, and where checkpoints are carried to.

    Parameters
    ----------
    local
        The checkpoint directory, as its collection shows it.
    home
        Where the checkpoints of all sites meet.
    lease
        A site whose driver has not renewed its claims for so long loses its training jobs to other sites. A driver that
        cannot reach `home` stops its training jobs earlier.

    Raises
    ------
    InvalidSettings
        Both places overlap, or the lease is too short.
    """

    local: CollectionPath
    home: CollectionPath
    lease: timedelta = timedelta(minutes=15)

    def __post_init__(self) -> None:
        if self.lease < _LEAST_LEASE:
            raise InvalidSettings(f"a lease must be at least {_LEAST_LEASE.total_seconds():.0f} s")
        one, other = PurePosixPath(self.local.path), PurePosixPath(self.home.path)
        if self.local.collection == self.home.collection and (one in (other, *other.parents) or other in one.parents):
            raise InvalidSettings(f"home {self.home} and the checkpoint directory {self.local} overlap")


_TIMEOUT = 30.0  # seconds for an answer
_LONGEST_WAIT = 3600.0  # seconds for which the service may ask
_SECONDS = re.compile(r"\d{1,15}(\.\d+)?", re.ASCII)
_MOST_ENTRIES = 100_000  # in a listing; the service gives no more
_MOST_BYTES = 2**63  # copied by a task
_TASK: dict[str, Any] = {"label": "freetrain"} | dict.fromkeys(
    ("notify_on_succeeded", "notify_on_failed", "notify_on_inactive"), False
)

_REMEDIES = {
    "EndpointNotFound": "there is no such collection; correct its UUID in the site file",
    "AuthenticationFailed": f"the login has expired; run: {LOGIN}",
    "AuthenticationError": f"the login has expired; run: {LOGIN}",
    "PermissionDenied": "you may not use it; give another path in the site file, or ask the collection's administrator",
    "NotFound": "there is no such directory; create it, or correct the path in the site file",
    "PathNotAllowed": "the collection does not share this path; correct the path in the site file",
    "NotDirectory": "it is not a directory; correct the path in the site file",
}
"""Last parts of error codes for which retrying does not help -> what is wrong, and what does."""


@dataclass(frozen=True)
class CopyItem:
    """One file or directory to copy: absolute paths on the two collections."""

    source: str
    destination: str
    recursive: bool


@dataclass(frozen=True)
class TaskState:
    """The state of a task.

    Parameters
    ----------
    status
        ``ACTIVE``, ``INACTIVE``, ``SUCCEEDED`` or ``FAILED``.
    reason
        What keeps it from progressing, or why it failed; empty if all is well.
    bytes_done
        Bytes copied so far.
    rate
        Bytes per second.
    """

    status: str
    reason: str = ""
    bytes_done: int = 0
    rate: float = 0.0


class Collections:
    """Collections as this user, who is logged in, sees them. Used by one thread.

    Requests raise `CollectionUnavailable` if they cannot be carried out now, and `GlobusRefused` if not at all. One
    that changes something may have been carried out if it is unavailable, or may still be.
    """

    def __init__(self, app: globus_sdk.GlobusApp) -> None:
        import globus_sdk
        from globus_sdk.transport import RequestsTransport, RetryConfig

        self._sdk = globus_sdk
        # Retried once and at once: a refused token, with a new one, and a broken connection. The rest is for the mover.
        self._client = globus_sdk.TransferClient(
            app=app,
            transport=RequestsTransport(http_timeout=_TIMEOUT),
            retry_config=RetryConfig(
                max_retries=1, max_sleep=0, retry_after_status_codes=(), transient_error_status_codes=()
            ),
        )

    def names(self, collection: str, path: str, *, directories: bool = False) -> list[str] | None:
        """List a directory, or only the directories in it; ``None`` if it does not exist, or then is a file."""
        entries = self._entries(collection, path, {"NotDirectory": None} if directories else {})
        if entries is None:
            return None
        return [name for name, kind, _ in entries if kind != "file" or not directories]

    def sizes(self, collection: str, path: str) -> dict[str, int | None] | None:
        """List the sizes of the files in a directory, ``None`` if one is not given; ``None`` if it does not exist."""
        entries = self._entries(collection, path, {"NotDirectory": None})
        return None if entries is None else {name: size for name, kind, size in entries if kind != "dir"}

    def _entries(
        self, collection: str, path: str, answers: dict[str, None]
    ) -> list[tuple[str, object, int | None]] | None:
        """Return name, type and size of the entries of a directory."""
        entries: list[tuple[str, object, int | None]] | None = self._call(
            lambda: [_entry_of(entry) for entry in self._client.operation_ls(collection, path, show_hidden=True)],
            f"list {path} on collection {collection}",
            {"NotFound": None, **answers},
        )
        if entries is not None and len(entries) > _MOST_ENTRIES:
            what = f"cannot list {path} on collection {collection}"
            raise CollectionUnavailable(f"{what}: more than {_MOST_ENTRIES} entries")
        return entries

    def make_directory(self, collection: str, path: str) -> bool:
        """Create a directory; return false if it exists."""
        return bool(
            self._call(
                lambda: self._client.operation_mkdir(collection, path)["code"] is not None,
                f"create {path} on collection {collection}",
                {"Exists": False},
            )
        )

    def rename(self, collection: str, path: str, to: str) -> bool:
        """Rename an entry; return false if it does not exist, or `to` does."""
        return bool(
            self._call(
                lambda: self._client.operation_rename(collection, path, to)["code"] is not None,
                f"rename {path} on collection {collection}",
                {"Exists": False, "NotFound": False},
            )
        )

    def submission_id(self) -> str:
        """Return a new id, with which one task can be submitted any number of times."""
        return str(self._call(lambda: self._client.get_submission_id()["value"], "get a submission id"))

    def submit_transfer(self, submission: str, source: str, destination: str, items: Sequence[CopyItem]) -> str:
        """Submit a task, unless one with this submission id exists; return the id of the task."""
        data = self._sdk.TransferData(
            source,
            destination,
            submission_id=submission,
            verify_checksum=True,
            encrypt_data=True,
            fail_on_quota_errors=True,
            **_TASK,
        )
        for item in items:
            data.add_item(item.source, item.destination, recursive=item.recursive)
        what = f"copy from collection {source} to {destination}"
        return str(self._call(lambda: self._client.submit_transfer(data)["task_id"], what))

    def submit_delete(self, submission: str, collection: str, paths: Sequence[str]) -> str:
        """Submit a task that removes directories with all they contain; return the id of the task."""
        data = self._sdk.DeleteData(
            collection,
            submission_id=submission,
            recursive=True,
            ignore_missing=True,
            **_TASK,
        )
        for path in paths:
            data.add_item(path)
        what = f"remove {paths[0]} on collection {collection}"
        return str(self._call(lambda: self._client.submit_delete(data)["task_id"], what))

    def task(self, task: str) -> TaskState:
        """Return the state of a task; one that the service does not know has failed."""
        state: TaskState = self._call(
            lambda: _state_of(self._client.get_task(task)),
            f"ask for task {task}",
            {"NotFound": TaskState("FAILED", "Globus does not know the task")},
        )
        return state

    def cancel(self, task: str) -> None:
        """Cancel a task, if it still runs."""
        self._call(lambda: self._client.cancel_task(task) is not None, f"cancel task {task}", {"NotFound": None})

    def required_scopes(self, collection: str, path: str) -> list[str]:
        """Return the scopes to which the user has not consented yet, of those that using a collection needs."""
        try:
            self._client.operation_ls(collection, path)
        except self._sdk.GlobusAPIError as error:
            return list(error.info.consent_required.required_scopes) if error.info.consent_required else []
        except (self._sdk.NetworkError, self._sdk.GlobusSDKUsageError) as error:
            raise CollectionUnavailable(f"cannot reach Globus Transfer: {error}") from error
        return []

    def _call(self, request: Callable[[], Any], what: str, answers: dict[str, Any] | None = None) -> Any:
        """Carry out a request; `answers` are the results for error codes that end in these words."""
        try:
            return request()
        except self._sdk.GlobusAPIError as error:
            word = (error.code or "").rpartition(".")[2]
            for known, answer in (answers or {}).items():
                if word.endswith(known) and word != "EndpointNotFound":
                    return answer
            self._raise(error, what, word)
        except self._sdk.NetworkError as error:
            raise CollectionUnavailable(f"cannot {what}: Globus cannot be reached") from error
        except self._sdk.token_storage.TokenValidationError as error:
            raise GlobusRefused(f"cannot {what}: the login has expired; run: {LOGIN}") from error
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            # The SDK takes for granted that an answer is JSON and complete; the page of a proxy is neither.
            raise CollectionUnavailable(f"cannot {what}: Globus sent an unexpected answer") from error

    def _raise(self, error: globus_sdk.GlobusAPIError, what: str, word: str) -> NoReturn:
        if error.info.consent_required:
            raise GlobusRefused(
                f"cannot {what}: you have not consented to its use; run: {LOGIN} --config SITE, with this site file"
            ) from error
        if error.http_status == 401 or isinstance(error, self._sdk.AuthAPIError):
            raise GlobusRefused(f"cannot {what}: the login has expired; run: {LOGIN}") from error
        for known, remedy in _REMEDIES.items():
            if word.endswith(known):
                raise GlobusRefused(f"cannot {what}: {remedy}") from error
        wait = _seconds_of(error.headers.get("Retry-After", ""))
        code, message = _line(error.code or error.http_status, 80), _line(error.message or "", 200)
        raise CollectionUnavailable(f"cannot {what}: {code}: {message}", wait) from error


def _entry_of(entry: Any) -> tuple[str, object, int | None]:
    size = entry.get("size")
    return str(entry["name"]), entry.get("type"), size if isinstance(size, int) else None


def _line(text: object, longest: int) -> str:
    """Return a text of the service, or of a collection behind it, as a part of a line."""
    return " ".join(printable(str(text)[: 4 * longest]).split())[:longest]


def _state_of(document: Any) -> TaskState:
    error = document.get("fatal_error") or {}
    status = str(document.get("nice_status") or "")
    reason = (
        f"{error.get('code')}: {error.get('description')}" if error else "" if status in ("OK", "Queued") else status
    )
    done, rate = document.get("bytes_transferred") or 0, document.get("effective_bytes_per_second") or 0
    done, rate = min(max(int(done), 0), _MOST_BYTES), float(rate)
    return TaskState(str(document["status"]), _line(reason, 300), done, rate if math.isfinite(rate) else 0.0)


def _seconds_of(text: str) -> float:
    """Return the value of ``Retry-After``; 0 if it is a date or no number of seconds, and an hour at most."""
    return min(float(text), _LONGEST_WAIT) if _SECONDS.fullmatch(text) else 0.0
