"""Calls of functions at an endpoint, through the SDK of Globus Compute.

Arguments and results are JSON in both directions: nothing that comes from the service is unpickled. Results are fetched
by polling, with growing intervals and within a budget of requests. Every verb may be repeated without harm, so a
result that has expired is asked for again.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
import uuid
from collections import deque
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from freetrain_parsl.errors import FreeTrainError, InvalidInput, RemoteError, UsageError
from freetrain_parsl.extensions.globus.remote.messages import FUNCTION, FUNCTION_SOURCE, checked_answer
from freetrain_parsl.extensions.globus.storage.login import CLIENT_ID, LOGIN, make_app

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from types import ModuleType

    from globus_compute_sdk import Client
    from globus_sdk import GlobusApp

__all__ = [
    "HUNG",
    "REQUESTS_PER_MINUTE",
    "ComputeEndpoint",
    "RequestBudget",
    "call_within",
    "compute_app",
    "make_client",
    "poll_delays",
]

HUNG = 300.0
"""Seconds after which a call to a site is given up; its own timeout does not cover a connection that hangs."""

_MINUTE = 60.0

T = TypeVar("T")


class RequestBudget:
    """At most so many requests in any period of one minute.

    Parameters
    ----------
    per_minute
        Number of requests.

    Attributes
    ----------
    taken : int
        All requests so far.
    """

    def __init__(self, per_minute: int) -> None:
        self._most = per_minute
        self._times: deque[float] = deque()
        self.taken = 0

    def take(self, now: float) -> float:
        """Return the seconds to wait, from a monotonic time, before the next request, which is then counted."""
        while self._times and self._times[0] <= now - _MINUTE:
            self._times.popleft()
        start = now if len(self._times) < self._most else self._times[-self._most] + _MINUTE
        self._times.append(start)
        self.taken += 1
        return start - now


def poll_delays(first: float = 0.5, growth: float = 1.25, longest: float = 15.0) -> Iterator[float]:
    """Yield the seconds between looks for an answer: growing, up to the longest.

    An answer is noticed late by `growth` less one of the time that it took, at most.
    """
    delay = first
    while True:
        yield delay
        delay = min(longest, delay * growth)


def call_within(seconds: float, call: Callable[[], T], give_up: Callable[[], None] = lambda: None) -> T:
    """Call in a thread that does not keep the process alive, and return what the call returns or raises.

    Raises
    ------
    RemoteError
        The call has not returned in time, and `give_up` was called. Its thread may continue; what it returns is
        dropped.
    """
    outcome: SimpleQueue[tuple[T | None, BaseException | None]] = SimpleQueue()

    def run() -> None:
        try:
            outcome.put((call(), None))
        # Passed on to the thread that waits.
        except BaseException as error:  # noqa: BLE001 - see above
            outcome.put((None, error))

    threading.Thread(target=run, name="freetrain-call", daemon=True).start()
    try:
        result, error = outcome.get(timeout=seconds)
    except Empty:
        give_up()
        raise RemoteError(
            f"no answer within {seconds:.0f} s: a connection hangs; the site may still do what was asked"
        ) from None
    if error is not None:
        raise error
    return result  # type: ignore[return-value]  # the call has returned it


REQUESTS_PER_MINUTE = 30
"""Of ours to the web service; it permits 20 in ten seconds."""

_MOST_PAYLOAD = 10 * 10**6  # bytes
_TIMEOUT = 120.0  # seconds
_ATTEMPTS = 2  # submissions of one call, if its result has expired
_OWN_CLIENT = ("GLOBUS_COMPUTE_CLIENT_ID", "GLOBUS_COMPUTE_CLIENT_SECRET")
_JSON = "globus_compute_sdk.serialize.concretes.JSONData"

_logger = logging.getLogger(__name__)


def make_client() -> Client:
    """Make a client of Globus Compute with the stored login, or the client identity in the environment.

    Raises
    ------
    UsageError
        The packages are not installed, or nobody is logged in.
    """
    app = compute_app()
    from globus_compute_sdk import Client
    from globus_compute_sdk.serialize import AllowlistWildcard, ComputeSerializer

    if app.login_required():
        if not isinstance(app, _globus_sdk().ClientApp):
            raise UsageError(f"not logged in to Globus Compute; run: {LOGIN}")
        app.login()
    client = Client(app=app, do_version_check=False)
    client.fx_serializer = ComputeSerializer(
        strategy_data=_JSON, allowed_deserializer_types=[AllowlistWildcard.CODE, _JSON]
    )
    return client


def compute_app() -> GlobusApp:
    """Return the app of ``freetrain globus login``; without a client id for it, that of the SDK of Globus Compute.

    That one is a user's, or a client's if its id and secret are in the environment, where they take precedence.

    Raises
    ------
    UsageError
        The packages are not installed, or the environment is not complete.
    """
    sdk = _globus_sdk()
    try:
        from globus_compute_sdk.sdk.auth.globus_app import get_globus_app
    except ImportError as error:
        raise _not_installed(error) from None
    if os.environ.get(CLIENT_ID) and not any(os.environ.get(name) for name in _OWN_CLIENT):
        return make_app(compute=True)
    try:
        app = get_globus_app()
    except ValueError as error:
        raise UsageError(str(error)) from None
    app.add_scope_requirements({sdk.ComputeClientV2.resource_server: [sdk.ComputeClientV2.scopes.all]})
    return app


def _globus_sdk() -> ModuleType:
    try:
        import globus_sdk
    except ImportError as error:
        raise _not_installed(error) from None
    return globus_sdk


def _not_installed(error: ImportError) -> UsageError:
    return UsageError(f"Globus Compute is not installed ({error}): pip install 'freetrain-parsl[globus]'")


class ComputeEndpoint:
    """An endpoint, as a place where the verbs of `freetrain_parsl.extensions.globus.remote.verbs` are answered.

    Parameters
    ----------
    endpoint
        UUID.
    function
        Id of the function, if it is registered already.
    client
        Makes the client, at the first call.
    budget
        Of requests to the web service.
    monotonic, sleep
        Clock, seconds.

    Attributes
    ----------
    submitted : bool
        Whether a call may have reached the site.

    Raises
    ------
    InvalidInput
        It is not a UUID.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        function: str = "",
        client: Callable[[], Client] = make_client,
        budget: RequestBudget | None = None,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        try:
            self.id = str(uuid.UUID(endpoint))
        except ValueError:
            raise InvalidInput(
                f"the endpoint {endpoint[:80]!r} is not a UUID; 'globus-compute-endpoint list' at the site shows it"
            ) from None
        self.function = function
        self.submitted = False
        self._make_client = client
        self._client: Client | None = None
        self._budget = RequestBudget(REQUESTS_PER_MINUTE) if budget is None else budget
        self._monotonic = monotonic
        self._sleep = sleep

    def call(self, request: Mapping[str, Any], timeout: float = _TIMEOUT) -> dict[str, Any]:
        """Call a verb and wait for its answer.

        Parameters
        ----------
        request
            ``verb``, and what it needs.
        timeout
            Seconds.

        Raises
        ------
        InvalidInput
            The site refuses the request, or the request is too large.
        RemoteError
            The service, the endpoint or the function failed, or did not answer in time.
        """
        if (size := len(json.dumps(request))) > _MOST_PAYLOAD:
            raise InvalidInput(
                f"the request has {size / 1e6:.1f} MB; Globus Compute carries {_MOST_PAYLOAD / 1e6:.0f} MB"
            )
        end = self._monotonic() + timeout
        for attempt in range(_ATTEMPTS):
            self._check_online()
            document = self._result(self._submit(request), end, timeout)
            if document is not None:
                break
            _logger.info("the result of %s has expired; attempt %d", request.get("verb"), attempt + 1)
        else:
            raise RemoteError("the result expired before it was fetched, twice; the verb may have been carried out")
        return checked_answer(document)

    def forget_client(self) -> None:
        """Make another client, with connections of its own, for the next call."""
        self._client = None

    def _check_online(self) -> None:
        with self._errors():
            status = str(self._service().get_endpoint_status(self.id)["status"])[:80]
        if status != "online":
            status = " ".join(status.split())
            raise RemoteError(
                f"the endpoint {self.id} is {status}; start it at the site: globus-compute-endpoint start freetrain"
            )

    def _submit(self, request: Mapping[str, Any]) -> str:
        """Submit the call, register the function if necessary; return the task's id."""
        if self.function:
            with contextlib.suppress(_UnknownFunction):
                return self._submit_to(self.function, request)
        with self._errors():
            self.function = self._service().register_source_code(FUNCTION_SOURCE, FUNCTION)
        return self._submit_to(self.function, request)

    def _submit_to(self, function: str, request: Mapping[str, Any]) -> str:
        with self._errors():
            service = self._service()
            batch = service.create_batch(result_serializers=[_JSON])
            batch.add(function, (request,))
            self.submitted = True
            return str(service.batch_run(self.id, batch)["tasks"][function][0])

    def _result(self, task: str, end: float, timeout: float) -> Any:
        """Poll until the result is there; ``None`` if it has expired."""
        from globus_compute_sdk.errors import TaskExecutionFailed

        for delay in poll_delays():
            self._sleep(delay)
            try:
                with self._errors():
                    status = self._service().get_task(task)
            except _Expired:
                return None
            except TaskExecutionFailed as error:
                line = (str(error).strip().splitlines() or ["no reason was given"])[-1]
                raise RemoteError(f"the function failed at the site: {line.strip()[:500]}") from None
            if not status["pending"]:
                if "result" not in status:
                    raise RemoteError(f"the function failed: {str(status.get('reason', status['status']))[:500]}")
                return status["result"]
            if self._monotonic() > end:
                raise RemoteError(
                    f"no answer within {timeout:.0f} s; the endpoint may be busy, and may still do what was asked: "
                    "see freetrain remote status"
                )
        raise AssertionError("the delays do not end")

    def _service(self) -> Client:
        """Return the client, after the wait that the budget demands; for one request."""
        if self._client is None:
            self._client = self._make_client()
        if wait := self._budget.take(self._monotonic()):
            self._sleep(wait)
        return self._client

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Translate errors of the SDK."""
        import globus_sdk
        from globus_compute_sdk.errors import DeserializationError, SerializationError

        try:
            yield
        except globus_sdk.GlobusAPIError as error:
            raise self._translated(error.http_status, error.code, error.message or "") from error
        except globus_sdk.NetworkError as error:
            raise RemoteError(f"Globus cannot be reached: {_first_line(error)}") from error
        except (SerializationError, DeserializationError) as error:
            raise RemoteError(f"the site sent an answer that is not JSON: {_first_line(error)}") from error
        except globus_sdk.GlobusError as error:
            raise UsageError(f"Globus login: {_first_line(error)}; run: {LOGIN}") from error
        except FreeTrainError:
            raise
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            # The SDK takes for granted that an answer is JSON and complete; the page of a proxy is neither.
            raise RemoteError("Globus Compute sent an unexpected answer; is there a proxy or a login page?") from error

    def _translated(self, status: int, code: str | None, message: str) -> RemoteError | UsageError:
        message = " ".join(str(message).split())[:300]
        plain = f"Globus Compute answered {status}{f': {message}' if message else ''}"
        match status, code:
            case 404, "ENDPOINT_NOT_FOUND":
                return InvalidInput(f"there is no endpoint {self.id}; 'globus-compute-endpoint list' shows the site's")
            case 404, "FUNCTION_NOT_FOUND":
                return _UnknownFunction(message)
            case 404, _:
                return _Expired(plain)
            case 401 | 403, _:
                return UsageError(f"Globus Compute refuses this login ({message}); run: {LOGIN}")
            case 413, _:
                return InvalidInput("the campaign is too large for Globus Compute; put data at the site")
            case 429, _:
                return RemoteError("Globus Compute asks to wait: too many requests; try again in a minute")
        return RemoteError(plain)


class _Expired(RemoteError):
    """The service does not know the task, or its result any more."""


class _UnknownFunction(RemoteError):
    """The service does not know the function."""


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
