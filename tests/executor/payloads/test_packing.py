"""Errors name the object that cannot be pickled."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from freetrain_parsl.errors import InvalidApp
from freetrain_parsl.executor.payloads.payloads import pack_or_refuse

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
