"""Any output of a batch system's command is either parsed or rejected with a one-line `UnreadableAnswer`."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetrain_parsl.errors import BatchSystemError, UnreadableAnswer
from freetrain_parsl.extensions.pbs import parsers as pbs_parsers
from freetrain_parsl.extensions.pbs.jobs import block_status, jobs_of
from freetrain_parsl.extensions.pbs.values import as_mebibytes, read_answer
from freetrain_parsl.windows.hostlist import expand_hosts
from freetrain_parsl.windows.slurm import text_parser as slurm_text
from freetrain_parsl.windows.slurm.json_parser import parse_json_jobs, parse_json_nodes
from tests.extensions.pbs.pbs_answers import FIXTURES as PBS_FIXTURES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from random import Random

FIXTURES = Path(__file__).parent / "fixtures"
DIGITS = "9" * 5000

SLURM_TEXTS: list[tuple[Callable[[str], object], str]] = [
    (parse, (FIXTURES / "slurm-22.05.8" / file).read_text())
    for parse, file in (
        (slurm_text.parse_jobs, "squeue.txt"),
        (slurm_text.parse_nodes, "scontrol_show_nodes.txt"),
        (slurm_text.parse_partitions, "scontrol_show_partition.txt"),
        (slurm_text.parse_reservations, "scontrol_show_reservation.txt"),
    )
]


def _pbs(file: str) -> str:
    return (PBS_FIXTURES / file).read_text()


QUEUES = pbs_parsers.parse_queues(read_answer(_pbs("queues.json"), "qstat"))
SERVER = pbs_parsers.parse_server(read_answer(_pbs("server.json"), "qstat"))


def _history(text: str) -> None:
    for attributes in jobs_of(read_answer(text, "qstat").content, "qstat").values():
        block_status(attributes)


JSON_TEXTS: list[tuple[Callable[[str], object], str]] = [
    (parse_json_jobs, (FIXTURES / "slurm-24.11.5" / "squeue.json").read_text()),
    (parse_json_nodes, (FIXTURES / "slurm-24.11.5" / "scontrol_show_nodes.json").read_text()),
    (parse_json_nodes, (FIXTURES / "slurm-22.05.8" / "sinfo.json").read_text()),
    (lambda text: pbs_parsers.parse_state(text, _pbs("nodes.json"), QUEUES, SERVER), _pbs("jobs.json")),
    (lambda text: pbs_parsers.parse_state(_pbs("jobs.json"), text, QUEUES, SERVER), _pbs("nodes.json")),
    (_history, _pbs("history.json")),
]

TOKENS = ["9" * 400, "-1", "nan", "1e999", "|", "=", "\n", "\t", " ", "[", "]", "n[0-99999999]", "n[0-3],", "(null)",
          "UNLIMITED", "2026-13-45T99:99:99", "9999-12-31T23:59:59", "99999-00:00:00", "\0", "é", "٣", "\ud7ff",
          "gpu:", "%"]  # fmt: skip
VALUES = [None, [], {}, "", -1, 1e400, 10**30, True, "x", "99999:00:00", "9" * 400, [None], [[1]], {"a": 1},
          {"set": True}, {"set": True, "number": "x"}, "9" * 400 + "gb", "2026-13-45T00:00:00"]  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_mutated_text_is_read_or_refused(data: st.DataObject) -> None:
    parse, text = data.draw(st.sampled_from(SLURM_TEXTS))
    for _ in range(data.draw(st.integers(1, 4))):
        begin = data.draw(st.integers(0, len(text)))
        end = min(len(text), begin + data.draw(st.integers(0, 10)))
        text = text[:begin] + data.draw(st.sampled_from(TOKENS)) + text[end:]
    _read_or_refuse(parse, text)


@settings(max_examples=150, deadline=None)
@given(st.randoms(use_true_random=False))
def test_mutated_json_is_read_or_refused(rng: Random) -> None:
    parse, text = rng.choice(JSON_TEXTS)
    content = json.loads(text)
    for _ in range(rng.randint(1, 3)):
        holder, key = rng.choice(list(_places(content)))
        holder[key] = deepcopy(rng.choice(VALUES))
    _read_or_refuse(parse, json.dumps(content))


def _read_or_refuse(parse: Callable[[str], object], text: str) -> None:
    try:
        parse(text)
    except BatchSystemError as error:
        message = str(error)
    else:
        message = ""
    assert "\n" not in message


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield value, key
        yield from _places(item)


@pytest.mark.parametrize("text", ["[" * 100_000, f'{{"jobs": {DIGITS}}}', '{"jobs": [1]}', '{"jobs": [{}]}', ""])
def test_json_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UnreadableAnswer):
        parse_json_jobs(text)
    with pytest.raises(UnreadableAnswer):
        parse_json_nodes(text)
    with pytest.raises(UnreadableAnswer):
        read_answer(text, "qstat")


@pytest.mark.parametrize("text", [DIGITS, "9999-99-99", "1-00:00:00"])
def test_a_date_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UnreadableAnswer):
        slurm_text.parse_reservations(f"ReservationName=a StartTime={text} EndTime=x Nodes=n1")


def test_a_size_of_thousands_of_digits_counts_as_none() -> None:
    assert as_mebibytes(f"{DIGITS}gb") == 0


@pytest.mark.parametrize(
    "text", ["a[0-9999]b[0-9999]", ",".join(["a[0-999999]"] * 3), f"a[0-{DIGITS}]", f"a[{DIGITS}]"]
)
def test_a_host_list_beyond_all_machines_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="list of"):
        expand_hosts(text)
