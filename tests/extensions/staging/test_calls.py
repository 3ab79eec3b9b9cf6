"""A start on a slow shared file system: how many calls reach it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.slowfs import missing_for_slowfs

pytestmark = pytest.mark.cluster

STARTS = Path(__file__).parents[3] / "benchmarks" / "starts.py"
MOST = 400
"""Calls, of 40,000 without an image: 115 to 229 were seen, from a checkout, on machines with other work.

The longer a start takes, the more often the kernel, which keeps names for a second, asks again.
"""


def test_few_calls_of_a_start_reach_the_shared_file_system(tmp_path: Path) -> None:
    if missing := missing_for_slowfs():
        pytest.skip(missing)
    out = tmp_path / "rows.json"
    command = [sys.executable, STARTS, "--latencies", "1", "--image", "auto", "--unpacks", "yes", "--json", out]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads(out.read_text(encoding="utf-8"))
    assert [row["unpacks"] for row in rows] == [True]
    assert rows[0]["shared_tree_calls"] <= MOST
