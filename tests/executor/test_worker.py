"""A slot's messages and network interface; its life is tested with the executor."""

from __future__ import annotations

import io
import sys
import threading
from concurrent.futures import Future

import pytest
import torch
from parsl.serialize import serialize

from freetrain_parsl.executor.payloads import error_in, pack_training, settle_with_payload, unpack_training
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
    settle_with_payload(future, serialize(2))
    assert future.result() == 1


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
