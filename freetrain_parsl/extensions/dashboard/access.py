"""Who may see the page: everything is refused that does not come from its user's browser, with the token.

The token is in the address that the server prints; from then on a cookie stands for it. Requests to another host name
are refused (DNS rebinding), and changes need a second token that only the page has, from the page's own origin.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Access", "AccessVerdict"]

_LOOPBACK: Final = ("localhost", "127.0.0.1", "[::1]")


class AccessVerdict(Enum):
    """Whether a request is served; the value is the reason for people."""

    GRANTED = ""
    WRONG_HOST = "This server does not answer under this name; see freetrain dashboard --help for --allow-host."
    WRONG_ORIGIN = "Requests from other sites are refused."
    NOT_SIGNED_IN = "Open the address that freetrain dashboard printed: it has a token."
    NOT_THE_USER = "This token is wrong: open the address that freetrain dashboard printed last."
    NOT_FROM_THE_PAGE = "Changes are accepted from the page only; reload it."


@dataclass(frozen=True)
class Access:
    """Decides on requests.

    Parameters
    ----------
    hosts
        Names under which the server may be reached, besides those of the loopback; without ports.
    any_host
        Whether all names are accepted: on a Unix socket, which no browser can reach by itself.
    token_needed
        Whether the token is needed; if not, whoever can connect may look.
    token
        The secret, from which all others are derived.
    """

    hosts: tuple[str, ...] = ()
    any_host: bool = False
    token_needed: bool = True
    token: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)

    @property
    def cookie_name(self) -> str:
        """Name of the cookie; other servers on this host have others, as cookies are shared by all ports."""
        return f"freetrain-{self._derived('name')[:12]}"

    @property
    def cookie(self) -> str:
        """Value of the cookie."""
        return self._derived("cookie")

    @property
    def change_token(self) -> str:
        """What requests for changes must have."""
        return self._derived("change")

    def to_see(self, headers: Mapping[str, str], token: str | None, cookies: Mapping[str, str]) -> AccessVerdict:
        """Decide on a request, with headers in lower case and the token of its address, to see something."""
        if not self._is_own_host(headers.get("host", "")):
            return AccessVerdict.WRONG_HOST
        if not self._is_own_origin(headers):
            return AccessVerdict.WRONG_ORIGIN
        if not self.token_needed:
            return AccessVerdict.GRANTED
        if token is not None:
            return AccessVerdict.GRANTED if _equal(token, self.token) else AccessVerdict.NOT_THE_USER
        cookie = cookies.get(self.cookie_name)
        if cookie is None:
            return AccessVerdict.NOT_SIGNED_IN
        return AccessVerdict.GRANTED if _equal(cookie, self.cookie) else AccessVerdict.NOT_THE_USER

    def to_change(self, headers: Mapping[str, str], cookies: Mapping[str, str]) -> AccessVerdict:
        """Decide on a request to change something; the token in the address does not count."""
        verdict = self.to_see(headers, None, cookies)
        if verdict is not AccessVerdict.GRANTED:
            return verdict
        if headers.get("sec-fetch-site", "same-origin") != "same-origin":
            return AccessVerdict.WRONG_ORIGIN
        return (
            AccessVerdict.GRANTED
            if _equal(headers.get("x-freetrain-change", ""), self.change_token)
            else AccessVerdict.NOT_FROM_THE_PAGE
        )

    def _is_own_host(self, host: str) -> bool:
        return self.any_host or _without_port(host) in {*_LOOPBACK, *self.hosts}

    def _is_own_origin(self, headers: Mapping[str, str]) -> bool:
        origin = headers.get("origin")
        if origin is None:
            return True
        own = {headers.get("host", "").lower()}
        if self.any_host:  # a proxy has opened the socket, and states under which name it was reached
            own.add(headers.get("x-forwarded-host", "").lower())
        try:
            return urlsplit(origin).netloc.lower() in own - {""}
        except ValueError:  # such as http://[
            return False

    def _derived(self, purpose: str) -> str:
        return hmac.new(self.token.encode(), purpose.encode(), hashlib.sha256).hexdigest()


def _equal(given: str, secret: str) -> bool:
    """Compare in constant time."""
    return hmac.compare_digest(given.encode(errors="replace"), secret.encode())


def _without_port(host: str) -> str:
    host = host.strip().lower()
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0].removesuffix(".")
