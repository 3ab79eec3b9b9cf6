"""The logs of training jobs: written by the driver, read by anyone, at the same time."""

from __future__ import annotations

import os
import re
import resource
import stat
import threading
import time
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetrain_parsl.executor import training_logs as writer_module
from freetrain_parsl.executor.training_logs import LogLine, LogWriter, as_text, leave_behind, log_files, parse_line
from freetrain_parsl.protocol import journal as record
from freetrain_parsl.report.log_reader import follow_logs, has_writer, read_logs


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "logs"


@pytest.fixture
def make_writer(directory, monkeypatch):
    """Make writers whose thread writes often; those left open are closed."""
    monkeypatch.setattr(writer_module, "_PERIOD", 0.01)
    made = []

    def make(*trainings: str) -> LogWriter:
        writer = LogWriter(directory)
        for name in trainings:
            writer.note(record.TrainingSubmitted(name, 1, 1, None))
        made.append(writer)
        return writer

    yield make
    for writer in made:
        writer.close()


def _texts(directory, *trainings: str, **options: bool) -> list[str]:
    return [line.text for line in read_logs(directory, trainings, **options)]


@settings(max_examples=40)
@given(
    st.floats(0, 4e9),
    st.sampled_from(["=", "0", "7", "?", "!3", "!?"]),
    st.text(st.characters(codec="utf-8", exclude_characters="\n")),
)
def test_any_text_is_one_line_and_comes_back_without_control_characters(when, source, text) -> None:
    line = as_text(when, source, text)
    assert line.count("\n") == 1
    assert line.endswith("\n")
    read = parse_line("t", line)
    assert read is not None
    assert abs(read.time - when) < 0.0015
    assert (read.training, read.source) == ("t", source)
    seen = [c for c in text if c == "\t" or unicodedata.category(c) != "Cc"]
    without_colours = re.sub(r"\x1b\[[0-9;:]*m", "", read.text)
    assert all(c == "\t" or unicodedata.category(c) != "Cc" for c in without_colours)
    if not set(text) & {chr(code) for code in (0x1B, *range(0x80, 0xA0))}:  # else parts belong to escape sequences
        assert read.text == "".join(seen)


def test_half_of_a_surrogate_pair_is_written_as_an_escape() -> None:
    """A training job may print any string; the log is UTF-8."""
    read = parse_line("t", as_text(0.0, "=", "a\ud800b"))
    assert read is not None
    assert read.text == "a\\ud800b"


@settings(max_examples=40)
@given(st.text())
def test_a_damaged_line_is_no_line(text) -> None:
    assert parse_line("t", text) is None or parse_line("t", text).source


def test_marks_and_output_are_in_the_order_in_which_they_came(directory, make_writer) -> None:
    writer = make_writer("a", "b")
    writer.start()
    writer.note(record.FragmentStarted("a", 1, ["n1", "n2"], in_place=False, paused=0.0))
    writer.take("a", "0", b"epoch 0\nepoch 1\n")
    writer.take("a", "1", "from the second \udcff".encode(errors="surrogateescape") + b"\n")
    writer.take("b", "0", b"other\n")
    writer.take("unknown", "0", b"of no training\n")
    writer.take("../b", "0", b"of no training\n")
    writer.note(record.FragmentEnded("a", 1, ["n1", "n2"], failure=True, lost={"n1/0/x": "n1"}))
    writer.note(record.FragmentStarted("a", 2, ["n2"], in_place=True, paused=0.25, repaired=True))
    writer.note(record.SlotLost("a", "n1", "not about a training job's fragment"))
    writer.note(record.TrainingFailed("a", "ValueError: on\ntwo lines"))
    writer.close()
    told = [(line.source, line.text) for line in read_logs(directory, ["a"], everything=True)]
    assert told == [
        ("=", "trains on n1, n2"),
        ("0", "epoch 0"),
        ("0", "epoch 1"),
        ("1", "from the second �"),
        ("=", "its process on n1 was lost; it trained on n1, n2"),
        ("=", "trains on n2 (in place after 0.25 s, no step repeated)"),
        ("=", "failed: ValueError: on two lines"),
    ]
    assert "from the second �" not in _texts(directory, "a")
    assert sorted(path.name for path in directory.iterdir()) == ["a.log", "b.log", "writer.lock"]


def test_what_utf8_cannot_encode_is_escaped(directory, make_writer) -> None:
    """Python has the bytes of a file name like this; a thread that fails would end the logs of all training jobs."""
    writer = make_writer("a", "b")
    writer.note(record.TrainingFailed("a", "FileNotFoundError: no file 'x\udcff.png'"))
    writer.start()
    time.sleep(0.05)
    writer.take("b", "0", b"continues\n")
    writer.close()
    assert _texts(directory, "a", "b") == [r"failed: FileNotFoundError: no file 'x\udcff.png'", "continues"]


def test_logs_are_private_whatever_the_umask(directory, make_writer) -> None:
    before = os.umask(0)
    try:
        writer = make_writer("a")
        writer.start()
        writer.take("a", "0", b"x\n")
        writer.close()
    finally:
        os.umask(before)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()} == {0o600}


def test_a_log_is_bounded_and_keeps_its_last_lines(directory, make_writer, monkeypatch) -> None:
    monkeypatch.setattr(writer_module, "_LARGEST_LOG", 40_000)
    writer = make_writer("a")
    for number in range(4000):
        writer.take("a", "0", b"line %d\n" % number)
        if number % 50 == 0:
            writer._write()
    writer._write()
    assert 20_000 < sum(path.stat().st_size for path in log_files(directory)["a"]) < 45_000
    numbers = [int(text.split()[1]) for text in _texts(directory, "a")]
    assert numbers == list(range(numbers[0], 4000)), "in order, without a gap"
    assert len(numbers) > 500


def test_a_follower_misses_nothing_through_rotations_and_ends_with_the_run(directory, make_writer, monkeypatch) -> None:
    monkeypatch.setattr(writer_module, "_LARGEST_LOG", 400_000)
    monkeypatch.setattr("freetrain_parsl.report.log_reader._PERIOD", 0.01)
    writer = make_writer("a")
    writer.start()
    followed: list[LogLine] = []
    over = threading.Event()

    def follow() -> None:
        lines = follow_logs(directory, lambda: ["a", "late"], ended=over.is_set, sleep=time.sleep)
        followed.extend(lines)

    thread = threading.Thread(target=follow)
    thread.start()
    for number in range(8000):
        writer.take("a", "0", b"%d\n" % number)
        if number % 200 == 0:
            time.sleep(0.005)
    writer.close()
    over.set()
    thread.join(20)
    assert len(log_files(directory)["a"]) > 1
    assert [int(line.text) for line in followed] == list(range(8000))


def test_following_begins_with_the_last_lines(directory, make_writer) -> None:
    writer = make_writer("a", "b")
    for number in range(10):
        writer.take("ab"[number % 2], "0", b"%d\n" % number)
        writer._write()
        time.sleep(0.002)
    for tail, expected in ((3, ["7", "8", "9"]), (0, []), (None, [str(number) for number in range(10)])):
        lines = follow_logs(directory, lambda: ["a", "b"], ended=lambda: True, sleep=time.sleep, tail=tail)
        assert [line.text for line in lines] == expected


def test_a_directory_that_cannot_be_written_costs_nothing_until_memory_is_short(tmp_path, monkeypatch, caplog) -> None:
    monkeypatch.setattr(writer_module, "_MOST_WAITING", 2000)
    (tmp_path / "logs").write_text("in the way")
    writer = LogWriter(tmp_path / "logs")
    writer.note(record.TrainingSubmitted("a", 1, 1, None))
    writer.take("a", "0", b"first\n")
    writer._write()
    assert "cannot write the training jobs' logs" in caplog.text
    for _ in range(100):
        writer.take("a", "0", b"y" * 50 + b"\n")
    (tmp_path / "logs").unlink()
    writer.close()
    texts = _texts(tmp_path / "logs", "a")
    assert texts[0] == "first"
    left_out = int(texts[-1].split()[0])
    assert texts[-1] == f"{left_out} lines left out: the log could not be written in time"
    assert texts.count("y" * 50) + left_out == 100


def test_the_next_driver_mends_a_half_line_and_adds_what_slots_left_behind(directory, make_writer) -> None:
    first = make_writer("a")
    first.start()
    first.take("a", "0", b"before\n")
    first.close()
    with (directory / "a.log").open("a") as file:
        file.write("2026-01-01T00:00")  # killed while it wrote
    leave_behind(directory, "a", "slot1", [as_text(1.0, "0", "after the driver"), "nonsense\n"])
    assert _texts(directory, "a") == ["before", "after the driver"], "before the next driver, too"
    second = make_writer()
    second.start()
    second.note(record.TrainingSubmitted("a", 1, 1, None))
    second.take("a", "0", b"new\n")
    second.close()
    texts = _texts(directory, "a")
    assert [text for text in texts if "printed" not in text] == ["before", "after the driver", "new"] or [
        text for text in texts if "printed" not in text
    ] == ["before", "new", "after the driver"]
    assert _texts(directory, "a") == texts
    assert not list((directory / "left-behind").iterdir())


def test_a_reader_sees_whether_a_driver_writes(directory, make_writer) -> None:
    assert not has_writer(directory)
    writer = make_writer("a")
    writer.start()
    end = time.monotonic() + 10
    while not has_writer(directory):
        assert time.monotonic() < end
        time.sleep(0.01)
    writer.close()
    assert not has_writer(directory)


def test_many_trainings_have_few_files_open_at_a_time(tmp_path: Path) -> None:
    """With ten thousand, each as a file of its own, `freetrain logs` would need as many descriptors."""
    names = [f"t{number}" for number in range(300)]
    for name in names:
        (tmp_path / f"{name}.log").write_text(as_text(1e9, "0", f"{name} first") + as_text(2e9, "0", "last"))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(list(Path("/proc/self/fd").iterdir())) + 100, hard))
    try:
        lines = list(read_logs(tmp_path, names))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert [line.text for line in lines] == [*(f"{name} first" for name in names), *["last"] * len(names)]
