"""Nodes of the embedded cluster start from an image of this environment."""

from __future__ import annotations

import os
import sys
import tempfile
import time
import wave  # no node imports it, but for the job below
from pathlib import Path
from typing import TYPE_CHECKING, Any

import parsl
import pytest
import torch
from torch.utils.data import TensorDataset

from freetrain_parsl import training_app
from freetrain_parsl.executor.journal import read_kinds
from freetrain_parsl.extensions.staging.make import learned_path, read_learned
from freetrain_parsl.extensions.staging.start import ImageStart
from freetrain_parsl.protocol.journal import PlainStart

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from freetrain_parsl import TrainingSession
    from freetrain_parsl.executor.htex.node_start import NodeStart
    from tests.executor.scenario import Site

pytestmark = pytest.mark.cluster


@training_app(max_nodes=1, stage=["data.txt"])
def where(session: TrainingSession, run: int) -> dict[str, Any]:
    """Train for a moment; return where the process has its files."""
    import wave

    model, _ = session.prepare(torch.nn.Linear(2, 1), torch.optim.SGD, lr=0.1)
    data = session.loader(TensorDataset(torch.ones(8, 2)), batch_size=4)
    for _ in session.epochs(1):
        for (x,) in data:
            session.step(model(x).mean())
    return {
        "image": os.environ.get("FREETRAIN_IMAGE", ""),
        "fault": os.environ.get("FREETRAIN_IMAGE_FAULT", ""),
        "prefix": sys.prefix,
        "torch": torch.__file__,
        "wave": os.path.realpath(wave.__file__),
        "data": session.staged("data.txt"),
        "content": session.staged("data.txt").read_text(encoding="utf-8"),
    }


def image_of(site: Site, seconds: float = 150.0) -> Path:
    """Wait until the run has an image."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        start = site.executor.node_start
        assert isinstance(start, ImageStart)
        if start._made is not None:
            return start._made.path
        time.sleep(0.1)
    raise AssertionError("there is no image")


@pytest.fixture
def memory() -> Iterator[Path]:
    """Return a directory in memory: other runs of this user use the same images."""
    with tempfile.TemporaryDirectory(prefix="freetrain-test-", dir="/dev/shm") as directory:
        yield Path(directory)


def learned_by(start: NodeStart, seconds: float = 60.0) -> list[str]:
    """Wait until files are known that the image lacked; return them."""
    assert isinstance(start, ImageStart)
    assert start._made is not None
    path = learned_path(start._cache, start._made.trees)
    end = time.monotonic() + seconds
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.1)
    return read_learned(path)


@pytest.mark.smoke
def test_a_node_starts_from_the_image_and_the_next_image_has_what_it_lacked(
    start: Callable[..., Site], memory: Path, tmp_path: Path, monkeypatch
) -> None:
    """So does a later run; one whose image is damaged starts plainly, and says so. Data of the user are copied, too."""
    monkeypatch.chdir(tmp_path)
    Path("data.txt").write_text("the data", encoding="utf-8")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("FREETRAIN_IMAGE_PLACES", str(memory))
    site = start(nodes=1, node_image="always")
    image = image_of(site)
    found = where(1).result(timeout=90)
    name = image.name.removesuffix(".tar.gz")
    assert found["fault"] == ""
    assert Path(found["image"]).name == name
    assert found["prefix"] == found["image"]
    assert found["torch"].startswith(f"{found['prefix']}/")
    assert found["wave"] == os.path.realpath(wave.__file__), "it was read by its link"
    assert found["data"].is_relative_to(memory)
    assert found["content"] == "the data"
    assert wave.__file__ in learned_by(site.executor.node_start)
    parsl.dfk().cleanup()
    parsl.clear()
    assert not image.parent.exists(), "the run's copy is removed"
    assert Path(found["image"]).is_relative_to(memory)
    assert not Path(found["image"]).exists(), "the last pilot gives the memory back"
    assert not found["data"].exists()

    again = start(nodes=1, node_image="always")
    second = image_of(again)
    assert second.name != image.name
    second.write_bytes(b"damaged")
    found = where(2).result(timeout=90)
    assert found["image"] == ""
    assert "is damaged" in found["fault"]
    assert found["prefix"] == sys.prefix
    told = [entry.detail["reason"] for entry in read_kinds(again.executor.journal_path, [PlainStart])]
    assert told == [found["fault"]]
