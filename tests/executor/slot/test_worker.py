"""A slot's messages and network interface; its life is tested with the executor."""

from __future__ import annotations

import io
import sys
import threading
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from parsl.app.errors import RemoteExceptionWrapper
from parsl.serialize import serialize
from parsl.serialize.errors import DeserializationError

from freetrain_parsl.errors import TrainingError
from freetrain_parsl.executor.payloads.payloads import (
    error_in,
    pack_training,
    settle_with_error,
    settle_with_value,
    unpack_training,
)
from freetrain_parsl.executor.slot.output import flush_streams
from freetrain_parsl.executor.slot.run_end import serialized_exception


class _Unsendable(Exception):
    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.generator = (x for x in ())


def _raised(error: Exception) -> bytes:
    try:
        raise error
    except type(error) as raised:
        return serialized_exception(raised)


def test_an_exception_arrives_with_its_type_its_words_and_the_line_that_raised_it() -> None:
    error = error_in(_raised(KeyError("missing")))
    assert isinstance(error, KeyError)
    assert error.args == ("missing",)
    assert error.__traceback__ is not None
    assert error.__traceback__.tb_frame.f_code.co_name == "_raised"


def test_an_exception_that_cannot_be_sent_is_replaced_by_one_that_tells_its_type_and_words() -> None:
    error = error_in(_raised(_Unsendable("out of luck")))
    assert isinstance(error, RuntimeError)
    assert "_Unsendable: out of luck" in str(error)


def test_a_payload_that_is_no_exception_still_becomes_one() -> None:
    assert "42" in str(error_in(serialize(42)))
    assert "cannot be deserialized here" in str(error_in(b"nonsense"))


def test_a_future_that_is_settled_stays_as_it_is() -> None:
    future: Future[int] = Future()
    future.set_result(1)
    settle_with_value(future, serialize(2))
    assert future.result() == 1


class _TwoArguments(Exception):
    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


def test_an_exception_with_parameters_of_its_own_arrives_with_its_words() -> None:
    """It was pickled, but could not be unpickled, and its words were lost."""
    error = error_in(_raised(_TwoArguments(3, "no convergence")))
    assert isinstance(error, RuntimeError)
    assert "_TwoArguments: no convergence" in str(error)


def _quits() -> None:
    raise SystemExit(3)


class _Quits:
    def __reduce__(self) -> Any:
        return _quits, ()


class _Nameless(Exception):
    def __repr__(self) -> str:
        raise SystemExit(3)


def _raises_nameless() -> None:
    raise _Nameless


class _RaisesNameless:
    def __reduce__(self) -> Any:
        return _raises_nameless, ()


@pytest.mark.parametrize("value", [_Quits(), _RaisesNameless()])
def test_code_of_the_user_s_that_exits_while_a_value_is_unpickled_fails_the_call_only(value: object) -> None:
    """It ended the driver's thread, and all futures stayed pending."""
    future: Future[Any] = Future()
    settle_with_value(future, serialize(value))
    with pytest.raises(DeserializationError, match="the result cannot be deserialized here"):
        future.result(0)
    wrapped = serialize(RemoteExceptionWrapper(ValueError, ValueError(value), None))
    assert "its exception cannot be deserialized here" in str(error_in(wrapped))


def test_an_exception_without_a_repr_is_replaced() -> None:
    """Parsl takes its `repr` in a callback: the app's future stayed pending."""
    error = error_in(serialize(RemoteExceptionWrapper(_Nameless, _Nameless("lost"), None)))
    assert isinstance(error, TrainingError)
    assert str(error) == "the call raised _Nameless: lost"


class _PicklingQuits(Exception):
    def __str__(self) -> str:
        raise SystemExit(4)

    def __reduce__(self) -> Any:
        raise _PicklingQuits


def test_an_exception_that_exits_while_it_is_pickled_is_replaced() -> None:
    """It ended the slot, and other slots after it."""
    error = error_in(_raised(_PicklingQuits()))
    assert "_PicklingQuits: (its text cannot be shown: SystemExit)" in str(error)


def test_a_callback_that_exits_does_not_end_the_thread_that_settles_the_future(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for settle in (
        lambda future: settle_with_value(future, serialize(1)),
        lambda future: settle_with_error(future, ValueError()),
    ):
        future: Future[Any] = Future()
        future.add_done_callback(lambda _: sys.exit(1))
        settle(future)
        assert future.done()
    assert caplog.text.count("a callback of a future failed") == 2


def test_a_future_that_is_cancelled_meanwhile_stays_cancelled() -> None:
    class Raced(Future[Any]):
        def set_exception(self, exception: BaseException | None) -> None:
            self.cancel()
            super().set_exception(exception)

    future = Raced()
    settle_with_error(future, ValueError())
    assert future.cancelled()


def test_a_training_takes_along_the_globals_that_it_uses_and_no_others() -> None:
    namespace = {"FACTOR": 3, "unused": threading.Lock(), "__name__": "__main__"}
    exec("def train(session, x):\n    return FACTOR * x", namespace)
    function, args, kwargs = unpack_training(pack_training(namespace["train"], (2,), {"y": None}))
    assert function(None, *args) == 6
    assert kwargs == {"y": None}


def test_classes_that_can_be_imported_arrive_as_themselves() -> None:
    """Plain dill would send a copy of torch's SGD, which is not a ``torch.optim.Optimizer`` at the receiver."""
    namespace = {"SGD": torch.optim.SGD}
    exec("def train(session):\n    return SGD", namespace)
    function, _, _ = unpack_training(pack_training(namespace["train"], (), {}))
    assert function(None) is torch.optim.SGD


def _closed() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("stream", [_closed(), None])
def test_a_process_ends_in_order_after_the_user_has_closed_a_stream(
    stream: io.StringIO | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", stream)
    flush_streams()
