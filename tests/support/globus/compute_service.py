"""A stand-in of Globus Compute's web service; broker, endpoint and client SDK are the real ones.

The SDK has one address for a local service, ``http://localhost:5000``, and no variable for another.
`ComputeService.environment` therefore makes this service the HTTP proxy of its clients, so that it can have any port.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pika
from globus_compute_common import messagepack
from globus_compute_common.messagepack.message_types import EPStatusReport, Result, Task

from tests.support.globus.loopback_service import LOOPBACK_USER, LoopbackService, Reply

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType

    from typing_extensions import Self

    from tests.support.globus.loopback_service import ServiceRequest

__all__ = ["ComputeService"]

_EXCHANGE = "compute"
_RESULTS, _HEARTBEATS = "results", "heartbeats"
_MISSED = 2.5  # heartbeat periods without a heartbeat after which an endpoint is offline
_RESULTS_KEPT = 1800.0  # seconds
_MOST_PAYLOAD = 10 * 2**20  # bytes of a submission
_RETRY = 0.2  # seconds between attempts to reach the broker


@dataclass
class _Task:
    state: str = "waiting-for-ep"
    result: dict[str, Any] = field(default_factory=dict)
    finished: float | None = None


@dataclass
class _Endpoint:
    name: str
    seen: float | None = None
    period: float = 0.0


class ComputeService(LoopbackService):
    """Globus Compute's web service on 127.0.0.1; use it as a context manager.

    Parameters
    ----------
    amqp_url
        Of the broker.
    monotonic
        Clock, seconds: ages of results and heartbeats.

    Attributes
    ----------
    results_kept : float
        Seconds for which the result of a task can be fetched.
    """

    def __init__(self, amqp_url: str, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        super().__init__(monotonic=monotonic)
        self.results_kept = _RESULTS_KEPT
        self._clock = monotonic
        self._amqp_url = amqp_url
        self._functions: dict[str, str] = {}
        self._tasks: dict[str, _Task] = {}
        self._endpoints: dict[str, _Endpoint] = {}
        self._stopping = threading.Event()
        self._consumer = threading.Thread(target=self._consume, name="compute-results", daemon=True)
        for method, pattern, handler in (
            ("GET", "/v2/version", self._version),
            ("GET", "/v2/get_amqp_result_connection_url", self._result_queue),
            ("POST", "/v3/functions", self._register_function),
            ("POST", "/v3/endpoints", self._register_endpoint),
            ("PUT", "/v3/endpoints/{endpoint}", self._register_endpoint),
            ("GET", "/v2/endpoints/{endpoint}", self._endpoint_metadata),
            ("GET", "/v2/endpoints/{endpoint}/status", self._endpoint_status),
            ("POST", "/v3/endpoints/{endpoint}/submit", self._submit),
            ("GET", "/v2/tasks/{task}", self._task_status),
            ("POST", "/v2/batch_status", self._batch_status),
            ("GET", "/v2/taskgroup/{group}", self._task_group),
        ):
            self.route(method, pattern, handler)

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables with which the SDK and the endpoint use this service."""
        return {
            "GLOBUS_SDK_ENVIRONMENT": "local",
            "GLOBUS_SDK_SERVICE_URL_AUTH": f"{self.url}/",
            "GLOBUS_COMPUTE_CLIENT_ID": LOOPBACK_USER,
            "GLOBUS_COMPUTE_CLIENT_SECRET": "the-secret-of-the-client",
            "http_proxy": self.url,
            "no_proxy": "127.0.0.1",
        }

    def is_online(self, endpoint: str) -> bool:
        """Return whether an endpoint is online, by its heartbeats."""
        known = self._endpoints.get(endpoint)
        return known is not None and known.seen is not None and self._clock() - known.seen < _MISSED * known.period

    def __enter__(self) -> Self:
        with pika.BlockingConnection(pika.URLParameters(self._amqp_url)) as connection:
            channel = connection.channel()
            channel.exchange_declare(_EXCHANGE, durable=True)
            for queue in (_RESULTS, _HEARTBEATS):
                channel.queue_declare(queue, durable=True)
                channel.queue_bind(queue, _EXCHANGE, queue)
        self._consumer.start()
        return super().__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stopping.set()
        self._consumer.join()
        super().__exit__(kind, error, traceback)

    # What clients ask for.

    def _version(self, _request: ServiceRequest) -> dict[str, Any]:
        return {"api": "1.0.0", "min_sdk_version": "1.0.0", "min_ep_version": "1.0.0"}

    def _result_queue(self, _request: ServiceRequest) -> dict[str, Any]:
        return {"queue_prefix": "", "connection_url": self._amqp_url}

    def _register_function(self, request: ServiceRequest) -> Reply | dict[str, Any]:
        name, code = request.body.get("function_name"), request.body.get("function_code")
        if not (isinstance(name, str) and isinstance(code, str)):
            return _problem(422, "INVALID_PAYLOAD", "function_name and function_code are needed")
        if not request.body.get("serialized", True):
            code = _packed(f"st\n{name}:{code}")  # as the SDK's strategy of this name packs plain source
        function = str(uuid.uuid4())
        self._functions[function] = code
        return {"function_uuid": function}

    def _register_endpoint(self, request: ServiceRequest) -> dict[str, Any]:
        endpoint = request.parts.get("endpoint") or str(uuid.uuid4())
        self._endpoints[endpoint] = _Endpoint(str(request.body.get("endpoint_name")))
        commands = self._declare(f"{endpoint}.commands")
        return {
            "endpoint_id": endpoint,
            "command_queue_info": commands,
            "heartbeat_queue_info": self._inward(_HEARTBEATS),
        }

    def _endpoint_metadata(self, request: ServiceRequest) -> Reply | dict[str, Any]:
        endpoint = request.parts["endpoint"]
        if endpoint not in self._endpoints:
            return _unknown_endpoint(endpoint)
        return {"uuid": endpoint, "name": self._endpoints[endpoint].name, "multi_user": False}

    def _endpoint_status(self, request: ServiceRequest) -> Reply | dict[str, Any]:
        endpoint = request.parts["endpoint"]
        if endpoint not in self._endpoints:
            return _unknown_endpoint(endpoint)
        return {"status": "online" if self.is_online(endpoint) else "offline", "details": {}}

    def _submit(self, request: ServiceRequest) -> Reply | dict[str, Any]:
        parent = request.parts["endpoint"]
        if parent not in self._endpoints:
            return _unknown_endpoint(parent)
        if len(json.dumps(request.body)) > _MOST_PAYLOAD:
            return _problem(413, "MAX_REQUEST_SIZE_EXCEEDED", "the payload is too large")
        if unknown := set(request.body["tasks"]) - set(self._functions):
            return _problem(404, "FUNCTION_NOT_FOUND", f"no function {unknown.pop()}")
        options = request.body.get("user_endpoint_config") or {}
        user = self._start_user_endpoint(parent, options, request.body.get("user_runtime") or {})
        serializers = request.body.get("result_serializers")
        tasks = {
            function: [self._enqueue(user, function, payload, serializers) for payload in payloads]
            for function, payloads in request.body["tasks"].items()
        }
        group = request.body.get("task_group_id") or str(uuid.uuid4())
        return {"tasks": tasks, "task_group_id": group, "request_id": str(uuid.uuid4()), "endpoint_id": parent}

    def _task_status(self, request: ServiceRequest) -> Reply | dict[str, Any]:
        answer = self._answer_of(request.parts["task"])
        return _problem(404, "TASK_NOT_FOUND", f"no task {request.parts['task']}") if answer is None else answer

    def _batch_status(self, request: ServiceRequest) -> dict[str, Any]:
        answers = {task: self._answer_of(task) for task in request.body["task_ids"]}
        return {"results": {task: answer for task, answer in answers.items() if answer is not None}}

    def _task_group(self, request: ServiceRequest) -> dict[str, Any]:
        return {"taskgroup_id": request.parts["group"], "tasks": []}

    def _answer_of(self, task: str) -> dict[str, Any] | None:
        known = self._tasks.get(task)
        if known is None or (known.finished is not None and self._clock() - known.finished > self.results_kept):
            return None
        return {"task_id": task, "status": known.state, **known.result}

    # What the endpoint gets and sends.

    def _start_user_endpoint(self, parent: str, options: Mapping[str, Any], runtime: Mapping[str, Any]) -> str:
        """Command the endpoint to run a process for these options, if it does not; return that process's id."""
        text = f"{parent} {json.dumps(options, sort_keys=True)}"
        user = str(uuid.UUID(hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()))
        credentials = {
            "endpoint_id": user,
            "task_queue_info": self._declare(f"{user}.tasks"),
            "result_queue_info": self._inward(_RESULTS),
            "heartbeat_queue_info": self._inward(_HEARTBEATS),
        }
        command = {
            "command": "cmd_start_endpoint",
            "args": [],
            "kwargs": {
                "name": f"uep.{parent}.{user}",
                "user_opts": options,
                "user_runtime": runtime,
                "amqp_creds": credentials,
            },
            "globus_effective_identity": LOOPBACK_USER,
            "globus_identity_set": [{"sub": LOOPBACK_USER}],
            "globus_username": "user@loopback.test",
        }
        properties = pika.BasicProperties(content_type="application/json", timestamp=round(time.time()))
        self._publish(f"{parent}.commands", json.dumps(command).encode(), properties)
        return user

    def _enqueue(self, user: str, function: str, payload: str, serializers: Any) -> str:
        task = uuid.uuid4()
        headers = {
            "function_uuid": function,
            "task_uuid": str(task),
            "resource_specification": "null",
            "result_serializers": serializers or [],
        }
        body = messagepack.pack(Task(task_id=task, task_buffer=self._functions[function] + payload))
        self._tasks[str(task)] = _Task()
        self._publish(f"{user}.tasks", body, pika.BasicProperties(headers=headers, delivery_mode=2))
        return str(task)

    def _declare(self, queue: str) -> dict[str, Any]:
        with pika.BlockingConnection(pika.URLParameters(self._amqp_url)) as connection:
            connection.channel().queue_declare(queue, durable=True)
        return {"connection_url": self._amqp_url, "queue": queue, "exchange": _EXCHANGE}

    def _inward(self, queue: str) -> dict[str, Any]:
        publish = {"exchange": _EXCHANGE, "routing_key": queue, "mandatory": True}
        return {
            "connection_url": self._amqp_url,
            "queue": queue,
            "exchange": _EXCHANGE,
            "queue_publish_kwargs": publish,
        }

    def _publish(self, queue: str, body: bytes, properties: pika.BasicProperties) -> None:
        with pika.BlockingConnection(pika.URLParameters(self._amqp_url)) as connection:
            connection.channel().basic_publish("", queue, body, properties)

    def _consume(self) -> None:
        """Take results and heartbeats from the broker until the service stops; connect again after a cut."""
        while not self._stopping.is_set():
            try:
                with pika.BlockingConnection(pika.URLParameters(self._amqp_url)) as connection:
                    channel = connection.channel()
                    for queue, handle in ((_RESULTS, self._take_result), (_HEARTBEATS, self._take_heartbeat)):
                        channel.basic_consume(queue, _acknowledged(handle))
                    while not self._stopping.is_set():
                        connection.process_data_events(0.1)
            except pika.exceptions.AMQPError:  # noqa: PERF203 - of each connection
                self._stopping.wait(_RETRY)

    def _take_result(self, body: bytes) -> None:
        result = messagepack.unpack(body)
        if not isinstance(result, Result) or (task := self._tasks.get(str(result.task_id))) is None:
            return
        task.state = "failed" if result.is_error else "success"
        task.result = {
            "exception" if result.is_error else "result": result.data,
            "completion_t": str(time.time()),
            "details": {},
        }
        task.finished = self._clock()

    def _take_heartbeat(self, body: bytes) -> None:
        report = messagepack.unpack(body)
        if isinstance(report, EPStatusReport):
            endpoint = self._endpoints.setdefault(str(report.endpoint_id), _Endpoint(""))
            endpoint.seen = self._clock()
            endpoint.period = float(report.global_state.get("heartbeat_period", 0.0))


def _acknowledged(handle: Callable[[bytes], None]) -> Callable[..., None]:
    def on_message(channel: Any, delivery: Any, _properties: Any, body: bytes) -> None:
        handle(body)
        channel.basic_ack(delivery.delivery_tag)

    return on_message


def _packed(buffer: str) -> str:
    return f"{len(buffer)}\n{buffer}"


def _problem(status: int, code: str, message: str) -> Reply:
    return Reply({"code": code, "http_status_code": status, "error_args": [], "reason": message}, status)


def _unknown_endpoint(endpoint: str) -> Reply:
    return _problem(404, "ENDPOINT_NOT_FOUND", f"no endpoint {endpoint}")
