"""Calls through the real SDK against a web service on loopback that plays endpoint and broker, too, with mishaps."""

from __future__ import annotations

import json
import pickle
import uuid

import pytest

from freetrain_parsl.errors import InvalidInput, RemoteError, UsageError
from freetrain_parsl.extensions.globus.remote.compute import RequestBudget
from freetrain_parsl.extensions.globus.remote.messages import FUNCTION
from tests.support.globus.loopback_service import LOOPBACK_USER, Cut, LoopbackService, Reply

pytestmark = pytest.mark.globus

ENDPOINT = "0e843812-9a83-4451-bef3-f1522edcb031"
SUBMIT, TASK, STATUS = f"/v3/endpoints/{ENDPOINT}/submit", "/v2/tasks/{task}", f"/v2/endpoints/{ENDPOINT}/status"


class Site:
    """Answers of a site: the request comes back, unless there is another result."""

    def __init__(self, service: LoopbackService) -> None:
        self.service = service
        self.result = ""
        self.error = ""
        self.pending = 0  # polls until the result is there
        self._payload = ""
        service.route("GET", STATUS, lambda _: {"status": "online"})
        service.route("POST", "/v3/functions", lambda request: {"function_uuid": self._registered(request.body)})
        service.route("POST", SUBMIT, self._submit)
        service.route("GET", TASK, self._task)

    def _registered(self, body):
        assert body["function_name"] == FUNCTION
        assert not body["serialized"]
        return LOOPBACK_USER

    def _submit(self, request):
        (self._payload,) = request.body["tasks"][LOOPBACK_USER]
        assert request.body["result_serializers"] == ["globus_compute_sdk.serialize.concretes.JSONData"]
        return {"tasks": {LOOPBACK_USER: [str(uuid.uuid4())]}, "task_group_id": ENDPOINT, "request_id": "1"}

    def _task(self, request):
        if self.pending:
            self.pending -= 1
            return {"task_id": request.parts["task"], "status": "waiting-for-nodes"}
        arguments = self._payload.partition("\n11\n")[2]
        echo = "11\n" + json.dumps(json.loads(arguments[: arguments.rindex("]") + 1])[0])
        outcome = {"exception": self.error} if self.error else {"result": self.result or echo}
        return {"task_id": request.parts["task"], "status": "success", "completion_t": "1", **outcome}


@pytest.fixture
def service(globus_packages, monkeypatch, tmp_path):
    with LoopbackService() as service:
        for name, value in {
            "GLOBUS_SDK_ENVIRONMENT": "local",
            "GLOBUS_SDK_SERVICE_URL_AUTH": f"{service.url}/",
            "GLOBUS_COMPUTE_CLIENT_ID": LOOPBACK_USER,
            "GLOBUS_COMPUTE_CLIENT_SECRET": "none",
            "GLOBUS_COMPUTE_USER_DIR": str(tmp_path),
            "http_proxy": service.url,
            "no_proxy": "127.0.0.1",
        }.items():
            monkeypatch.setenv(name, value)
        yield service


@pytest.fixture
def site(service):
    return Site(service)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def endpoint(site, clock, monkeypatch):
    from freetrain_parsl.extensions.globus.remote.compute import ComputeEndpoint

    monkeypatch.setattr("globus_sdk.transport.requests.time.sleep", clock.sleep, raising=False)
    return ComputeEndpoint(ENDPOINT, monotonic=clock, sleep=clock.sleep)


@pytest.mark.smoke
def test_a_call_is_answered_and_the_function_is_registered_once(endpoint, site):
    assert endpoint.call({"verb": "check"}) == {"verb": "check"}
    assert endpoint.call({"verb": "status"}) == {"verb": "status"}
    assert site.service.count("POST", "/v3/functions") == 1


def test_polls_back_off_and_end_at_the_timeout(endpoint, site, clock):
    site.pending = 1000
    with pytest.raises(RemoteError, match="no answer within 60 s"):
        endpoint.call({"verb": "check"}, timeout=60.0)
    assert clock.slept == sorted(clock.slept)
    assert site.service.count("GET", TASK) <= 17


def test_requests_stay_within_the_budget(site, clock, endpoint):
    endpoint._budget = RequestBudget(6)
    for _ in range(4):
        endpoint.call({"verb": "check"})
    assert clock.now >= 60.0


def test_an_endpoint_that_is_offline_or_unknown_gets_nothing(endpoint, site):
    site.service.mishap("GET", STATUS, Reply({"status": "offline"}))
    with pytest.raises(RemoteError, match=r"is offline; start it at the site: globus-compute-endpoint start"):
        endpoint.call({"verb": "check"})
    unknown = Reply({"code": "ENDPOINT_NOT_FOUND", "reason": "no"}, 404)
    site.service.mishap("GET", STATUS, unknown)
    with pytest.raises(InvalidInput, match=f"there is no endpoint {ENDPOINT}"):
        endpoint.call({"verb": "check"})
    assert site.service.count("POST", SUBMIT) == 0


def test_the_service_may_ask_to_wait(endpoint, site, clock):
    site.service.mishap("POST", SUBMIT, Reply({"code": "TOO_MANY_REQUESTS"}, 429, {"Retry-After": "2"}))
    assert endpoint.call({"verb": "check"}) == {"verb": "check"}
    site.service.mishap("POST", SUBMIT, Reply({"code": "TOO_MANY_REQUESTS"}, 429, {"Retry-After": "0"}), times=100)
    with pytest.raises(RemoteError, match="asks to wait"):
        endpoint.call({"verb": "check"})
    assert 2 <= site.service.count("POST", SUBMIT) <= 20


def test_an_expired_token_is_replaced_and_a_refused_login_is_one_line(endpoint, site):
    endpoint.call({"verb": "check"})
    site.service.expire_tokens()
    assert endpoint.call({"verb": "check"}) == {"verb": "check"}
    site.service.mishap("GET", STATUS, Reply({"code": "FORBIDDEN", "reason": "no"}, 403), times=100)
    with pytest.raises(UsageError, match="run: freetrain globus login") as caught:
        endpoint.call({"verb": "check"})
    assert "\n" not in str(caught.value)


def test_an_expired_result_is_asked_for_again_but_not_for_ever(endpoint, site):
    expired = Reply({"code": "TASK_NOT_FOUND", "reason": "gone"}, 404)
    site.service.mishap("GET", TASK, expired)
    assert endpoint.call({"verb": "check"}) == {"verb": "check"}
    assert site.service.count("POST", SUBMIT) == 2
    site.service.mishap("GET", TASK, expired, times=100)
    with pytest.raises(RemoteError, match="expired before it was fetched, twice"):
        endpoint.call({"verb": "check"})


def test_a_function_that_the_service_has_forgotten_is_registered_again(endpoint, site):
    endpoint.call({"verb": "check"})
    site.service.mishap("POST", SUBMIT, Reply({"code": "FUNCTION_NOT_FOUND", "reason": "gone"}, 404))
    assert endpoint.call({"verb": "check"}) == {"verb": "check"}
    assert site.service.count("POST", "/v3/functions") == 2


def test_a_connection_that_is_cut_is_repeated_by_the_sdk(endpoint, site):
    site.service.mishap("GET", TASK, Cut())
    assert endpoint.call({"verb": "check"}) == {"verb": "check"}


def test_a_result_that_is_not_json_is_never_unpickled(endpoint, site):
    import base64

    class Evil:
        def __reduce__(self):
            return (pytest.fail, ("it was unpickled",))

    site.result = "00\n" + base64.b64encode(pickle.dumps(Evil())).decode()
    with pytest.raises(RemoteError, match="not JSON"):
        endpoint.call({"verb": "check"})


@pytest.mark.parametrize("page", [b"<html>\n<h1>log in</h1>\n</html>", b"", [], "x", None])
@pytest.mark.parametrize(
    "route", [("GET", STATUS), ("POST", "/v3/functions"), ("POST", SUBMIT), ("GET", TASK)], ids=lambda route: route[1]
)
def test_an_answer_that_is_no_document_of_the_service_is_one_line(endpoint, site, route, page):
    site.service.mishap(*route, Reply(page), times=100)
    with pytest.raises(RemoteError, match="unexpected answer; is there a proxy") as caught:
        endpoint.call({"verb": "check"})
    assert "\n" not in str(caught.value)


def test_an_error_page_of_any_kind_has_its_status_in_the_message(endpoint, site):
    site.service.mishap("GET", STATUS, Reply(b"<html>", 404))
    with pytest.raises(RemoteError, match=r"^Globus Compute answered 404$"):
        endpoint.call({"verb": "check"})


@pytest.mark.smoke
def test_errors_of_the_site_are_one_line(endpoint, site):
    site.result = "11\n" + json.dumps({"error": "c.yaml:3: unknown key", "usage": True})
    with pytest.raises(InvalidInput, match=r"^c\.yaml:3: unknown key$"):
        endpoint.call({"verb": "start"})
    site.result = "11\n[1]"
    with pytest.raises(RemoteError, match="unexpected answer"):
        endpoint.call({"verb": "start"})
    site.error = "Traceback (most recent call last):\n  File x\nOSError: disk full\n"
    with pytest.raises(RemoteError, match=r"failed at the site: OSError: disk full$"):
        endpoint.call({"verb": "start"})


def test_what_is_too_large_is_not_sent(endpoint, site):
    with pytest.raises(InvalidInput, match=r"11\.0 MB; Globus Compute carries 10 MB"):
        endpoint.call({"verb": "start", "archive": "x" * 11_000_000})
    assert site.service.requests == []


def test_what_is_no_uuid_is_refused_at_once():
    from freetrain_parsl.extensions.globus.remote.compute import ComputeEndpoint

    with pytest.raises(InvalidInput, match="the endpoint 'polaris' is not a UUID"):
        ComputeEndpoint("polaris")


def test_without_a_login_nothing_is_asked(site, monkeypatch):
    from freetrain_parsl.extensions.globus.remote.compute import ComputeEndpoint

    monkeypatch.delenv("GLOBUS_COMPUTE_CLIENT_SECRET")
    with pytest.raises(UsageError, match="not logged in to Globus Compute; run: freetrain globus login"):
        ComputeEndpoint(ENDPOINT).call({"verb": "check"})
    monkeypatch.setenv("GLOBUS_COMPUTE_CLIENT_SECRET", "x")
    monkeypatch.delenv("GLOBUS_COMPUTE_CLIENT_ID")
    with pytest.raises(UsageError, match="GLOBUS_COMPUTE_CLIENT_ID"):
        ComputeEndpoint(ENDPOINT).call({"verb": "check"})
