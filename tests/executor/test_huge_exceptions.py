"""An exception of any size costs a slot and its driver little: what is too large is cut where it is raised."""

from __future__ import annotations

import time
from typing import Any

import pytest

from freetrain_parsl.executor.payloads.payloads import error_in
from freetrain_parsl.executor.slot import run_end
from freetrain_parsl.executor.slot.run_end import end_by, print_exception, serialized_exception
from freetrain_parsl.protocol.reports import RunFailed
from freetrain_parsl.texts import text_of


def long_text() -> BaseException:
    return ValueError("begin " + "x" * 30_000_000 + " end")


def long_text_of_its_own() -> BaseException:
    class Wordy(Exception):
        def __str__(self) -> str:
            return "begin " + "y" * 30_000_000 + " end"

    return Wordy()


def many_arguments() -> BaseException:
    return ValueError(bytearray(30_000_000), "begin")


def many_notes() -> BaseException:
    error = ValueError("begin")
    error.__notes__ = ["a note that is not short"] * 1_000_000  # `add_note` is new in Python 3.11
    return error


def deep_causes() -> BaseException:
    error = ValueError("begin")
    for _ in range(20_000):
        error, cause = ValueError("begin"), error
        error.__cause__ = cause
    return error


def long_cause() -> BaseException:
    error = ValueError("begin")
    error.__cause__ = ValueError("x" * 30_000_000)
    return error


HUGE = [long_text, long_text_of_its_own, many_arguments, many_notes, deep_causes, long_cause]


@pytest.mark.parametrize("make", HUGE, ids=lambda make: make.__name__)
def test_what_is_sent_and_printed_is_bounded_and_names_the_exception(
    make, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_end, "_LONGEST_TEXT", 100.0)  # what takes long on a loaded machine is cut by size here
    error = make()
    end, payload = end_by(error)
    assert isinstance(end, RunFailed)
    assert len(end.reason) <= 500
    assert len(payload) <= 4 << 20
    assert "begin" in text_of(error_in(payload)) or "bytearray" in text_of(error_in(payload))
    print_exception(error)
    printed = capsys.readouterr().err
    assert type(error).__name__ in printed
    assert len(printed) <= (1 << 20) + 100


def test_an_exception_that_is_cut_says_its_size() -> None:
    error = error_in(serialized_exception(long_text()))
    assert type(error) is RuntimeError
    assert text_of(error).startswith("ValueError: begin xxx")
    assert "[cut: 30,000,010 characters]" in text_of(error)
    assert "the exception itself has at least 30," in text_of(error)


def test_a_stand_in_has_the_traceback() -> None:
    def fail() -> None:
        raise long_text()

    with pytest.raises(ValueError, match="begin") as caught:
        fail()
    error = error_in(serialized_exception(caught.value))
    names = []
    trace = error.__traceback__
    while trace is not None:
        names.append(trace.tb_frame.f_code.co_name)
        trace = trace.tb_next
    assert "fail" in names


def test_an_exception_of_usual_size_is_passed_on_as_it_is() -> None:
    error = error_in(serialized_exception(KeyError("x" * 100_000, [1])))
    assert type(error) is KeyError
    assert error.args == ("x" * 100_000, [1])


def test_the_end_of_a_text_is_kept() -> None:
    text = text_of(ValueError("begin" + "x" * 30_000 + "end"))
    assert text.startswith("beginx")
    assert text.endswith("xend")
    assert len(text) < 21_000


def slow_class(*, text: Any = None, representation: Any = None, pickled: Any = None) -> BaseException:
    class Slow(ValueError):
        def __str__(self) -> str:
            return "text" if text is None else text()

        def __repr__(self) -> str:
            return "representation" if representation is None else representation()

        def __reduce__(self) -> Any:
            return super().__reduce__() if pickled is None else pickled()

    return Slow()


def sleep() -> str:
    time.sleep(30)
    return ""


def spin_for_a_while() -> str:
    end = time.monotonic() + 3
    while time.monotonic() < end:
        pass
    return ""


SLOW = {
    "text": slow_class(text=sleep),
    "busy": slow_class(text=spin_for_a_while),
    "representation": slow_class(representation=sleep),
    "pickling": slow_class(pickled=sleep),
}


@pytest.mark.parametrize("kind", SLOW)
def test_an_exception_whose_texts_take_long_is_passed_on_without_them(
    kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its slot never ended, or the driver's loop did not answer any slot."""
    monkeypatch.setattr(run_end, "_LONGEST_TEXT", 0.6)  # 1 in whole seconds
    begin = time.monotonic()
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - its text takes long
        raise SLOW[kind]
    end, payload = end_by(caught.value)
    assert isinstance(end, RunFailed)
    assert end.reason == "Slow: its text takes more than 1 s, and was left out"
    for sent in (payload, serialized_exception(caught.value)):
        error = error_in(sent)
        assert type(error) is RuntimeError
        assert error.__traceback__ is not None
        assert text_of(error) == end.reason
    print_exception(caught.value)
    assert "Slow" in capsys.readouterr().err
    assert time.monotonic() - begin < 10


def test_sys_exit_with_a_slow_argument_is_an_error_of_the_app(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(BaseException):
        def __str__(self) -> str:
            return sleep()

    monkeypatch.setattr(run_end, "_LONGEST_TEXT", 1.0)
    assert text_of(error_in(serialized_exception(Slow()))).startswith("Slow: its text takes more than")


def test_an_exception_is_passed_on_where_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_self: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(run_end.threading.Thread, "start", refuse)
    assert type(error_in(serialized_exception(KeyError("x")))) is KeyError
