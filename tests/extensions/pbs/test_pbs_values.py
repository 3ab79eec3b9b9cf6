"""Parsing of PBS output: invalid JSON, sizes, durations, vnodes."""

from __future__ import annotations

import pytest

from freetrain_parsl.errors import BatchSystemError
from freetrain_parsl.extensions.pbs.values import (
    as_date,
    as_duration,
    as_mebibytes,
    as_number,
    as_text,
    as_vnodes,
    read_answer,
    write_duration,
)


def answer(*lines):
    return read_answer("\n".join(('{\t"timestamp":\t1795228055,', *lines, "}")), "qstat -f")


def test_what_is_json_is_not_mended():
    read = answer('\t"Job_Name":\t"a \\"quoted\\" name"')
    assert read.content["Job_Name"] == 'a "quoted" name'
    assert read.time == 1795228055.0
    assert read.notes == ()


@pytest.mark.parametrize(
    ("printed", "meant"),
    [
        ("inf", "inf"),
        ("007", "007"),
        ("1.", "1."),
        ("0x1F", "0x1F"),
        ('"say "hello""', 'say "hello"'),
        (r'"C:\dir \d+"', r"C:\dir \d+"),
        ('"one\ntwo"', "one\ntwo"),
        ('"a "b\nc" d"', 'a "b\nc" d'),
    ],
)
def test_broken_values_are_mended_and_counted(printed, meant):
    """A value that PBS printed incorrectly is repaired, and a note reports it."""
    read = answer(f'\t"Job_Name":\t{printed},', '\t"Priority":\t0')
    assert read.content["Job_Name"] == meant
    assert read.content["Priority"] == 0
    if "\n" not in printed or printed.count('"') > 2:
        assert read.notes == ("qstat -f printed 1 lines that are not valid JSON; they were repaired",)


@pytest.mark.parametrize("text", ["", "qstat: busy\n", "[]", '{"Jobs": {}}', '{"timestamp": 1, "Jobs": {'])
def test_nonsense_is_refused_by_the_name_of_the_command(text):
    with pytest.raises(BatchSystemError, match=r"^qstat -f returned invalid output"):
        read_answer(text, "qstat -f")


def test_names_that_look_like_numbers_stay_names():
    assert [as_text(value) for value in (7, 100000.0, None, "x", ["a", 1])] == ["7", "100000", "", "x", "a,1"]


@pytest.mark.parametrize(
    ("size", "mebibytes"),
    [("16gb", 16384), ("158900144kb", 155175), ("1048576", 1), ("2mw", 16), ("0kb", 0), ("<various>", 0), (None, 0)],
)
def test_sizes(size, mebibytes):
    assert as_mebibytes(size) == mebibytes


@pytest.mark.parametrize(
    ("value", "number"), [(4, 4.0), ("4", 4.0), ("@pbs1", 1.0), ("inf", 1.0), ("<various>", 1.0), (None, 1.0)]
)
def test_counts_that_are_none_count_as_told(value, number):
    assert as_number(value, 1.0) == number


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("00:10:00", 600.0), ("100:00:01", 360001.0), ("05:30", 330.0), (90, 90.0), ("", None), ("never", None)],
)
def test_durations(value, seconds):
    assert as_duration(value) == seconds


def test_durations_are_written_to_the_second_and_rounded_down():
    assert [write_duration(seconds) for seconds in (0.9, 596.7, 360001)] == ["00:00:00", "00:09:56", "100:00:01"]


def test_dates_are_local_time_or_seconds(utc):
    assert as_date("Sat Nov 21 02:37:25 2026") == 1795228645.0
    assert as_date(1795228645) == 1795228645.0
    assert as_date("TBD") is None


@pytest.mark.parametrize(
    ("text", "vnodes"),
    [
        ("(pbs1[0]:ncpus=4:ngpus=4)+(pbs1[1]:ncpus=4)", ("pbs1[0]", "pbs1[1]")),
        ("(a:ncpus=2+b:ncpus=2)+(a:ncpus=1)", ("a", "b")),
        ("x3001c0s13b1n0:ncpus=64", ("x3001c0s13b1n0",)),
        ("", ()),
    ],
)
def test_vnodes_are_listed_once_each(text, vnodes):
    assert as_vnodes(text) == vnodes
