"""Nodes of the embedded cluster start from an image of this environment."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.data import TensorDataset

from freetrain_parsl import training_app

if TYPE_CHECKING:
    from collections.abc import Callable

    from freetrain_parsl import TrainingSession
    from tests.executor.scenario import Site

pytestmark = pytest.mark.cluster


@training_app(max_nodes=1)
def where(session: TrainingSession) -> dict[str, Any]:
    """Train for a moment; return where the process has its files."""
    import wave  # nothing else imports it

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
    }


def image_of(site: Site, seconds: float = 150.0) -> Path:
    """Wait until the run has an image."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if site.executor.node_start._made is not None:
            return site.executor.node_start._made.path
        time.sleep(0.1)
    raise AssertionError("there is no image")


def test_a_node_starts_from_the_image_and_the_next_one_has_what_it_lacked(
    start: Callable[..., Site], tmp_path, monkeypatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    site = start(nodes=1, node_image="always")
    image = image_of(site)
    found = where().result(timeout=90)
    name = image.name.removesuffix(".tar.gz")
    assert found["fault"] == ""
    assert Path(found["image"]).name == name
    assert found["torch"].startswith(found["prefix"])
    assert found["prefix"].endswith(name)
    assert not found["wave"].startswith(found["prefix"]), "it was read by its link"
    print(found)
