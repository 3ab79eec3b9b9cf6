"""Dates on the time axis, and which logs have them."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetrain_parsl.extensions.pages.dates import TimeAxis, period
from freetrain_parsl.extensions.replay.logs.logs import open_log
from freetrain_parsl.extensions.replay.metrics import log_figures

NOON = datetime(2026, 1, 30, 12, 0)  # noqa: DTZ001 - sacct prints local times without a zone
DAY = 86400.0


@pytest.mark.parametrize(
    ("seconds", "first", "texts"),
    [
        (600, 0, ["12:00", "12:02", "12:04", "12:06", "12:08", "12:10"]),
        (6 * 3600, 0, ["12:00", "13:00", "14:00", "15:00", "16:00", "17:00", "18:00"]),
        (DAY, 0, ["12:00", "15:00", "18:00", "21:00", "31 Jan", "03:00", "06:00", "09:00", "12:00"]),
        (5 * DAY, 0.5 / 5, ["31 Jan", "1 Feb", "2 Feb", "3 Feb", "4 Feb"]),
        (14 * DAY, 0.5 / 14, ["31 Jan", "2 Feb", "4 Feb", "6 Feb", "8 Feb", "10 Feb", "12 Feb"]),
        (200 * DAY, 1.5 / 200, ["Feb 2026", "Mar 2026", "Apr 2026", "May 2026", "Jun 2026", "Jul 2026", "Aug 2026"]),
        (700 * DAY, 1.5 / 700, ["Feb 2026", "May 2026", "Aug 2026", "Nov 2026", "Feb 2027", "May 2027", "Aug 2027"]),
    ],
)
def test_labels_are_round_dates(seconds, first, texts):
    labels = TimeAxis(seconds, NOON).labels()[: len(texts)]
    assert [text for _, text in labels] == texts
    assert labels[0][0] == pytest.approx(first)


def test_without_dates_the_axis_counts_from_the_start():
    assert TimeAxis(3 * DAY).labels()[:3] == [
        (0, "0 h"),
        (pytest.approx(1 / 6), "12 h"),
        (pytest.approx(1 / 3), "24 h"),
    ]
    assert TimeAxis(0.0).labels() == []


@settings(max_examples=200, deadline=None)
@given(
    seconds=st.floats(60, 4e8),
    begin=st.datetimes(datetime(1990, 1, 1), datetime(2030, 1, 1)),  # noqa: DTZ001
    masked=st.lists(st.tuples(st.floats(0, 1), st.floats(1, 1e7)), max_size=3),
)
def test_labels_are_few_in_order_and_apart(seconds, begin, masked):
    """For any removed times."""
    spans = sorted((share * seconds, length) for share, length in masked)
    labels = TimeAxis(seconds, begin, spans).labels()
    shares = [share for share, _ in labels]
    assert len(labels) <= 10
    assert all(-1e-9 <= share <= 1 + 1e-9 for share in shares)
    assert all(second - first >= 0.04 - 1e-9 for first, second in pairwise(shares))


def test_what_was_left_out_moves_later_dates():
    """Four days, of which the second and third are removed: the fourth begins in the middle."""
    midnight = NOON.replace(hour=0)
    labels = TimeAxis(2 * DAY, midnight, [(DAY, 2 * DAY)]).labels()
    assert (0.5, "31 Jan") in [(round(share, 6), text) for share, text in labels]
    assert "1 Feb" not in [text for _, text in labels], "it is at the same place"
    assert TimeAxis(2 * DAY, midnight, [(DAY, 2 * DAY)]).end == midnight + timedelta(days=4)


def row(submit, run, wait=0):
    return f"1 {submit} {wait} {run} 1 -1 -1 1 100 -1 1 -1 -1 -1 -1 -1 -1 -1\n"


@pytest.mark.parametrize(
    ("head", "date"),
    [
        ("; UnixStartTime: 1170175078\n", datetime(2007, 1, 30, 16, 38, 8, tzinfo=timezone.utc)),
        ("; UnixStartTime: 0\n", None),
        ("; UnixStartTime: soon\n", None),
        ("; UnixStartTime: 1e300\n", None),
        ("", None),
    ],
)
def test_a_job_log_has_dates_if_its_head_tells_when_it_began(tmp_path, head, date):
    """With 0 in the header and times since 1970, these count; the log begins at the first end of a job, after 10 s."""
    file = tmp_path / "log.swf"
    file.write_text(f"{head}; MaxNodes: 2\n{row(0, 10)}{row(50, 10)}{row(100, 10)}")
    log = open_log(file)
    assert log.date == date
    assert period(log_figures(log)) == ("30 Jan 2007 (UTC)" if date else "")
    file.write_text(f"; UnixStartTime: 0\n; MaxNodes: 2\n{row(1641021254, 10)}{row(1641021354, 10)}")
    assert period(log_figures(open_log(file))) == "1 Jan 2022 (UTC)"


def test_sacct_has_the_dates_that_it_prints(tmp_path):
    """From the first end of a job to the last start of one."""
    file = tmp_path / "sacct.txt"
    file.write_text(
        "JobID|Submit|Start|End|NNodes|Timelimit\n"
        "1|2026-01-30T10:00:00|2026-01-30T10:00:00|2026-01-30T12:00:00|1|1:00:00\n"
        "2|2026-02-02T10:00:00|2026-02-02T10:00:00|2026-02-02T12:00:00|1|1:00:00\n"
    )
    log = open_log(file, nodes=2)
    assert log.date == datetime(2026, 1, 30, 12, 0)  # noqa: DTZ001 - as it is printed
    assert period(log_figures(log)) == "30 Jan 2026 to 2 Feb 2026"


def test_an_idle_log_has_none(tmp_path):
    (tmp_path / "idle.csv").write_text("a,0,100\n")
    assert period(log_figures(open_log(tmp_path / "idle.csv"))) == ""
