"""The conformance suite for homes, with the mover and the real Globus SDK."""

from __future__ import annotations

import pytest

from freetrain_parsl.extensions.globus.storage.mover import Mover
from freetrain_parsl.testing.home_suite import HomeConformance
from tests.extensions.globus.storage.conftest import LEASE

pytestmark = [pytest.mark.globus, pytest.mark.smoke]


class TestMover(HomeConformance):
    """The mover is a home."""

    @pytest.fixture(autouse=True)
    def in_world(self, world):
        self._world = world

    def make(self, site):
        return self._world.mover(site)

    def work(self, home):
        assert isinstance(home, Mover)
        home.turn()
        self._world.machine_idle()
        self._world.clock.now += 1.0

    def pass_lease(self):
        self._world.clock.now += 2 * LEASE

    def save(self, site, training, step, content):
        self._world.save(site, training, step, content)

    def content(self, site, training):
        return self._world.content(site, training)
