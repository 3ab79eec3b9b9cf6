"""The loopback base of the Globus stand-ins, used by plain HTTP clients and by the real SDK."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.parse
import urllib.request

import pytest

from freetrain_parsl.errors import InvalidSettings
from tests.support.globus.loopback_service import LOOPBACK_USER, Cut, LoopbackService, Reply


@pytest.fixture
def service():
    with LoopbackService() as service:
        yield service


def ask(service: LoopbackService, method: str, path: str, *, token: str = "", form: dict | None = None):
    body = urllib.parse.urlencode(form).encode() if form is not None else None
    kind = {"Content-Type": "application/x-www-form-urlencoded"} if form is not None else {}
    request = urllib.request.Request(f"{service.url}{path}", body, {**kind, "Authorization": f"Bearer {token}"})
    request.method = method
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, json.load(answer), dict(answer.headers)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error), dict(error.headers)


def token_of(service: LoopbackService) -> str:
    return ask(service, "POST", "/v2/oauth2/token", form={"grant_type": "client_credentials"})[1]["access_token"]


def test_a_route_gets_its_parts_and_its_query(service):
    service.route("GET", "/things/{thing}", lambda request: {**request.parts, **request.query}, protected=False)
    assert ask(service, "GET", "/things/7?colour=red")[:2] == (200, {"thing": "7", "colour": "red"})
    assert service.count("GET", "/things/{thing}") == 1
    assert ask(service, "POST", "/things/7", form={})[0] == 404


def test_tokens_are_needed_until_they_expire(service):
    assert ask(service, "GET", "/v2/oauth2/userinfo", token="invented")[0] == 401
    token = token_of(service)
    assert ask(service, "GET", "/v2/oauth2/userinfo", token=token)[1]["sub"] == LOOPBACK_USER
    service.expire_tokens()
    assert ask(service, "GET", "/v2/oauth2/userinfo", token=token)[0] == 401


def test_each_resource_server_gets_a_token_of_its_own(service):
    compute = "https://auth.globus.org/scopes/facd7ccc-c5f4-42aa-916b-a0e270e2c2a9/all"
    transfer = "urn:globus:auth:scope:transfer.api.globus.org:all"
    form = {"grant_type": "client_credentials", "scope": f"{compute} openid {transfer}"}
    answer = ask(service, "POST", "/v2/oauth2/token", form=form)[1]
    servers = [answer["resource_server"], *(item["resource_server"] for item in answer["other_tokens"])]
    assert servers == ["funcx_service", "auth.globus.org", "transfer.api.globus.org"]


def test_mishaps_happen_in_order_and_then_the_service_is_well(service):
    done = []
    service.route("POST", "/work", lambda _: done.append(1) or {"done": len(done)}, protected=False)
    service.mishap("POST", "/work", Reply({"code": "BUSY"}, 429, {"Retry-After": "3"}))
    service.mishap("POST", "/work", Cut())
    service.mishap("POST", "/work", Cut(after_work=True))
    status, document, headers = ask(service, "POST", "/work", form={})
    assert (status, document, headers["Retry-After"]) == (429, {"code": "BUSY"}, "3")
    for expected in (0, 1):
        with pytest.raises((http.client.RemoteDisconnected, ConnectionResetError)):
            ask(service, "POST", "/work", form={})
        assert len(done) == expected
    assert ask(service, "POST", "/work", form={})[:2] == (200, {"done": 2})


def test_it_has_no_address_when_it_does_not_run():
    with pytest.raises(InvalidSettings, match="not running"):
        _ = LoopbackService().url


@pytest.mark.globus
def test_the_client_of_the_sdk_gets_tokens_and_uses_them(globus_packages, service, monkeypatch):
    import globus_sdk as sdk

    monkeypatch.setenv("GLOBUS_SDK_SERVICE_URL_AUTH", f"{service.url}/")
    config = sdk.GlobusAppConfig(token_storage=sdk.token_storage.MemoryTokenStorage())
    with sdk.ClientApp("test", client_id=LOOPBACK_USER, client_secret="none", config=config) as app:
        client = sdk.AuthClient(app=app)
        app.add_scope_requirements({"auth.globus.org": [sdk.scopes.AuthScopes.openid]})
        assert client.userinfo()["sub"] == LOOPBACK_USER
