"""Whatever home lists: nothing wrong is used, nothing that counts is removed, and training jobs continue afterwards."""

from __future__ import annotations

import os
import random
import shutil
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING

import pytest

from freetrain_parsl.campaign.files.yaml_file import Variables
from freetrain_parsl.campaign.site.site import Site
from freetrain_parsl.campaign.store import RunStore
from freetrain_parsl.errors import CollectionUnavailable, GlobusRefused
from freetrain_parsl.extensions.globus.storage import home as home_module
from freetrain_parsl.storage.posix import CheckpointDirectory
from tests.extensions.globus.storage.lying_collections import (
    HOME,
    LIES,
    SITES,
    LyingCollections,
    LyingDisks,
    LyingHistory,
    newest_whole,
)

if TYPE_CHECKING:
    from pathlib import Path

_SEEDS = int(os.environ.get("FREETRAIN_LYING_SEEDS", "8"))


@pytest.mark.parametrize("seed", range(_SEEDS))
def test_listings_that_lie_do_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)  # thousands of checkpoints; no power is cut here
    assert LyingHistory(tmp_path, seed).run() == []


@pytest.mark.parametrize("seed", range(_SEEDS))
def test_prune_removes_nothing_that_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)
    draw = random.Random(seed)
    disks = LyingDisks(tmp_path, draw, [1000.0])
    run, root = tmp_path / "run", tmp_path / SITES["a"][0] / "ft"
    for path in (run, root):
        path.mkdir(parents=True, mode=0o700)
    here = CheckpointDirectory(root, "net")
    here.open()
    for step in range(1, 6):
        here.publish(step, lambda sink: sink.write(b"state"), {"format": 3})
    here.close()
    home = tmp_path / HOME[0] / "ft"
    (home / "owners" / "net.gen-0000000001.by-a1").mkdir(parents=True)
    (home / "owners" / "net.gen-0000000001").mkdir()
    there = home / "checkpoints" / "net" / "gen-0000000001"
    for entry in here.entries()[draw.randint(0, 3) :]:  # the newest ones may not be at home
        shutil.copytree(entry.path, there / entry.path.name)
    before = newest_whole(home / "checkpoints" / "net")
    text = f"system: local\ncheckpoints:\n  directory: {root}\n  globus: {{collection: {SITES['a']}, path: /ft, "
    text += f"home: {{collection: {HOME}, path: /ft}}}}\n"
    site = Site.parse(text, "s.yaml", Variables({}, {}))
    assert site.home is not None
    store = RunStore.create(run, {"run_id": "a1"}, ["net"])
    collections = LyingCollections(disks, "a")
    monkeypatch.setattr(home_module, "Collections", lambda _app: collections)
    monkeypatch.setattr(home_module, "logged_in", lambda _app: nullcontext(None))
    monkeypatch.setattr(home_module, "make_app", lambda: None)
    for _ in range(20):
        disks.lies = {"phantom", *draw.sample(LIES, 3)}
        with suppress(CollectionUnavailable, GlobusRefused):
            site.home.prune(store, draw.randint(1, 2), None, lambda _line: None, dry_run=False)
        for kind, collection, paths in list(disks.tasks.values()):
            assert kind == "delete"
            for path in paths:
                collections._delete(collection, path)
        disks.tasks.clear()
    assert disks.harm == []
    assert newest_whole(home / "checkpoints" / "net") == before
