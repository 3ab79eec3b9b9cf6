"""The web application: the page, its script and style, the stream of changes, the logs, and ``stop``."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import suppress
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from freetrain_parsl.errors import FreeTrainError
from freetrain_parsl.extensions.dashboard.access import Access, AccessVerdict
from freetrain_parsl.extensions.dashboard.feed import Feed
from freetrain_parsl.extensions.pages.run_view import RunView
from freetrain_parsl.extensions.pages.web import run_view_script, run_view_style
from freetrain_parsl.report.markup import document, element
from freetrain_parsl.report.run_reader import RunReader
from freetrain_parsl.texts import printable, printable_lines, shortened

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.types import ASGIApp, Receive, Scope, Send

    from freetrain_parsl.campaign.run_source import RunSource

__all__ = ["make_application", "page_size"]

_MOST_VIEWERS: Final = 20
_LOG_LINES: Final = 500
_HEARTBEAT: Final = 15.0  # seconds without an event after which a comment keeps the connection open
_SLOWEST: Final = 60.0  # seconds within which a viewer must have taken an event
_HEADERS: Final = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
    ),
    "cache-control": "no-store",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def make_application(
    source: RunSource, access: Access, prefix: str = "", granted: Callable[[tuple[str, int] | None], None] | None = None
) -> ASGIApp:
    """Build the application.

    Parameters
    ----------
    source
        The run.
    access
        Who may see it.
    prefix
        Path before all paths, such as ``/user/me/dashboard``, of a proxy that does not remove it; without a slash at
        its end.
    granted
        Called for each request that is served, with the address of the peer.
    """
    pages = _Pages(source, access, prefix)
    pages.feed.read_ahead()
    routes = [
        Route("/", pages.page),
        Route("/dashboard.js", pages.script),
        Route("/dashboard.css", pages.style),
        Route("/events", pages.events),
        Route("/log", pages.log),
        Route("/stop", pages.stop, methods=["POST"]),
    ]
    return _Guarded(Starlette(routes=routes), access, prefix, granted or (lambda _peer: None))


class _Guarded:
    """Refuses requests, adds the headers to all answers, and removes the prefix."""

    def __init__(
        self,
        application: ASGIApp,
        access: Access,
        prefix: str,
        granted: Callable[[tuple[str, int] | None], None],
    ) -> None:
        self._application = application
        self._granted = granted
        self._access = access
        self._prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._application(scope, receive, send)
            return
        request = Request(scope)
        verdict = self._verdict(request)
        answer = self._application
        if verdict is not AccessVerdict.GRANTED:
            answer = PlainTextResponse(verdict.value + "\n", status_code=403)
        else:
            self._granted(scope.get("client"))
        if self._prefix and scope["path"].startswith(self._prefix + "/"):
            scope = {**scope, "path": scope["path"].removeprefix(self._prefix)}

        async def send_with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                headers = [(name.encode(), value.encode()) for name, value in _HEADERS.items()]
                message = {**message, "headers": [*message["headers"], *headers]}
            await send(message)

        await answer(scope, receive, send_with_headers)

    def _verdict(self, request: Request) -> AccessVerdict:
        headers = {name.lower(): value for name, value in request.headers.items()}
        if request.method in ("GET", "HEAD"):
            return self._access.to_see(headers, request.query_params.get("token"), request.cookies)
        return self._access.to_change(headers, request.cookies)


class _Pages:
    def __init__(self, source: RunSource, access: Access, prefix: str) -> None:
        self._source = source
        self._name = source.name
        self._access = access
        self._prefix = prefix
        self._reading_log = asyncio.Semaphore(2)
        self.feed = Feed(RunReader(RunView(self._name), source.journals))
        self.events = _Events(self.feed)

    async def page(self, _request: Request) -> Response:
        response = Response(_page(self._name, self._access.change_token), media_type="text/html")
        if self._access.token_needed:
            response.set_cookie(
                self._access.cookie_name,
                self._access.cookie,
                path=f"{self._prefix}/",
                httponly=True,
                samesite="strict",
            )
        return response

    async def script(self, _request: Request) -> Response:
        return Response(_script(), media_type="text/javascript")

    async def style(self, _request: Request) -> Response:
        return Response(_style(), media_type="text/css")

    async def log(self, request: Request) -> Response:
        training = request.query_params.get("training", "")
        async with self._reading_log:
            return await _answer(lambda: {"lines": self._lines(training)})

    async def stop(self, _request: Request) -> Response:
        return await _answer(lambda: {"message": self._source.stop()})

    def _lines(self, training: str) -> list[dict[str, Any]]:
        return [
            {"time": line.time, "mark": line.is_mark, "text": printable_lines(line.text)}
            for line in self._source.log(training, _LOG_LINES)
        ]


async def _answer(work: Callable[[], dict[str, Any]]) -> Response:
    """Do something in a thread; an error of the user's, or of a file, is the answer."""
    try:
        return JSONResponse(await asyncio.to_thread(work))
    except (FreeTrainError, OSError, sqlite3.Error) as error:
        return JSONResponse({"message": printable(str(error))}, status_code=400)


class _Events:
    """The stream of changes (server-sent events).

    A viewer gets the changes since its last version when it has taken the event before: a slow one gets fewer and
    larger events, and none are kept for it.
    """

    def __init__(self, feed: Feed) -> None:
        self._feed = feed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        if self._feed.viewers >= _MOST_VIEWERS:
            busy = PlainTextResponse(f"{_MOST_VIEWERS} pages are open already\n", 503, {"retry-after": "10"})
            await busy(scope, receive, send)
            return
        known = self._feed.known(request.headers.get("last-event-id", ""))
        async with self._feed.watched():
            sending = asyncio.create_task(self._send(send, known))
            leaving = asyncio.create_task(_disconnected(receive))
            try:
                await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in (sending, leaving):
                    task.cancel()
                    with suppress(asyncio.CancelledError, asyncio.TimeoutError, OSError):
                        await task

    async def _send(self, send: Send, known: int) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"x-accel-buffering", b"no")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        while True:
            change = await self._feed.next(known, _HEARTBEAT)
            if change is None:
                text = ": nothing new\n\n"
            else:
                known, event, data = change
                text = f"id: {event}\ndata: {data}\n\n"
            body = {"type": "http.response.body", "body": text.encode(), "more_body": True}
            await asyncio.wait_for(send(body), _SLOWEST)


async def _disconnected(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _page(name: str, change_token: str) -> str:
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("meta", name="change-token", content=change_token),
        element("title", f"{shortened(name)}: FreeTrain"),
        element("link", rel="icon", href="data:,"),
        element("link", rel="stylesheet", href="dashboard.css"),
        element("script", type="module", src="dashboard.js"),
    )
    body = element("body", element("main", element("p", "Reading the journal …", class_="ft-loading"), id="run"))
    return document(element("html", head, body, lang="en"))


def page_size() -> int:
    """Return the size in bytes of everything that the page loads before its data."""
    return sum(len(text.encode()) for text in (_page("", ""), _script(), _style()))


def _script() -> str:
    return _own("dashboard.js") + run_view_script()


def _style() -> str:
    return _own("dashboard.css") + run_view_style()


def _own(name: str) -> str:
    return (files("freetrain_parsl.extensions.dashboard") / "web" / name).read_text(encoding="utf-8")
