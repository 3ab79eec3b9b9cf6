"""Files of transfer rates: what is read, and what is refused with its line."""

from __future__ import annotations

import pytest

from freetrain_parsl.errors import InvalidInput
from freetrain_parsl.extensions.globus.sites.planning.model import TransferRate
from freetrain_parsl.extensions.replay.sites.options import read_transfer_rates, same_rate

HEADER = "from,to,megabytes_per_second,latency\n"


def test_rates_are_read_with_comments_and_without_latency(tmp_path):
    file = tmp_path / "rates.csv"
    file.write_text(f"# measured\n{HEADER}a,b,250,3.5\n\n b , a ,40\n")
    assert read_transfer_rates(file, ["a", "b", "c"]) == {
        ("a", "b"): TransferRate(250e6, 3.5),
        ("b", "a"): TransferRate(40e6, 10.0),
    }


def test_one_rate_is_that_of_all_pairs():
    assert same_rate("ab", 5.0) == {("a", "b"): TransferRate(5e6, 10.0), ("b", "a"): TransferRate(5e6, 10.0)}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", ": contains no rates"),
        (HEADER, ": contains no rates"),
        ("a,b,5\n", ":1: the first line must be"),
        (f"{HEADER}a,b\n", ":2: expected"),
        (f"{HEADER}a,b,1,2,3\n", ":2: expected"),
        (f"{HEADER}a,b,5\na,sumit,5\n", ":3: no site 'sumit' (did you mean 'summit'?)"),
        (f"{HEADER}a,a,5\n", ":2: a rate is from one site to another"),
        (f"{HEADER}a,b,fast\n", ":2: a rate must be a positive number of MB/s, got 'fast'"),
        (f"{HEADER}a,b,-1\n", ":2: a rate must be a positive number"),
        (f"{HEADER}a,b,inf\n", ":2: a rate must be a positive number"),
        (f"{HEADER}a,b,5,-1\n", ":2: a latency must be zero or more seconds"),
        (f"{HEADER}a,b,5\n\na,b,6\n", ":4: a second rate from 'a' to 'b'"),
    ],
)
def test_malformed_files_are_refused_with_the_line(tmp_path, text, problem):
    file = tmp_path / "rates.csv"
    file.write_text(text)
    with pytest.raises(InvalidInput) as refusal:
        read_transfer_rates(file, ["a", "b", "summit"])
    assert f"{file}{problem}" in str(refusal.value)


def test_a_file_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(InvalidInput, match="cannot be read"):
        read_transfer_rates(tmp_path / "none.csv", ["a", "b"])
