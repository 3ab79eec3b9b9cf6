"""Whatever home lists: nothing wrong is used, nothing that counts is removed, and trainings go on afterwards."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from tests.storage.globus.lying_collections import LyingHistory

if TYPE_CHECKING:
    from pathlib import Path

_SEEDS = int(os.environ.get("FREETRAIN_LYING_SEEDS", "8"))


@pytest.mark.parametrize("seed", range(_SEEDS))
def test_listings_that_lie_do_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)  # thousands of checkpoints; no power is cut here
    assert LyingHistory(tmp_path, seed).run() == []
