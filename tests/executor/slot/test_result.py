"""A result that cannot be pickled: the error names the training job, the part and its type."""

from __future__ import annotations

import os
import socket
import sys
import time
from typing import Any

import pytest

from freetrain_parsl.errors import TrainingError
from freetrain_parsl.executor.slot import run_end
from freetrain_parsl.executor.slot.run_end import serialize_result


class History:
    def __init__(self, hook):
        self.losses = [0.5]
        self.hook = hook


class Loop:
    def __init__(self):
        self.again = self
        self.stream = (number for number in range(3))


def generator():
    yield 1


@pytest.mark.parametrize(
    ("value", "part"),
    [
        (generator(), r"the returned value is of type generator"),
        ({"loss": 0.1, "log": [0, generator()]}, r"the returned value\['log'\]\[1\] is of type generator"),
        ((History(generator()),), r"the returned value\[0\]\.hook is of type generator"),
        (Loop(), r"the returned value\.stream is of type generator"),
        ([{"socket": socket.socket()}], r"the returned value\[0\]\['socket'\] is of type socket\.socket"),
    ],
    ids=["itself", "nested", "attribute", "cycle", "socket"],
)
def test_the_part_that_cannot_be_pickled_is_named(value, part):
    with pytest.raises(
        TrainingError, match=rf"^training job 'a' is done, but cannot return its result: {part}"
    ) as caught:
        serialize_result("a", value)
    assert "cannot be pickled" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


class Silent(Exception):
    def __str__(self):
        raise RuntimeError("no text")


class Opaque:
    """An object that raises whatever it is asked."""

    @property
    def __dict__(self):
        raise RuntimeError("no attributes")

    def __repr__(self):
        raise RuntimeError("no text")

    def __reduce__(self):
        raise Silent


@pytest.mark.parametrize("value", [Opaque(), [Opaque()], {Opaque(): generator()}], ids=["itself", "item", "key"])
def test_objects_that_raise_exceptions_of_their_own_are_the_same_error(value):
    """Any other exception would end all members of an array."""
    with pytest.raises(TrainingError, match=r"cannot return its result: .* cannot be pickled"):
        serialize_result("a", value)


def test_a_result_that_can_be_pickled_is_returned():
    from parsl.serialize import deserialize

    assert deserialize(serialize_result("a", {"loss": [0.5]})) == {"loss": [0.5]}


class _Unpickles:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self._call = function, arguments

    def __reduce__(self) -> Any:
        return self._call


def test_a_result_that_cannot_be_unpickled_in_time_ends_its_own_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the driver, all results that follow would wait for it."""
    monkeypatch.setattr(run_end, "_LONGEST_TRIAL", 0.2)
    with pytest.raises(TrainingError, match=r"^training job 't' is done, .*: to unpickle it takes"):
        serialize_result("t", {"best": _Unpickles(time.sleep, 30)})


@pytest.mark.parametrize("function", [os._exit, sys.exit])
def test_a_result_that_ends_the_process_that_unpickles_it_does_so_in_its_own(function: Any) -> None:
    """Or is refused in the driver, which can refuse only an exception."""
    pid = os.fork()
    if pid == 0:
        try:
            serialize_result("t", _Unpickles(function, 7))
        finally:
            os._exit(1 if sys.exc_info()[0] is not None else 0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == (7 if function is os._exit else 0)
