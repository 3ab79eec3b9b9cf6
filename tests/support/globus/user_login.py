"""Logins of a user on the loopback interface: identity tokens, signed with a key that is made for the purpose."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import jwt
from cryptography.hazmat.primitives.asymmetric import rsa

from tests.support.globus.loopback_service import LOOPBACK_USER

if TYPE_CHECKING:
    from tests.support.globus.loopback_service import LoopbackService

__all__ = ["UserLogin"]

_ALGORITHM = "RS512"
_SCOPES_OF_A_CODE = (
    "openid profile urn:globus:auth:scope:transfer.api.globus.org:all "
    "https://auth.globus.org/scopes/facd7ccc-c5f4-42aa-916b-a0e270e2c2a9/all"
)
_SECONDS = 3600


class UserLogin:
    """Signs the identity tokens of a service, which publishes the key.

    Parameters
    ----------
    service
        Gets the routes.
    """

    def __init__(self, service: LoopbackService) -> None:
        self._service = service
        self._key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        service.route("GET", "/.well-known/openid-configuration", lambda _: self._configuration(), protected=False)
        service.route("GET", "/jwk.json", lambda _: self._keys(), protected=False)

    def request(self, form: dict[str, Any]) -> dict[str, Any]:
        """Return a token request with the scopes that a code stands for: those of ``freetrain globus login``."""
        return {**form, "scope": _SCOPES_OF_A_CODE}

    def identity_token(self, client: str) -> str:
        """Return an identity token for a client."""
        now = int(time.time())
        claims = {"aud": client, "sub": LOOPBACK_USER, "iss": self._service.url, "iat": now, "exp": now + _SECONDS}
        return jwt.encode(claims, self._key, algorithm=_ALGORITHM)

    def _configuration(self) -> dict[str, Any]:
        url = self._service.url
        return {"issuer": url, "jwks_uri": f"{url}/jwk.json", "id_token_signing_alg_values_supported": [_ALGORITHM]}

    def _keys(self) -> dict[str, Any]:
        return {"keys": [json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(self._key.public_key()))]}
