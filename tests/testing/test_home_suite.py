"""The conformance suite for homes, with a home in memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from freetrain_parsl.storage.home import ResultStatus
from freetrain_parsl.testing.home_suite import HomeConformance

if TYPE_CHECKING:
    from collections.abc import Iterable

    from freetrain_parsl.storage.home import Home

_LEASE = 100.0


@dataclass
class World:
    """What two sites share, and their checkpoint directories."""

    now: float = 0.0
    owners: dict[str, tuple[str, float]] = field(default_factory=dict)  # training -> site, and until when
    home: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    saved: dict[tuple[str, str], tuple[int, bytes]] = field(default_factory=dict)


class MemoryHome:
    """A home in memory. Everything happens in `work`."""

    def __init__(self, world: World, site: str) -> None:
        self._world, self._site = world, site
        self._stages: dict[str, str] = {}
        self._lost: set[str] = set()
        self._free: set[str] = set()

    def work(self) -> None:
        world = self._world
        for name in self._free:
            self._release(name)
        self._free.clear()
        for name, stage in self._stages.items():
            owner, end = world.owners.get(name, ("", 0.0))
            owns = owner == self._site and world.now <= end
            if stage == "wanted" and (not owner or owner == self._site or world.now > end):
                world.owners[name] = self._site, world.now + _LEASE
                if name in world.home:
                    world.saved[self._site, name] = max(
                        world.home[name], world.saved.get((self._site, name), (-1, b""))
                    )
                self._stages[name] = "ready"
            elif stage in ("ready", "finished", "leaving") and not owns:
                self._lost.add(name)
            elif stage in ("ready", "finished", "leaving"):
                world.owners[name] = self._site, world.now + _LEASE
                if stage != "ready":
                    if (self._site, name) in world.saved:
                        world.home[name] = world.saved[self._site, name]
                    self._stages[name] = "over"
                    self._release(name)

    def _release(self, name: str) -> None:
        if self._world.owners.get(name, ("", 0.0))[0] == self._site:
            del self._world.owners[name]

    def want(self, trainings: Iterable[str]) -> None:
        self._stages.update(dict.fromkeys(trainings, "wanted"))

    def abandon(self, trainings: Iterable[str]) -> None:
        self._free.update(trainings)

    def leave(self, training: str) -> None:
        self._stages[training] = "leaving" if self._stages[training] == "ready" else "over"

    def has_left(self, training: str) -> bool:
        return self._stages.get(training, "over") == "over"

    def is_ready(self, training: str) -> bool:
        return self._stages[training] == "ready" and training not in self._lost

    def lost(self, training: str) -> str:
        return "the lease is over" if training in self._lost else ""

    def stopped(self, training: str) -> None:
        self._lost.discard(training)
        self._stages[training] = "wanted"

    def finished(self, training: str) -> ResultStatus:
        if training in self._lost:
            return ResultStatus.LOST
        if self._stages[training] == "ready":
            self._stages[training] = "finished"
        return ResultStatus.CONFIRMED if self._stages[training] == "over" else ResultStatus.PENDING

    def remark(self, training: str) -> str:
        return "another site owns it" if self._stages[training] == "wanted" else ""

    def lines(self) -> list[str]:
        return [f"{name} {stage}" for name, stage in self._stages.items()]

    @property
    def settled(self) -> bool:
        return "finished" not in self._stages.values()


class TestMemoryHome(HomeConformance):
    """A home that conforms."""

    @pytest.fixture(autouse=True)
    def world(self) -> None:
        self._world = World()

    def make(self, site: str) -> Home:
        return MemoryHome(self._world, site)

    def work(self, home: Home) -> None:
        assert isinstance(home, MemoryHome)
        home.work()
        self._world.now += 1.0

    def pass_lease(self) -> None:
        self._world.now += 2 * _LEASE

    def save(self, site: str, training: str, step: int, content: bytes) -> None:
        self._world.saved[site, training] = step, content

    def content(self, site: str, training: str) -> bytes:
        return self._world.saved[site, training][1]
