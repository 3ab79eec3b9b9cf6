"""Texts of others do nothing to a terminal, and stay readable."""

from __future__ import annotations

import io
import json
import logging
import re
import sys
import time
import unicodedata

import pytest

from freetrain_parsl.screen import say, say_coloured, say_json, say_text, show_logged_warnings
from freetrain_parsl.texts import (
    LONGEST_LINE,
    coloured,
    printable,
    printable_lines,
    shortened,
    with_colours_only,
)

# What is in a text -> what is shown of it.
SHOWN = {
    "lr \x1b[31mred\x1b[0m": "lr red",
    "\x1b]0;title\x07name": "name",
    "\x1b]52;c;cm0gLXJmIH4=\x1b\\name": "name",  # writes the clipboard
    "\x1b]52;c;cm0gLXJm": "52;c;cm0gLXJm",  # without an end: stays visible
    "\x1bP1$r\x1b\\name": "name",
    "\x9b31mred": "red",  # the same as single characters, C1
    "\x9d0;title\x9cname": "name",
    "a\x1b[": "a",
    "a\x1b": "a",
    "\x1bcname": "name",  # resets the terminal
    "a\nb\r\x0bc": "a b  c",
    "delete\x7f": "delete ",
    "user\u202egnp.exe": "user gnp.exe",  # right-to-left override
    "no\u200bthing\u2066\ufeff": "no thing  ",
    "line\u2028separator": "line separator",
    "\udcff bytes of a file name": "\\udcff bytes of a file name",
    "lr [/x] [bold]0.1[/] :smile: 层 é": "lr [/x] [bold]0.1[/] :smile: 层 é",
}


@pytest.mark.parametrize("text", SHOWN)
def test_a_text_is_one_line_of_what_can_be_seen(text):
    assert printable(text) == SHOWN[text]
    assert printable(text).isprintable()


@pytest.mark.parametrize("clean", [printable, printable_lines, coloured, shortened, with_colours_only])
def test_no_character_of_unicode_that_is_a_control_passes(clean):
    """Neither alone nor before what would be its parameters."""
    controls = [chr(code) for code in range(sys.maxunicode + 1) if unicodedata.category(chr(code)) in ("Cc", "Cs")]
    kept = "" if clean in (printable, shortened) else "\n\t"
    for control in controls:
        shown = clean(f"a{control}]52;c;bQ==")
        assert not set(shown) & set(controls) - set(kept), repr(control)


def test_texts_of_several_lines_keep_their_lines_and_tabs():
    assert printable_lines("a\x1b[2J\n\tb\r\n") == "a\n\tb \n"


@pytest.mark.parametrize("clean", [coloured, with_colours_only])
def test_colours_pass_and_nothing_else_does(clean):
    line = "\x1b[1;38:5:9mloss\x1b[0m\t0.1\x1b[2J\x1b[5A\x1b]8;;http://x\x07link\x1b]8;;\x07\x1b[?25l"
    assert clean(line) in ("\x1b[1;38:5:9mloss\x1b[0m\t0.1link", "\x1b[1;38:5:9mloss\x1b[0m\t0.1link\x1b[0m")


def test_colours_end_with_their_line():
    assert coloured("\x1b[41mred") == "\x1b[41mred\x1b[0m"
    assert coloured("\x1b[41mred\x1b[0m") == "\x1b[41mred\x1b[0m"


def test_names_are_cut():
    assert shortened("n" * 120) == "n" * 120
    assert shortened("n" * 121) == "n" * 119 + "…"
    assert shortened("\x1b[31m" * 10**6 + "n", 5).endswith("…")
    assert len(printable_lines("n" * 3 * LONGEST_LINE)) == LONGEST_LINE


@pytest.mark.parametrize("text", ["\x9d" * 200_000, "\x1b]" * 200_000, "\x1b[" * 200_000, "\x1b[1m" * 200_000])
def test_hostile_texts_take_no_longer_than_others(text):
    """No expression goes back over the text: it would take minutes."""
    begin = time.process_time()
    printable(text)
    with_colours_only(text)
    assert time.process_time() - begin < 5


def test_lines_are_said_one_by_one(capsys):
    say("name\nfreetrain: a line that it did not say", "second\x1b[2J")
    say_text("a\x07\nb\n", err=True)
    say_coloured("\x1b[31mred\x1b[2J")
    out, err = capsys.readouterr()
    assert out == "name freetrain: a line that it did not say\nsecond\n\x1b[31mred\x1b[0m\n"
    assert err == "a \nb\n"


def test_json_is_the_value_and_ascii(capsys):
    value = {"name": "".join(SHOWN) + "\x85\x7f\ud800"}
    say_json(value)
    out = capsys.readouterr().out
    assert re.fullmatch(r"[ -~\n]*", out)
    assert json.loads(out) == value


def test_a_terminal_with_another_encoding_costs_characters_not_the_command(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    say("é …")
    assert stream.buffer.getvalue() == b"\\xe9 \\u2026\n"


def test_warnings_that_nobody_handles_are_shown_as_other_texts(monkeypatch, capsys):
    """`logging` prints those of a program that has set up nothing, with the names in them and their tracebacks."""
    monkeypatch.setattr(logging, "lastResort", logging._StderrHandler(logging.WARNING))
    show_logged_warnings()
    record = logging.LogRecord("x", logging.ERROR, "x.py", 1, "host %s", ("h\x1b[2J",), None)
    record.exc_text = "Traceback (most recent call last):\nOSError: bad \x1b]0;title\x07file"
    logging.lastResort.handle(record)
    shown = capsys.readouterr().err
    assert shown.startswith("host h\nTraceback")
    assert "OSError: bad file" in shown
    assert "\x1b" not in shown
