"""IPv6-only hosts."""

from __future__ import annotations

import pytest

from tests.support.hosts import Hosts

pytestmark = pytest.mark.hosts


def test_a_training_runs_on_hosts_with_ipv6_only(start):
    """Regression: the driver offered 127.0.0.1, and no node ever connected."""
    site = {"login": {"eth0": "fd77::1/64"}, "n00": {"eth0": "fd77::10/64"}, "n01": {"ib0": "fd77::11/64"}}
    with Hosts(site, unresolved=["login"]) as hosts:
        login = start(hosts)
        assert login.started["addresses"] == ["fd77::1"]
        training = login.train("t", 2)
        training.until(2)
        training.finish()
        login.close()
