"""A browser for an ASGI application: requests in this process, with the cookies that it was given."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from http.cookies import SimpleCookie
from urllib.parse import urlencode


@dataclass
class Answer:
    """An answer; names of headers are in lower case."""

    status: int
    headers: dict[str, str]
    text: str

    def json(self):
        return json.loads(self.text)


@dataclass
class Client:
    """Calls `application` as a browser that has its page open under `host`."""

    application: object
    host: str = "127.0.0.1:8000"
    cookies: dict[str, str] = field(default_factory=dict)

    def get(self, path, *, headers=(), **query):
        return asyncio.run(self._call("GET", path, dict(headers), query))

    def post(self, path, *, headers=(), **query):
        return asyncio.run(self._call("POST", path, dict(headers), query))

    def scope(self, path, headers=(), method="GET", query=()):
        given = {"host": self.host, **dict(headers)}
        if self.cookies:
            given["cookie"] = "; ".join(f"{name}={value}" for name, value in self.cookies.items())
        return {
            "type": "http",
            "method": method,
            "path": path,
            "query_string": urlencode(dict(query)).encode(),
            "headers": [(name.encode(), value.encode("latin-1")) for name, value in given.items()],
        }

    async def _call(self, method, path, headers, query):
        messages = []

        async def receive():
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message):
            messages.append(message)

        await asyncio.wait_for(self.application(self.scope(path, headers, method, query), receive, send), 20)
        given = {name.decode().lower(): value.decode() for name, value in messages[0]["headers"]}
        for cookie in SimpleCookie(given.get("set-cookie", "")).values():
            self.cookies[cookie.key] = cookie.value
        body = b"".join(message.get("body", b"") for message in messages[1:])
        return Answer(messages[0]["status"], given, body.decode())
