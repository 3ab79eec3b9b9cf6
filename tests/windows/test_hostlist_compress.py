"""Compression of host lists; expansion is tested with the batch systems' output."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freetrain_parsl.windows.hostlist import compress_hosts, expand_hosts, show_hosts

NAMES = st.from_regex(r"[ab0-2]{1,2}[0-9]{0,2}[a-]{0,1}", fullmatch=True)


@given(st.lists(NAMES, max_size=30))
def test_what_is_compressed_expands_to_the_same_names(names):
    """Without duplicates, for any leading zeros."""
    text = compress_hosts(names)
    expanded = expand_hosts(text) if names else []
    assert len(expanded) == len(set(expanded))
    assert set(expanded) == set(names)


@given(st.integers(0, 200), st.integers(1, 120), st.integers(1, 4))
def test_neighbours_become_one_range(first, count, width):
    names = [f"n{number:0{width}d}" for number in range(first, first + count)]
    assert compress_hosts(reversed(names)) == (names[0] if count == 1 else f"n[{names[0][1:]}-{names[-1][1:]}]")


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ([], ""),
        (["login"], "login"),
        (["login", "login1"], "login,login1"),
        (["1", "2"], "[1-2]"),
        (["n2", "n10", "n9"], "n[2,9-10]"),
        (["nid001", "nid002", "nid004", "gpu1"], "gpu1,nid[001-002,004]"),
        (["r1n01", "r1n02", "r2n01"], "r1n[01-02],r2n01"),
        (["x1-ib", "x2-ib"], "x[1-2]-ib"),
        (["n08", "n09", "n10"], "n[08-10]"),
    ],
)
def test_lists_are_written_as_slurm_writes_them(names, text):
    assert compress_hosts(names) == text


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ([], ""),
        (["n1", "n2"], "n[1-2]"),
        (["pbs1[10]", "pbs1[2]", "pbs1", "pbs2"], "pbs[1-2],pbs1[2],pbs1[10]"),
        (["a,b"], "a,b"),
    ],
)
def test_names_that_a_host_list_cannot_contain_are_shown_as_they_are(names, text):
    assert show_hosts(names) == text


@pytest.mark.parametrize("name", ["", "a,b", "a[1]"])
def test_what_could_not_be_read_back_is_refused(name):
    with pytest.raises(ValueError, match="not a node name"):
        compress_hosts(["n1", name])
