"""`benchmarks/thousand_nodes.py` counts how soon the nodes of windows are used."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from freetrain_parsl.protocol import journal as record

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("thousand_nodes")


def test_each_node_counts_once_and_its_parts_add_up(benchmark: Any) -> None:
    """Its block is seen to run after its group has formed; later it is in another block, and in other groups."""
    records = [
        (15.0, record.BlockRequested("0", ["a", "b"], 600.0, None)),
        (22.0, record.NodeJoined("a", "0", 600.0)),
        (23.0, record.NodeJoined("b", "0", 600.0)),
        (25.0, record.FragmentStarted("job", 1, ["a", "b"], in_place=False, paused=0.0)),
        (30.0, record.BlockStarted("0", ["a", "b"], 600.0, 20.0)),
        (90.0, record.FragmentStarted("job", 2, ["a"], in_place=True, paused=1.0)),
        (100.0, record.BlockEnded("0", ["a", "b"], "preempted")),
        (105.0, record.BlockRequested("1", ["a"], 600.0, None)),
        (110.0, record.NodeJoined("a", "1", 700.0)),
        (111.0, record.FragmentStarted("job", 3, ["a"], in_place=False, paused=2.0)),
    ]
    waits = benchmark.waits(records, {"a": 5.0, "b": 16.0}, 10.0)
    assert [tuple(wait.parts().values()) for wait in waits] == [(5.0, 5.0, 2.0, 3.0), (0.0, 4.0, 3.0, 2.0)]
    assert [wait.seconds for wait in waits] == [15.0, 9.0]
