"""A checkpoint manager whose writes a test controls."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

import torch
from training_runs import Clock

from freetrain_parsl.protocol.options import SessionOptions
from freetrain_parsl.training.checkpoints.format import Checkpoints
from freetrain_parsl.training.checkpoints.manager import CheckpointManager
from freetrain_parsl.training.group.process_group import Group

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


class ControlledManager:
    """A checkpoint manager with a fake clock, whose writes wait for the test and can fail."""

    def __init__(
        self, root: Path, monkeypatch: pytest.MonkeyPatch, *, group: Group | None = None, **options: Any
    ) -> None:
        self.clock = Clock()
        self.group = group or Group()
        self.may_write = threading.Event()
        self.may_write.set()
        self.problem: OSError | None = None
        self.states = 0
        self.weight = torch.zeros(4)
        self.manager = CheckpointManager(SessionOptions("net", root, **options), lambda: self.group, clock=self.clock)
        real_save = Checkpoints.save

        def save(checkpoints: Checkpoints, *args: Any, **kwargs: Any) -> Any:
            assert self.may_write.wait(20)
            return real_save(checkpoints, *args, **kwargs)

        monkeypatch.setattr(Checkpoints, "save", save)
        fsync = os.fsync

        def sync(descriptor: int) -> None:
            if self.problem is not None:
                raise self.problem
            fsync(descriptor)

        monkeypatch.setattr(os, "fsync", sync)

    def state(self) -> dict[str, Any]:
        self.states += 1
        return {"objects": {"weight": self.weight}}

    def save(self, step: int, *, wait: bool = False, **options: Any) -> None:
        self.manager.save(self.state, step=step, epoch=0, reason="test", wait=wait, **options)

    def settle(self) -> None:
        """Let the background write end, successfully or not."""
        self.may_write.set()
        self.manager._saver._background._running.result(20)

    def fail(self, code: int) -> None:
        self.problem = OSError(code, os.strerror(code))

    def steps(self) -> list[int]:
        return [entry.step for entry in self.manager._directory.entries()]
