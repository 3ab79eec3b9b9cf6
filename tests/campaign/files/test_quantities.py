"""Durations and amounts of memory are parsed in common formats, without guessing."""

from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freetrain_parsl.campaign.files.yaml_file import parse_duration, parse_memory
from freetrain_parsl.errors import InvalidInput


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 90),
        ("1.5 s", 1.5),
        ("10 min", 600),
        ("2 Hours", 7200),
        ("1 day", 86400),
        ("00:10:00", 600),
        ("100:00:01", 360001),
        ("1-12:00:00", 129600),
    ],
)
def test_a_length_of_time_may_be_written_with_a_unit_or_as_batch_systems_do(text: str, seconds: float) -> None:
    assert parse_duration(text) == timedelta(seconds=seconds)


@pytest.mark.parametrize("text", ["", "90", "-5 s", "10 parsecs", "10:00", "00:61:00", "1e3 s", "s", "1 h 30 min"])
def test_what_could_mean_several_things_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="a duration must be written like '90s'"):
        parse_duration(text)


@given(st.integers(0, 10**7))
def test_every_walltime_that_batch_systems_print_is_read_back(seconds: int) -> None:
    hours, rest = divmod(seconds, 3600)
    assert parse_duration(f"{hours}:{rest // 60:02}:{rest % 60:02}").total_seconds() == seconds


@pytest.mark.parametrize(("text", "amount"), [("512 GB", 512e9), ("64GiB", 64 * 2**30), ("0.5 tb", 5e11)])
def test_an_amount_of_memory_needs_its_unit(text: str, amount: float) -> None:
    assert parse_memory(text) == amount
    with pytest.raises(InvalidInput, match="an amount of memory must be written like"):
        parse_memory(text.rstrip("GBTibt ") or "1")
