"""Errors name the object that cannot be pickled."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from freetrain_parsl.errors import InvalidApp
from freetrain_parsl.executor.payloads.payloads import pack_or_refuse, unpack_training

SCRIPT = """
stream = (n for n in range(3))
plain = 3


class Net:
    def forward(self):
        return next(stream), plain


def helper():
    return [next(stream) for _ in range(plain)]


def uses_it(session):
    return next(stream)


def uses_it_through_a_helper(session):
    def inner():
        return helper()
    return inner()


def uses_it_through_a_class(session):
    return Net()


def uses_none(session, value=None):
    return plain
"""


@pytest.fixture
def script() -> dict[str, Any]:
    """Run a script, whose definitions cannot be imported."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(SCRIPT, namespace)
    return namespace


@pytest.mark.parametrize(
    ("function", "user"),
    [
        ("uses_it", "uses_it"),
        ("uses_it_through_a_helper", "helper"),
        ("uses_it_through_a_class", "Net.forward"),
    ],
)
def test_a_global_that_cannot_be_pickled_is_named_with_the_function_that_uses_it(script, function, user) -> None:
    with pytest.raises(InvalidApp) as caught:
        pack_or_refuse(script[function], (), {})
    message = str(caught.value)
    assert f"training function {function}() cannot be sent to the nodes" in message
    assert f"the global 'stream', used in {user}(), is of type generator and cannot be pickled" in message
    assert "\n" not in message


def test_an_argument_that_cannot_be_pickled_is_named(script) -> None:
    with socket.socket() as connection:
        with pytest.raises(InvalidApp, match=r"argument 1 is of type socket\.socket and cannot be pickled"):
            pack_or_refuse(script["uses_none"], (connection,), {})
        with pytest.raises(InvalidApp, match=r"argument 'value' is of type socket\.socket"):
            pack_or_refuse(script["uses_none"], (), {"value": connection})


def test_a_variable_of_an_enclosing_function_and_a_default_are_named() -> None:
    stream = iter(n for n in range(3))

    def closes_over(session: Any) -> Any:
        return stream

    def has_default(session: Any, guard: Any = stream) -> Any:
        return guard

    with pytest.raises(InvalidApp, match=r"the variable 'stream', used in .*closes_over\(\),"):
        pack_or_refuse(closes_over, (), {})
    with pytest.raises(InvalidApp, match=r"the default of parameter 'guard', used in .*has_default\(\),"):
        pack_or_refuse(has_default, (), {})


def test_what_can_be_pickled_is_packed(script) -> None:
    assert pack_or_refuse(script["uses_none"], (1,), {})


CALLS = """
from torch.distributed.fsdp import fully_shard

seen = []


def even(n):
    seen.append(n)
    return n == 0 or odd(n - 1)


def odd(n):
    return n != 0 and even(n - 1)


def shard(model):
    return fully_shard(model)


def train(session):
    if session is None:
        shard(session)
    return even(session), [even(2) for _ in range(1)], seen
"""


def test_functions_that_call_each_other_are_packed_with_what_they_share() -> None:
    """Those of a script by value; fully_shard, behind which functions of torch call each other, by reference."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(CALLS, namespace)
    function, args, _kwargs = unpack_training(pack_or_refuse(namespace["train"], (4,), {}))
    assert function(*args) == (True, [True], [4, 2, 0, 2, 0])
    assert namespace["seen"] == []
    assert function.__globals__["shard"].__globals__["fully_shard"] is namespace["fully_shard"]
    assert "odd" not in function.__globals__
