"""A web service on the loopback interface: a route table, a log of its requests, and mishaps on demand.

`LoopbackService` has the routes of Globus Auth that every client needs. The stand-ins of other services add theirs::

    service = LoopbackService()
    service.route("GET", "/v2/version", lambda request: {"api": "1.0"})
    with service:
        service.mishap("GET", "/v2/version", Reply({"code": "BUSY"}, 429, {"Retry-After": "1"}))
        requests.get(f"{service.url}/v2/version")
"""

from __future__ import annotations

import json
import re
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlsplit

from freetrain_parsl.errors import InvalidSettings

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    from typing_extensions import Self

__all__ = ["LOOPBACK_USER", "Cut", "LoopbackService", "Reply", "ServiceRequest"]

LOOPBACK_USER = "10000000-0000-4000-8000-000000000001"
"""Identity of the user of all tokens."""

_MOST_BYTES = 32 * 10**6  # of a request
_TOKEN_SECONDS = 172_800
_PREFIX = "/v2/oauth2/"


@dataclass(frozen=True)
class ServiceRequest:
    """A request, as the service got it.

    Parameters
    ----------
    method, path
        Without the query.
    query
        Name -> last value.
    body
        The document of a JSON request, the fields of a form, or ``None``.
    parts
        Name -> text that matched ``{name}`` in the route.
    token
        The bearer token, or ``""``.
    time
        When it came, monotonic clock, seconds.
    """

    method: str
    path: str
    query: Mapping[str, str]
    body: Any
    parts: Mapping[str, str]
    token: str
    time: float


@dataclass(frozen=True)
class Reply:
    """An answer.

    Parameters
    ----------
    document
        Sent as JSON; bytes as they are, as HTML.
    status
        HTTP status.
    headers
        Further headers.
    """

    document: Any
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Cut:
    """Instead of an answer: the connection is closed.

    Parameters
    ----------
    after_work
        Whether the service does what was asked before, so that only the answer is lost.
    """

    after_work: bool = False


Handler = Callable[[ServiceRequest], Any]
Mishap = Reply | Cut | Callable[[], None]  # a callable, such as a wait, is called before the ordinary answer


@dataclass
class _Planned:
    method: str
    pattern: re.Pattern[str]
    mishap: Mishap
    left: int


class LoopbackService:
    """A web service on 127.0.0.1, in threads of this process; use it as a context manager.

    Parameters
    ----------
    port
        0: any free one.
    monotonic
        Clock of the request log, seconds.

    Attributes
    ----------
    requests : list of ServiceRequest
        All requests so far, in the order of their arrival.
    """

    def __init__(self, port: int = 0, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._port = port
        self._monotonic = monotonic
        self._routes: list[tuple[str, re.Pattern[str], Handler, bool]] = []
        self._planned: list[_Planned] = []
        self._lock = threading.RLock()
        self._tokens: set[str] = set()
        self._server: _Server | None = None
        self.requests: list[ServiceRequest] = []
        self.route("POST", f"{_PREFIX}token", self._token, protected=False)
        self.route("POST", f"{_PREFIX}token/revoke", self._revoke, protected=False)
        self.route("GET", f"{_PREFIX}userinfo", self._userinfo)

    # Set up.

    def route(self, method: str, pattern: str, handler: Handler, *, protected: bool = True) -> None:
        """Add a route; the first that matches is used.

        Parameters
        ----------
        method
            ``GET``, ``POST``, …
        pattern
            The whole path; ``{name}`` matches one part of it.
        handler
            Returns a `Reply`, or the document of one with status 200. It is called by one thread at a time.
        protected
            Whether requests without a valid token get status 401.
        """
        self._routes.append((method, _compiled(pattern), handler, protected))

    def mishap(self, method: str, pattern: str, mishap: Mishap, *, times: int = 1) -> None:
        """Let the next `times` matching requests go wrong; mishaps of one route happen in the order of their calls.

        Parameters
        ----------
        method, pattern
            As of `route`.
        mishap
            What is sent instead of the answer; a callable is called before the ordinary answer, for example to wait.
        times
            Number of requests.
        """
        with self._lock:
            self._planned.append(_Planned(method, _compiled(pattern), mishap, times))

    def trust(self, other: LoopbackService) -> None:
        """Accept the tokens of another service: both have the same Globus Auth."""
        with self._lock:
            self._tokens = other._tokens

    def expire_tokens(self) -> None:
        """Let all tokens that were issued so far be refused with status 401."""
        with self._lock:
            self._tokens.clear()

    @property
    def url(self) -> str:
        """Address of the running service, without a slash at the end.

        Raises
        ------
        InvalidSettings
            It is not running.
        """
        if self._server is None:
            raise InvalidSettings("the service is not running; use it in a with statement")
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def count(self, method: str, pattern: str) -> int:
        """Return the number of requests so far that match."""
        compiled = _compiled(pattern)
        with self._lock:
            return sum(item.method == method and bool(compiled.fullmatch(item.path)) for item in self.requests)

    # Running.

    def __enter__(self) -> Self:
        self._server = _Server(("127.0.0.1", self._port), _handler_of(self))
        threading.Thread(target=self._server.serve_forever, args=(0.02,), name="loopback-service", daemon=True).start()
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        assert self._server is not None, "it was entered"
        self._server.shutdown()
        self._server.server_close()
        self._server = None

    def answer(self, method: str, target: str, headers: Mapping[str, str], body: bytes) -> Reply | Cut:
        """Answer a request; called by the HTTP server.

        Parameters
        ----------
        method, target
            Of the request line.
        headers
            Their names are capitalised.
        body
            Bytes of the body.
        """
        parsed = urlsplit(target)
        request = ServiceRequest(
            method=method,
            path=parsed.path,
            query=dict(parse_qsl(parsed.query, keep_blank_values=True)),
            body=_document(headers.get("Content-Type", ""), body),
            parts={},
            token=headers.get("Authorization", "").partition("Bearer ")[2],
            time=self._monotonic(),
        )
        with self._lock:
            self.requests.append(request)
            mishap = self._next_mishap(request)
        if isinstance(mishap, Reply) or mishap == Cut(after_work=False):
            return mishap
        if mishap is not None and not isinstance(mishap, Cut):
            mishap()
        reply = self._ordinary(request)
        return mishap if isinstance(mishap, Cut) else reply

    def _next_mishap(self, request: ServiceRequest) -> Mishap | None:
        for item in self._planned:
            if item.left > 0 and item.method == request.method and item.pattern.fullmatch(request.path):
                item.left -= 1
                return item.mishap
        return None

    def _ordinary(self, request: ServiceRequest) -> Reply:
        for method, pattern, handler, protected in self._routes:
            match = pattern.fullmatch(request.path)
            if match is None or method != request.method:
                continue
            with self._lock:
                if protected and request.token not in self._tokens:
                    return Reply({"code": "UNAUTHORIZED", "message": "the token is not valid"}, 401)
                answer = handler(ServiceRequest(**{**vars(request), "parts": match.groupdict()}))
            return answer if isinstance(answer, Reply) else Reply(answer)
        return Reply({"code": "NOT_FOUND", "message": f"no route {request.method} {request.path}"}, 404)

    # Globus Auth.

    def _token(self, request: ServiceRequest) -> dict[str, Any]:
        """Issue a token for each resource server of the scopes; any client, code and password will do."""
        form = request.body if isinstance(request.body, dict) else {}
        scopes = str(form.get("scope", "openid")).split() or ["openid"]
        servers: dict[str, list[str]] = {}
        for scope in scopes:
            servers.setdefault(_resource_server(scope), []).append(scope)
        refreshable = form.get("grant_type") in ("authorization_code", "refresh_token")
        tokens = [self._new_token(server, names, refreshable) for server, names in servers.items()]
        return {**tokens[0], "other_tokens": tokens[1:]}

    def _new_token(self, server: str, scopes: list[str], refreshable: bool) -> dict[str, Any]:
        token = secrets.token_hex(16)
        self._tokens.add(token)
        return {
            "access_token": token,
            "refresh_token": secrets.token_hex(16) if refreshable else None,
            "resource_server": server,
            "scope": " ".join(scopes),
            "expires_in": _TOKEN_SECONDS,
            "token_type": "Bearer",
            "id_token": None,
        }

    def _revoke(self, request: ServiceRequest) -> dict[str, Any]:
        form = request.body if isinstance(request.body, dict) else {}
        self._tokens.discard(str(form.get("token", "")))
        return {"active": False}

    def _userinfo(self, _request: ServiceRequest) -> dict[str, Any]:
        user = {"sub": LOOPBACK_USER, "username": "user@loopback.test", "status": "used"}
        return {
            "sub": LOOPBACK_USER,
            "preferred_username": "user@loopback.test",
            "name": "Loopback User",
            "email": "user@loopback.test",
            "identity_set": [user],
        }


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64
    block_on_close = False


def _handler_of(service: LoopbackService) -> type[BaseHTTPRequestHandler]:
    class RequestHandler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 30

        def _serve(self) -> None:
            try:
                size = int(self.headers.get("Content-Length") or 0)
            except ValueError:
                size = -1
            if not 0 <= size <= _MOST_BYTES:
                self.send_error(413)
                return
            headers = {name.title(): value for name, value in self.headers.items()}
            answer = service.answer(self.command, self.path, headers, self.rfile.read(size))
            if isinstance(answer, Cut):
                self.close_connection = True
                return
            is_page = isinstance(answer.document, bytes)
            data = answer.document if is_page else json.dumps(answer.document).encode()
            self.send_response(answer.status)
            kind = "text/html" if is_page else "application/json"
            for name, value in {"Content-Type": kind, **answer.headers}.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = _serve  # noqa: N815 - names of the standard library

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - as in the base class
            """Log nothing: `LoopbackService.requests` has it."""

    return RequestHandler


def _compiled(pattern: str) -> re.Pattern[str]:
    parts = re.split(r"\{(\w+)\}", pattern)
    return re.compile("".join(f"(?P<{part}>[^/]+)" if n % 2 else re.escape(part) for n, part in enumerate(parts)))


def _document(kind: str, body: bytes) -> Any:
    """Parse a body; what cannot be parsed is ``None``."""
    try:
        text = body.decode()
        if kind.startswith("application/x-www-form-urlencoded"):
            return dict(parse_qsl(text))
        return json.loads(text) if text else None
    except ValueError:
        return None


def _resource_server(scope: str) -> str:
    """Return the resource server of a scope, such as ``urn:globus:auth:scope:transfer.api.globus.org:all``."""
    scope = scope.partition("[")[0].lstrip("*")
    if scope.startswith("urn:globus:auth:scope:"):
        return scope.split(":")[4]
    if scope.startswith("https://auth.globus.org/scopes/"):
        server = scope.split("/")[4]
        return _COMPUTE if server == "facd7ccc-c5f4-42aa-916b-a0e270e2c2a9" else server
    return "auth.globus.org"


_COMPUTE = "funcx_service"  # the name of Globus Compute's resource server is not the id in its scope
