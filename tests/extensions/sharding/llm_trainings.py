"""The example app ``llm.py`` for a crew, in float64; in a separate module because its processes import it."""

from __future__ import annotations

import importlib.util
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import training_crew

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

SMALL = {"epochs": 3, "batch_size": 16, "micro_batch": 4, "width": 16, "layers": 2, "context": 16, "windows": 40}


def app() -> ModuleType:
    """Import the app."""
    spec = importlib.util.spec_from_file_location("llm", Path(__file__).parents[3] / "apps" / "llm.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextmanager
def float64() -> Iterator[None]:
    """Make float64 the default type."""
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def train_llm(session: Any, *, pause_after: int | None = None, gates: dict[int, Path] | None = None) -> dict[str, Any]:
    """Train as the app does, in the order of torch's DataLoader; ask for a pause, or wait for a file, after a step."""
    make = session.step

    def step() -> bool:
        made: bool = make()
        if session.metrics["steps"] == pause_after and session.is_main_process:
            training_crew.NOTICE.pause_requested.set()
        while made and gates and not gates.get(session.metrics["steps"], Path("/")).exists():
            time.sleep(0.002)
        return made

    session.step = step
    session.loader = partial(session.loader, order="torch")
    with float64():
        metrics: dict[str, Any] = app().train.func(session, **SMALL)
    return metrics
