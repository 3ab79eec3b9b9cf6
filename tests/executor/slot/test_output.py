"""What a process prints while it trains, taken from its file descriptors."""

from __future__ import annotations

import ctypes
import io
import logging
import os
import re
import subprocess
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freetrain_parsl.executor.slot.output import Allowance, OutputCapture

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def captured(delivered: _Delivered, owner: str = "") -> Iterator[OutputCapture]:
    """Capture, with the standard streams that a slot has instead of pytest's."""
    with pytest.MonkeyPatch.context() as patch:
        for name, number in (("stdout", 1), ("stderr", 2)):
            patch.setattr(sys, name, io.TextIOWrapper(io.FileIO(number, "w", closefd=False), encoding="utf-8"))
        with OutputCapture(delivered, owner) as output:
            yield output


class _Delivered:
    def __init__(self) -> None:
        self.messages: list[tuple[str, bytes]] = []

    def __call__(self, owner: str, lines: bytes) -> None:
        self.messages.append((owner, lines))

    def of(self, owner: str = "") -> bytes:
        return b"".join(lines for whose, lines in self.messages if whose == owner)


def test_everything_that_a_process_and_its_children_print_is_taken_in_order() -> None:
    delivered = _Delivered()
    with captured(delivered):
        print("printed")
        print("an error", file=sys.stderr)
        logging.StreamHandler().handle(logging.LogRecord("user", 30, "f", 1, "logged", None, None))
        subprocess.run(["sh", "-c", "echo a child; echo its error >&2"], check=True)
        os.write(1, b"from a library\n")
        print("no end", end="")
    os.write(1, b"afterwards\n")
    lines = ["printed", "an error", "logged", "a child", "its error", "from a library", "no end"]
    assert delivered.of().decode().splitlines() == lines


def test_output_belongs_to_whoever_had_the_turn() -> None:
    delivered = _Delivered()
    with captured(delivered, "a"):
        print("a1")
        sys.stdout.write("half ")
    with captured(delivered, "a") as output:
        for turn in range(3):
            for name in "ab":
                output.attribute(name)
                print(name, turn)
                if turn == 1:
                    output.flush()
    assert delivered.of("a") == b"a1\nhalf \na 0\na 1\na 2\n"
    assert delivered.of("b") == b"b 0\nb 1\nb 2\n"


def test_a_flood_is_cut_without_waiting_or_memory_and_what_is_missing_is_counted() -> None:
    delivered = _Delivered()
    line = b"x" * 999 + b"\n"
    with captured(delivered) as output:
        for _ in range(200):
            os.write(1, line * 100)
        output.flush()
        assert os.fstat(output._file).st_blocks * 512 < 1 << 20, "the memory is given back"
    text = delivered.of()
    assert len(text) < (1 << 20) + 4096
    gaps = re.findall(rb"\xe2\x80\xa6 (\d+) bytes left out", text)
    kept = sum(len(one) + 1 for one in text.split(b"\n") if one == line[:-1])
    assert kept + sum(map(int, gaps)) == 200 * 100 * 1000
    assert text.startswith(line)
    assert text.endswith(line)


def test_a_library_that_prints_while_it_holds_the_interpreter_is_not_blocked() -> None:
    """To a pipe it would wait for a reader that waits for the interpreter."""
    delivered = _Delivered()
    write = ctypes.PyDLL(None).write  # does not release the interpreter's lock
    with captured(delivered):
        block = b"y" * 99 + b"\n"
        assert write(1, block * 8000, 800_000) == 800_000
    assert delivered.of().count(b"y" * 99) == 8000


def test_progress_bars_and_long_lines_are_short_in_the_log() -> None:
    delivered = _Delivered()
    with captured(delivered) as output:
        for percent in range(100):
            sys.stderr.write(f"\r{percent}%")
            if percent % 10 == 0:
                output.flush()
        sys.stderr.write("\n")
        sys.stdout.write("z" * 50_000 + "\nnext\r\n")
    assert delivered.of().split(b"\n")[0] == b"99%"
    assert re.fullmatch(rb"z{16384} \xe2\x80\xa6 33616 bytes left out", delivered.of().split(b"\n")[1])
    assert delivered.of().split(b"\n")[2] == b"next"


def test_a_progress_bar_that_ends_with_its_return_overwrites_its_line() -> None:
    delivered = _Delivered()
    with captured(delivered) as output:
        for percent in range(3):
            sys.stderr.write(f"{percent}%\r")
            sys.stderr.flush()
            output.flush()
        sys.stdout.write("a line\r")
        sys.stdout.flush()
        output.flush()
        sys.stdout.write("\n")
    assert delivered.of() == b"a line\n"


def test_a_long_line_that_is_printed_in_parts_is_cut_once() -> None:
    delivered = _Delivered()
    with captured(delivered) as output:
        for _ in range(5):
            os.write(1, b"y" * 20_000)
            output.flush()
        os.write(1, b"\nnext\n")
    assert re.fullmatch(rb"y{16384} \xe2\x80\xa6 83616 bytes left out\nnext\n", delivered.of())


def test_a_child_that_empties_the_output_loses_no_line_but_its_own() -> None:
    delivered = _Delivered()
    with captured(delivered) as output:
        print("before")
        output.flush()
        subprocess.run(["sh", "-c", "echo reopened > /dev/stdout"], check=True)
        print("after")
        subprocess.run(["sh", "-c", "echo appended >> /dev/stdout"], check=True)
    assert delivered.of().startswith(b"before\n")
    assert delivered.of().endswith(b"\nafter\nappended\n")


def test_output_arrives_within_about_a_second_without_a_flush() -> None:
    delivered = _Delivered()
    with captured(delivered):
        print("hello")
        end = time.monotonic() + 10
        while not delivered.messages:
            assert time.monotonic() < end
            time.sleep(0.02)
    assert delivered.of() == b"hello\n"


def test_closed_streams_and_later_flushes_do_no_harm() -> None:
    delivered = _Delivered()
    with captured(delivered) as output:
        sys.stdout.close()
        os.write(1, b"still\n")
    output.flush(last=True)  # of the channel's thread, at the same time as the end
    assert delivered.of() == b"still\n"


@given(st.lists(st.tuples(st.integers(0, 5000), st.floats(0, 3)), max_size=50))
def test_no_more_passes_than_the_burst_and_the_rate_allow(requests) -> None:
    now = passed = 0.0
    allowance = Allowance(rate=100, burst=1000, now=0.0)
    for amount, pause in requests:
        now += pause
        granted = allowance.take(amount, now)
        assert 0 <= granted <= amount
        passed += granted
        assert passed <= 1000 + 100 * now + 1e-6
