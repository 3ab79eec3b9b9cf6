"""Invalid settings raise a one-line error; the closing time of a node."""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from freetrain_parsl.errors import InvalidSettings
from freetrain_parsl.protocol.options import SessionOptions
from freetrain_parsl.training.mailbox import ControlMailbox, Membership


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": -1}, "seed must be a whole number of at least 0, got -1"),
        ({"checkpoint_interval": timedelta(0)}, "checkpoint_interval must be longer than zero"),
        ({"keep": 0}, "keep must be at least 1"),
        ({"save_margin": timedelta(seconds=-1)}, "save_margin must not be negative"),
        ({"threads": 0}, "threads must be at least 1"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidSettings, match=message):
        SessionOptions("net", Path("root"), **options)


@pytest.mark.parametrize(("rank", "world_size"), [(1, 1), (-1, 2), (0, 0)])
def test_a_rank_outside_its_group_is_refused(rank: int, world_size: int) -> None:
    with pytest.raises(InvalidSettings, match=f"rank {rank} is not in a group of {world_size}"):
        Membership("net", rank=rank, world_size=world_size)


def test_a_notice_counts_down_and_can_be_taken_back() -> None:
    now = [100.0]
    mailbox = ControlMailbox(lambda: now[0])
    assert mailbox.closes_in() is None
    mailbox.close_after(timedelta(seconds=30))
    now[0] = 110.0
    assert mailbox.closes_in() == 20
    mailbox.close_after(None)
    assert mailbox.closes_in() is None


def test_the_terms_do_not_import_torch() -> None:
    """The driver imports this module, and must not load torch."""
    code = "import sys, freetrain_parsl.training.mailbox; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
