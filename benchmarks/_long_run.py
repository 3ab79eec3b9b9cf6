"""A long synthetic run: a journal of a day on a thousand nodes with two hundred training jobs."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING

from freetrain_parsl.executor.journal import Journal
from freetrain_parsl.protocol import journal as record
from freetrain_parsl.protocol.reports import Progress

if TYPE_CHECKING:
    from pathlib import Path

_SURVEY = 30.0  # seconds between surveys
_WALLTIME = 3 * 3600.0
_SETTINGS = {"horizon": 120.0}


class LongRun:
    """Writes the journal of a synthetic run, minute by minute.

    Parameters
    ----------
    path
        The journal.
    nodes, training jobs
        Their numbers.
    begin
        Seconds since the epoch.
    seed
        Of everything that is random.
    """

    def __init__(self, path: Path, *, nodes: int, trainings: int, begin: float, seed: int = 0) -> None:
        self.journal = Journal(path)
        self.now = begin
        self._begin = begin
        self._random = random.Random(seed)
        self._nodes = [f"nid{number:06d}" for number in range(1, nodes + 1)]
        self._busy_until = {name: begin + self._random.expovariate(1 / 3600) for name in self._nodes}
        self._idle: set[str] = set()
        self._blocks: dict[str, tuple[list[str], float]] = {}
        self._names = [f"lr-{number:03d}" for number in range(trainings)]
        self._on: dict[str, tuple[list[str], str]] = {}
        self._steps = dict.fromkeys(self._names, 0)
        self._generation = 0
        self._block = 0
        self._write(record.PlannerStarted("", "milp", _SETTINGS))
        for name in self._names:
            self._write(record.TrainingSubmitted(name, 1, 16, 50_000_000))
        self._write(self._step({"type": "trainer_submitted", "trainer": {"name": self._names[0]}}))
        self.journal.commit()

    def advance(self, seconds: float) -> None:
        """Write what happens in some more seconds."""
        end = self.now + seconds
        while self.now < end:
            self.now += _SURVEY
            self._survey()
            self._end_blocks()
            self._start_blocks()
            self._train()
            self.journal.commit()

    def report_progress(self) -> None:
        """Write what the driver writes in a turn with a report of each training job that runs, and commit it."""
        self.now += 0.25
        self._train()
        self.journal.commit()

    def _write(self, entry: record.Record) -> None:
        self.journal.write(self.now, entry)

    def _step(self, *events: dict[str, object], actions: tuple[dict[str, object], ...] = ()) -> record.PlannerStep:
        return record.PlannerStep("", [{"time": self.now, **event} for event in events], list(actions))

    def _survey(self) -> None:
        held = {name for nodes, _ in self._blocks.values() for name in nodes}
        for name in self._nodes:
            if name in held or self._busy_until[name] > self.now:
                continue
            if name in self._idle and self._random.random() < 0.01:
                self._idle.discard(name)
                self._busy_until[name] = self.now + self._random.expovariate(1 / 7200)
            else:
                self._idle.add(name)
        free = sorted(self._idle - held)
        groups = [free[place : place + 40] for place in range(0, len(free), 40)]
        windows = [{"nodes": group, "opens": self.now, "closes": self.now + 7200} for group in groups]
        self._write(record.BatchRequests("", _SURVEY, {"squeue": 1, "scontrol": 1}))
        self._write(self._step({"type": "windows_seen", "windows": windows}))

    def _start_blocks(self) -> None:
        held = {name for nodes, _ in self._blocks.values() for name in nodes}
        free = sorted(self._idle - held)
        while len(free) > 60 and len(self._blocks) < 40:
            nodes, free = free[:16], free[16:]
            self._block += 1
            block = f"ft-{self._block}"
            walltime = self._random.uniform(600, _WALLTIME)
            self._write(record.BlockRequested(block, nodes, walltime, self.now + walltime))
            self._write(record.BlockSubmitted(block, str(100_000 + self._block)))
            self._write(record.BlockStarted(block, nodes, self.now + walltime))
            for name in nodes:
                self._write(record.SlotJoined(f"{name}/0", name, block, 1))
                self._write(record.NodeJoined(name, block, self.now + walltime))
            self._blocks[block] = (nodes, self.now + walltime)
            waiting = [name for name in self._names if name not in self._on][:2]
            for half, name in enumerate(waiting):
                part = nodes[8 * half : 8 * half + 8]
                self._generation += 1
                self._on[name] = (part, block)
                value = 1000.0 + self._generation
                self._write(record.Decision("assign", "milp", {name: 8}, value, proven=True, seconds=0.004))
                action = {"type": "assign", "trainer": name, "nodes": part}
                self._write(self._step({"type": "nodes_joined", "nodes": part}, actions=(action,)))
                self._write(record.Assign(name, part))
                self._write(record.FragmentStarted(name, self._generation, part, in_place=False, paused=0.0))

    def _end_blocks(self) -> None:
        for block, (nodes, ends) in list(self._blocks.items()):
            failed = self._random.random() < 0.0005
            if ends > self.now and not failed:
                continue
            for name in [name for name, (_, where) in self._on.items() if where == block]:
                part, _ = self._on.pop(name)
                self._write(record.FragmentEnded(name, self._generation, part, failed, 100.0))
            self._write(record.BlockEnded(block, nodes, "had a node failure" if failed else "left its window in time"))
            del self._blocks[block]
            for name in nodes:
                self._idle.discard(name)
                self._busy_until[name] = self.now + self._random.expovariate(1 / 1800)

    def _train(self) -> None:
        for place, (name, (nodes, _)) in enumerate(self._on.items()):
            step = self._steps[name] = self._steps[name] + 60
            loss = 0.1 + 2.3 * math.exp(-step / 20_000) + self._random.uniform(0, 0.05)
            report = Progress(step=step, epoch=step // 1000, samples=256 * step, samples_total=50_000_000)
            self.journal.keep_progress(
                self.now,
                name,
                Progress(**{**vars(report), "loss": loss, "rate": 512.0 * len(nodes), "slot_seconds": 1.0 * step}),
            )
            if (self.now - self._begin) // _SURVEY % 8 == place % 8:
                self._write(record.ValuesSampled(name, step, {"loss": loss, "accuracy": 1 - loss / 3}))
            if self._random.random() < 0.02:
                self._write(record.Checkpoint(name, step))
